"""`wrap` and `unwrap`: a plain model becomes a streamed one in place, and a plain one again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from streamer.backends.base import Backend
from streamer.backends.cuda import CudaBackend
from streamer.backends.thread import ThreadBackend
from streamer.engine import op as ops
from streamer.engine.executor import Executor
from streamer.engine.layer import StreamedLayer
from streamer.engine.policies import POLICIES
from streamer.engine.unit import Unit
from streamer.find import Layers, find_layers
from streamer.guards import attach_guards, serve_other_optimizers
from streamer.handle import HANDLE, HOME, Home, Wrapped, home_of, wrapped
from streamer.memory.host import HostStore
from streamer.plan.ledger import ledger
from streamer.units import DTYPES, make_units

M = TypeVar("M", bound=nn.Module)


def wrap(
    model: M,
    *,
    layers: Layers = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    num_slots: int = 2,
    activations: str = "recompute",
    backend: Backend | None = None,
) -> M:
    """Stream the layers of ``model`` from host memory. Changes the model in place and returns it.

    The weights move to host memory; ``num_slots`` buffers on the device, each as large as the largest
    layer, take them in turn. What is in no layer (embeddings, final norm, head) stays on the device.
    Inputs are moved to the device. Class, parameter objects, parameter names and ``state_dict`` keys
    stay as they are. Train it with `streamer.AdamW`.

    Args:
        layers: dotted path of an ``nn.ModuleList`` or ``nn.Sequential``, several paths (an encoder's and
            a decoder's), or None for the list of like blocks with the most parameters.
        device: ``"cuda"``, ``"cuda:1"`` or ``"cpu"`` (threads stand in for a GPU's copy engines); None
            means CUDA where there is one, else the CPU.
        dtype: what parameters are computed in: float32, bfloat16 or float16; None keeps each as it is.
            A trained parameter keeps an exact fp32 master in host memory; a frozen one is rounded for good.
            Buffers keep their dtype.
        num_slots: layers that the device holds at a time: 1 overlaps nothing, 2 is double buffering, as
            many as there are layers keeps all of them there. More than that are not allocated.
        activations: ``"recompute"`` keeps a layer's inputs and runs it again in backward; ``"keep"``
            keeps all that its backward needs.
        backend: runs on this backend in place of the device's own.

    Raises:
        ValueError: for a path, an option or a parameter that cannot be honoured, naming the mend.
        MemoryError: if the device or the host has too little memory, with what each needs and has.
            Both are raised before anything is allocated or changed.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"wrap takes an nn.Module, not a {type(model).__name__}")
    if any(home_of(param) is not None for param in model.parameters()):
        raise ValueError("this model, or a part of it, is wrapped already: call streamer.unwrap on it first")
    if not isinstance(num_slots, int) or isinstance(num_slots, bool) or num_slots < 1:
        raise ValueError(
            f"num_slots={num_slots!r}: it must be an integer of 1 or more; 2 overlaps copies and compute"
        )
    if activations not in POLICIES:
        raise ValueError(
            f"activations={activations!r} is unknown: use one of {', '.join(map(repr, POLICIES))}"
        )
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(
            f"dtype={dtype!r} cannot be streamed: use torch.float32, torch.bfloat16 or torch.float16"
        )
    units, root = make_units(model, find_layers(model, layers), dtype)
    num_slots = min(num_slots, len(units))
    if backend is None:
        _check_materialised(model)
        backend = _backend(device)
    try:
        planned = ledger(units, root, num_slots=num_slots)
        planned.check(
            device_available=backend.device_available(),
            host_available=backend.host_available(),
            shared=backend.device.type == "cpu",
        )
        plain_dtypes = {param: param.dtype for param in model.parameters()}
        store = HostStore([unit.layout for unit in (*units, root)], backend.host_buffer)
        executor = _move_in(backend, units, root, store, num_slots=num_slots)
    except BaseException:
        backend.close()
        raise
    for unit in units:
        # an instance attribute: __call__ and the user's hooks run around it as before
        unit.module.forward = StreamedLayer(executor, unit, activations)
    take_off = attach_guards(model, executor)
    close = weakref.finalize(model, _close, backend, serve_other_optimizers(executor))
    model.__dict__[HANDLE] = Wrapped(executor, planned, plain_dtypes, take_off, close)
    return model


def unwrap(model: M) -> M:
    """Make ``model`` a plain CPU module again, with the trained weights, and give its memory back.

    Parameters get the dtype that they had before `wrap`, from their exact masters; gradients are
    dropped, and what an optimizer holds for the model is of no more use. Returns the model.

    Raises ValueError if the model is not wrapped.
    """
    handle = wrapped(model)
    executor = handle.executor
    # copies to the device may have failed without harm to what is here
    executor.issuer.wait(ops.shard(unit.index) for unit in (*executor.units, executor.root))
    executor.weights.refresh()
    virtual = executor.backend.device.type == "meta"
    for unit in (*executor.units, executor.root):
        shard = executor.shard(unit)
        unit.restore()
        for slice, param in zip(unit.layout.slices, unit.params, strict=True):
            param.grad = None
            if not virtual:
                param.data = executor.backend.on_host(partial(shard.exact, slice))
            param.data = param.data.to(handle.plain_dtypes[param])
            del param.__dict__[HOME]
        for owner, name in unit.buffer_owners:
            if (buffer := owner._buffers[name]) is not None:
                owner._buffers[name] = buffer if virtual else buffer.cpu()
        if unit is not executor.root:
            del unit.module.__dict__["forward"]
    handle.take_off()
    handle.close()
    del model.__dict__[HANDLE]
    return model


def _close(backend: Backend, end_service: Callable[[], None]) -> None:
    end_service()
    backend.close()


def _backend(device: torch.device | str | None) -> Backend:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device='{device}' is not supported: use 'cuda' or 'cpu'") from None
    if place.type == "cpu":
        return ThreadBackend()
    if place.type != "cuda":
        raise ValueError(f"device='{place}' is not supported: use 'cuda' or 'cpu'")
    if not torch.cuda.is_available():
        raise ValueError(f"device='{place}': PyTorch finds no CUDA device here; use device='cpu' or None")
    return CudaBackend(place)


def _check_materialised(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if param.is_meta:
            raise ValueError(
                f"parameter '{name}' is on the meta device and has no values: build the model on the CPU"
            )


def _move_in(
    backend: Backend, units: list[Unit], root: Unit, store: HostStore, *, num_slots: int
) -> Executor:
    """Copy the weights into the host store, releasing each unit's own storage as it is done."""
    virtual = backend.device.type == "meta"
    for unit, shard in zip((*units, root), store.shards, strict=True):
        for slice, param in zip(unit.layout.slices, unit.params, strict=True):
            if not virtual:
                # brought here on the caller's own stream, which knows when it was written
                backend.on_host(partial(shard.load, slice, param.detach().cpu()))
            param.grad = None
            if unit is not root:
                param.data = slice.view(shard.weight)
        for owner, name in unit.buffer_owners:
            if (buffer := owner._buffers[name]) is not None:
                owner._buffers[name] = buffer.to(backend.device)
    executor = Executor(backend, units, root, store, num_slots=num_slots)
    executor.issuer.synchronize()
    for slice, param in zip(root.layout.slices, root.params, strict=True):
        param.data = slice.view(executor.weights.root_buffer)
    for unit in (*units, root):
        for slice, param in zip(unit.layout.slices, unit.params, strict=True):
            param.__dict__[HOME] = Home(executor, unit, slice)
    return executor
