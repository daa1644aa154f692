"""Planned bytes are allocated bytes, exactly: over models, dtypes, layouts, slots and policies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import streamer
from models.gpt2 import GPT
from streamer.backends.base import Backend
from streamer.backends.thread import ThreadBackend
from streamer.backends.virtual import VirtualBackend
from streamer.engine.handle import wrapped
from streamer.optim.state import parse_state_dtype
from streamer.planner.machine import GIB, Machine
from streamer.store.ledger import least_moments
from streamer.store.purposes import MOMENTS, SAVED_INPUTS, SUMS, host_bytes
from tests.reference import pairwise

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MACHINE = Machine("any", 1e12, 1e9, 1e9, 1e9, GIB, GIB)


class Layer(nn.Module):
    """Shapes that fill no multiple of the alignment, and buffers, one of them everybody's."""

    def __init__(self, width: int, shared: torch.Tensor) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, width), nn.Linear(width, 5, bias=False)
        self.register_buffer("own", torch.ones(width))
        self.register_buffer("shared", shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)) * self.own.to(x)) * self.shared.to(x)


class Uneven(nn.Module):
    """Two lists of layers, each of another size."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        shared = torch.ones(5)
        self.embed = nn.Embedding(11, 5)
        self.encoder = nn.ModuleList(Layer(width, shared) for width in (3, 17, 1))
        self.decoder = nn.ModuleList(Layer(width, shared) for width in (7, 9))
        self.head = nn.Linear(5, 11)
        self.register_buffer("scale", torch.ones(3, dtype=torch.float64))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in (*self.encoder, *self.decoder):
            x = layer(x)
        return self.head(x)


class Tied(nn.Sequential):
    """Layers in which two modules share a weight; those of odd numbers are in bf16."""

    def __init__(self, tied: bool) -> None:
        def layer(number: int) -> nn.Module:
            first, second = nn.Linear(6, 6), nn.Linear(6, 6)
            if tied:
                second.weight = first.weight
            return Casting(first, nn.Tanh(), second).to(BF16 if number % 2 else FP32)

        super().__init__(nn.Embedding(11, 6), nn.Sequential(*map(layer, range(4))), nn.Linear(6, 11))


class Casting(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self[0].weight.dtype)).to(x.dtype)


MODELS = {
    "gpt": lambda tied: GPT(vocab_size=11, block_size=8, n_layer=4, n_head=2, n_embd=6, tied=tied),
    "uneven": Uneven,
    "tied": Tied,
}
LAYERS: dict[str, Any] = {"gpt": "transformer.h", "uneven": ("encoder", "decoder"), "tied": "1"}
#: Whether a parameter is frozen, by its number and its name.
FROZEN = {
    "none": lambda number, name: False,
    "all but one of each layer": lambda number, name: (
        not name.endswith(("c_fc.bias", "up.weight", "0.weight"))
    ),
    "every other": lambda number, name: number % 2 == 0,
    "layers": lambda number, name: name.startswith(("transformer.h.", "encoder", "decoder", "1.")),
    "rest": lambda number, name: not name.startswith(("transformer.h.", "encoder", "decoder", "1.")),
    "all": lambda number, name: True,
}
AXES: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "tied": (True, False),
    "dtype": (None, FP32, BF16, FP16),
    "frozen": tuple(FROZEN),
    "num_slots": (None, 1, 2, 3, 99),
    "activations": ("recompute", "recompute+offload", "keep"),
    "update": ("step", "backward"),
    "micro_batch_size": (None, 1),
    "grad_dtype": (FP32, None),
    "state_dtype": ("float32", "bfloat16", "int8"),
}


@dataclass(frozen=True)
class Case:
    model: str
    tied: bool
    dtype: torch.dtype | None
    frozen: str
    num_slots: int | None
    activations: str
    update: str
    micro_batch_size: int | None
    grad_dtype: torch.dtype | None
    state_dtype: str

    @property
    def is_possible(self) -> bool:
        if self.dtype is FP16 and self.update == "backward":
            return False
        return self.state_dtype == "float32" or self.dtype is BF16

    def build(self, device: torch.device) -> nn.Module:
        with device:
            model = MODELS[self.model](self.tied)
        for number, (name, param) in enumerate(model.named_parameters()):
            param.requires_grad_(not FROZEN[self.frozen](number, name))
        return model


CASES = pairwise(Case, AXES, lambda case: case.is_possible)


class Counted:
    """Mixed into a backend: the bytes that it has been asked for, and those of the host to be pinned."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.device_taken = self.host_taken = self.pinned = 0

    def device_buffer(self, nbytes: int) -> torch.Tensor:
        self.device_taken += nbytes
        return sized(super().device_buffer(nbytes), nbytes)

    def host_buffer(self, nbytes: int, *, pinned: bool = True) -> torch.Tensor:
        self.host_taken += nbytes
        self.pinned += nbytes * pinned
        return sized(super().host_buffer(nbytes, pinned=pinned), nbytes)

    def host_reserve(self, nbytes: int) -> torch.Tensor:
        counts = self.host_taken + nbytes, self.pinned
        buffer = sized(super().host_reserve(nbytes), nbytes)
        self.host_taken, self.pinned = counts  # it may have asked for a host_buffer
        return buffer

    def pin(self, buffer: torch.Tensor) -> None:
        self.pinned += buffer.numel()
        super().pin(buffer)


def sized(buffer: torch.Tensor, nbytes: int) -> torch.Tensor:
    assert buffer.untyped_storage().nbytes() == buffer.numel() == nbytes
    return buffer


class CountedThreads(Counted, ThreadBackend):
    pass


class CountedVirtual(Counted, VirtualBackend):
    pass


@contextmanager
def streamed(case: Case, backend: Backend) -> Iterator[nn.Module]:
    model = streamer.wrap(
        case.build(backend.device),
        layers=LAYERS[case.model],
        backend=backend,
        **{
            name: getattr(case, name)
            for name in ("dtype", "num_slots", "activations", "update", "micro_batch_size", "grad_dtype")
        },
    )
    try:
        yield model
    finally:
        wrapped(model).close()


def buffer_storages(model: nn.Module) -> dict[int, int]:
    storages = [buffer.untyped_storage() for buffer in model.buffers()]
    return {storage._cdata: storage.nbytes() for storage in storages}


def present(amounts: dict[str, int]) -> dict[str, int]:
    return {name: nbytes for name, nbytes in amounts.items() if nbytes}


def check(case: Case, backend: Counted, *, train: bool) -> None:
    """Of `wrap`, of the optimizer, and of what several backwards and a step take on top."""
    with streamed(case, backend) as model:
        planned, executor = wrapped(model).planned, wrapped(model).executor
        device, host, pinned = dict(planned.device), dict(planned.host), planned.pinned_host_bytes
        in_buffers = sum(buffer_storages(model).values())
        assert device.get("buffers", 0) == in_buffers

        def check_held(saved: int = 0) -> None:
            stats = streamer.stats(model)
            assert (stats.device_bytes, stats.host_bytes) == (device, present({**host, SAVED_INPUTS: saved}))
            assert backend.device_taken == sum(device.values()) - in_buffers
            assert backend.host_taken == sum(host.values()) + saved
            assert backend.pinned == pinned + saved

        check_held()
        layouts = [shard.layout for shard in executor.store.shards]
        optimizer = streamer.AdamW(model.parameters(), state_dtype=case.state_dtype)
        moments = present(host_bytes(layouts, MOMENTS[parse_state_dtype(case.state_dtype)]))
        assert sum(least_moments(layouts, executor.store.division).values()) <= sum(moments.values())
        host |= moments
        check_held()
        if case.frozen == "all" or not train:
            return
        device_of = backend.device
        for backward in range(1 if case.update == "backward" else 2):
            model(torch.zeros(2, 4, dtype=torch.long, device=device_of)).float().sum().backward()
            if backward:
                num_slots = min(2, len(executor.pager.training.slots.buffers))
                largest = max(unit.layout.grad_nbytes for unit in executor.units)
                more = {"gradient staging": num_slots * largest}
                if case.grad_dtype is not None:
                    more |= host_bytes(layouts, [SUMS])
                    of_root = present({"root gradients": 4 * SUMS.numel(executor.root.layout)})
                    device = dict(Counter(device) + Counter(of_root))
                host |= present(more)
                pinned += sum(more.values())
            check_held(saved=executor.inputs.places.nbytes)
        optimizer.step()
        check_held(saved=executor.inputs.places.nbytes)


def test_a_buffer_that_layers_share_is_given_values_once() -> None:
    with torch.device("meta"):
        model = Uneven(tied=True)

    def init(module: nn.Module) -> None:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.data.fill_(0.5)

    streamer.wrap(model, layers=LAYERS["uneven"], device="cpu", init=init)
    assert sum(buffer_storages(model).values()) == wrapped(model).planned.device["buffers"]
    assert len({layer.shared for layer in (*model.encoder, *model.decoder)}) == 1
    assert bool((model.decoder[1].shared == 0.5).all())
    streamer.unwrap(model)


@pytest.mark.parametrize(("kind", "trained"), [("thread", 4), ("virtual", 12)])
def test_planned_bytes_are_allocated_bytes(kind: str, trained: int) -> None:
    """One in ``trained`` cases is trained too: on meta tensors that takes long."""
    for number, case in enumerate(CASES):
        backend = CountedThreads() if kind == "thread" else CountedVirtual(MACHINE)
        try:
            check(case, backend, train=number % trained == 0)
        except Exception as error:
            error.add_note(str(case))
            raise
