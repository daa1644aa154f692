"""What `streamer calibrate` runs: products, attention, activations, copies and updates, as in a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import streamer_native as native
from streamer.backends.base import Backend, Lane
from streamer.host_adam import Run, update_bytes, update_shard
from streamer.memory.host import HostStore
from streamer.memory.layout import Layout, Param
from streamer.memory.purposes import FP32, GRADIENTS, MOMENTS

Work = Callable[[], object]

#: Host buffers to go through before coming back to the first: what was copied just now would be in a cache.
HOST_BUFFERS = 4
#: How often what is small is run in a row.
REPEATS = 20


@dataclass(frozen=True)
class Sizes:
    """What is measured: products of ``tokens`` with each of ``weights`` [out, in], activations of ``hidden``
    features, attention over ``context`` tokens in heads of ``head``, all in ``dtype``; copies of
    ``copy_bytes``; updates of ``parameters``. A piece of work is repeated for ``seconds`` at least."""

    dtype: torch.dtype
    tokens: int
    weights: tuple[tuple[int, int], ...]
    hidden: int
    context: int
    head: int = 64
    copy_bytes: int = 32 << 20
    parameters: int = 16_000_000
    seconds: float = 0.08


def computing(backend: Backend, sizes: Sizes) -> dict[str, Work]:
    """Work for COMPUTE, forward and backward, by name: *products*, *attention*, *activations*, *small*
    operations, a *block* of the first three, and *fp32 products* where the dtype is another."""
    products = _products(backend, sizes, sizes.dtype)
    attention = _attention(backend, sizes)
    activations = _activations(backend, sizes)
    works: dict[str, Work] = {
        "products": products,
        "attention": attention,
        "activations": activations,
        "small": _small(backend, sizes),
        "block": lambda: (products(), attention(), activations()),
    }
    if sizes.dtype != torch.float32:
        works["fp32 products"] = _products(backend, sizes, torch.float32)
    return works


def _products(backend: Backend, sizes: Sizes, dtype: torch.dtype) -> Work:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=backend.device).to(dtype)

    tokens = sizes.tokens
    operands = [(random(tokens, in_), random(out, in_), random(tokens, out)) for out, in_ in sizes.weights]

    def run() -> None:
        for x, weight, grad in operands:
            torch.mm(x, weight.t())
            torch.mm(grad, weight)
            torch.mm(grad.t(), x)

    return run


def _attention(backend: Backend, sizes: Sizes) -> Work:
    heads = max(1, sizes.hidden // sizes.head)
    shape = (max(1, sizes.tokens // sizes.context), heads, sizes.context, sizes.head)
    leaves = [torch.randn(shape, device=backend.device).to(sizes.dtype).requires_grad_() for _ in range(3)]
    grad = torch.randn(shape, device=backend.device).to(sizes.dtype)

    def run() -> None:
        query, key, value = leaves
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(mixed, leaves, grad)

    return run


def _activations(backend: Backend, sizes: Sizes) -> Work:
    """What a layer does beside its products: a norm and a residual sum, and a GELU four times as wide."""
    norm = nn.LayerNorm(sizes.hidden, device=backend.device, dtype=sizes.dtype)
    x, wide = (
        torch.randn(sizes.tokens, features, device=backend.device).to(sizes.dtype).requires_grad_()
        for features in (sizes.hidden, 4 * sizes.hidden)
    )
    grad, wide_grad = torch.randn_like(x), torch.randn_like(wide)

    def run() -> None:
        torch.autograd.grad(x + norm(x), [x, *norm.parameters()], grad)
        torch.autograd.grad(F.gelu(wide, approximate="tanh"), wide, wide_grad)

    return run


def _small(backend: Backend, sizes: Sizes) -> Work:
    """Operations that take hardly longer than their launch."""
    features = 8
    mlp = nn.Sequential(nn.LayerNorm(features), nn.Linear(features, features), nn.GELU())
    mlp.to(device=backend.device, dtype=sizes.dtype)
    x = torch.randn(4, features, device=backend.device).to(sizes.dtype).requires_grad_()
    grad = torch.randn_like(x)

    def run() -> None:
        for _ in range(REPEATS):
            torch.autograd.grad(mlp(x) + x, [x, *mlp.parameters()], grad)

    return run


def copies(backend: Backend, lane: Lane, nbytes: int) -> Work:
    """The next of the lane's copies of ``nbytes`` between page-locked host memory and the device."""
    on_device = backend.device_buffer(nbytes)
    hosts = [backend.host_buffer(nbytes) for _ in range(HOST_BUFFERS)]
    for host in hosts:
        host.fill_(1)  # pages that were never written may all be one page of zeros
    in_turn = itertools.cycle(hosts)

    def run() -> None:
        host = next(in_turn)
        into, source = (on_device, host) if lane is Lane.H2D else (host, on_device)
        backend.copy(into, source)

    return run


def update(backend: Backend, sizes: Sizes) -> tuple[int, Work]:
    """The bytes that an update of ``sizes.parameters`` moves, and that update, for HOST."""
    layout = Layout.of([Param("", (sizes.parameters,), sizes.dtype, True)])
    store = HostStore([layout], backend.host_buffer)
    store.add([GRADIENTS, *MOMENTS[FP32]])
    (shard,) = store.shards
    hyper = native.Hyper(1e-6, 0.9, 0.95, 1e-8, 0.1, 1)
    runs = [Run.of(slice, hyper) for slice in layout.trainable]

    def run() -> None:
        update_shard(shard, runs, FP32, 1.0)

    return update_bytes(runs), run
