"""Gradients: filled in a slot on the device, paged out, added up on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import streamer_native as native
from streamer.engine import op as ops
from streamer.engine.guarded import as_plain
from streamer.engine.held import FP32, Held, is_summed
from streamer.engine.issuer import Issuer
from streamer.engine.op import ROOT
from streamer.engine.unit import Unit
from streamer.memory.host import HostStore, array
from streamer.memory.layout import Stretch
from streamer.memory.purposes import SUMS, host_bytes
from streamer.memory.slots import GradientSlots, num_grad_slots

#: The sum of squares of a unit's gradient: on the device, or known when the host has added it up.
Squares = torch.Tensor | Callable[[], float]


class Gradients:
    """The gradient slots of the layers, and the root unit's own gradient buffer.

    A layer's ``p.grad`` is a view of its host gradient, the root's of its buffer on the device. With
    ``sum_in_fp32`` several gradients of a shorter dtype are added up in fp32: see [Note: sums].
    """

    def __init__(
        self,
        issuer: Issuer,
        units: Sequence[Unit],
        root: Unit,
        store: HostStore,
        *,
        num_slots: int,
        sum_in_fp32: bool,
    ) -> None:
        self._nbytes = max(unit.layout.grad_nbytes for unit in units)
        self.slots = GradientSlots(num_grad_slots(num_slots), self._nbytes, issuer.backend.device_buffer)
        self.root_buffer = issuer.backend.device_buffer(root.layout.grad_nbytes)
        self.root_sums = issuer.backend.device_buffer(0)
        #: what the held gradients of layers are still to be multiplied by
        self.scale = 1.0
        self._issuer = issuer
        self._units = units
        self._root = root
        self._store = store
        self._staging: list[torch.Tensor] = []
        self.held = {
            unit.index: Held(
                unit,
                store.shards[unit.index].gradient,
                make_sums=partial(self._sums, unit) if sum_in_fp32 else None,
                before_write=partial(self._before_write, unit),
            )
            for unit in units
        }
        self.held[ROOT] = Held(
            root,
            self.root_buffer,
            make_sums=self._sums_of_root if sum_in_fp32 else None,
            before_write=self._before_writing_root,
        )

    @as_plain
    def offload(self, unit: Unit, slot: int, used: Sequence[bool], squares: torch.Tensor) -> Squares | None:
        """Page out the gradient in ``slot``; ``used`` says which trainable parameters have one, ``squares``
        is its sum of squares.

        It becomes ``p.grad``, or is added to it where there is one already, as autograd would. Returns
        the sum of squares of what ``p.grad`` then is, or None where that is not known.
        """
        held = self.held[unit.index]
        if held.foreign():
            self.adopt_all()
        has_grad = [param.grad is not None for _, param in held.pairs()]
        if any(has_grad):
            return self._accumulate(unit, slot, used, has_grad)
        held.leave_to_keepers(1.0)
        nbytes = unit.layout.grad_nbytes
        source = self.slots.buffers[slot][:nbytes]
        gradient = self._gradient(unit)
        op = ops.offload_grad(unit.index, slot, nbytes)
        self._issuer.issue(op, lambda: self._issuer.backend.copy(gradient, source))
        self._show(unit, used)
        return squares

    def release(self) -> None:
        """Give up all gradients and their slots."""
        self.slots.buffers.clear()
        self.root_buffer = self.root_sums = torch.empty(0, dtype=torch.uint8)
        self._staging.clear()
        self.held.clear()

    @as_plain
    def offload_root(self) -> None:
        """Page out the root unit's gradient."""
        root = self.held[ROOT]
        root.adopt(root.foreign())
        self._issuer.compute(ops.collect(), lambda: None)
        shard = self._store.shards[ROOT]
        pairs = [(shard.gradient, self.root_buffer)]
        if any(is_summed(param) for param in self._root.params):
            pairs.append((shard.sums.view(torch.uint8), self.root_sums))

        def copy() -> None:
            for into, source in pairs:
                self._issuer.backend.copy(into, source)

        self._issuer.issue(ops.offload_grad(ROOT, ROOT, sum(into.nbytes for into, _ in pairs)), copy)

    @as_plain
    def adopt_all(self) -> None:
        """`Held.adopt` for all layers, none written before all are read: they may have been exchanged."""
        foreign = {unit.index: self.held[unit.index].foreign() for unit in self._units}
        for index, gradients in foreign.items():
            self.held[index].adopt(gradients)

    @as_plain
    def rescale(self, factor: float) -> None:
        """Multiply all gradients by ``factor``: the root's at once, the layers' when they are next used.

        The root's cannot wait, since autograd adds to them before any layer's backward is asked for.
        """
        self.scale *= factor
        held = [param.grad for param in self._root.params if param.grad is not None]
        if held:
            self._before_writing_root()
        for gradient in held:
            gradient.mul_(factor)

    @as_plain
    def settle_scale(self) -> None:
        """Apply `scale` to the gradients that are held: others, unscaled, are about to join them.

        An update does not settle it: as in PyTorch, gradients stay clipped until they are dropped.
        """
        scale, self.scale = self.scale, 1.0
        if scale != 1.0:
            for unit in self._units:
                self.held[unit.index].leave_to_keepers(scale)
        held = [
            param.grad
            for unit in (self._units if scale != 1.0 else ())
            for slice, param in self.held[unit.index].pairs()
            if param.grad is not None and self.held[unit.index].is_ours(slice, param)
        ]
        if held:
            self._issuer.wait((ops.gradient(unit.index) for unit in self._units), to_write=True)
            for gradient in held:
                gradient.mul_(scale)

    def finish(self) -> None:
        """Block until the gradients of all layers are in host memory, where ``p.grad`` shows them."""
        self._issuer.wait(ops.gradient(unit.index) for unit in self._units if unit.layout.grad_nbytes)

    @as_plain
    def _accumulate(
        self, unit: Unit, slot: int, used: Sequence[bool], has_grad: Sequence[bool]
    ) -> Callable[[], float] | None:
        """Add what is in ``slot`` to the gradients there are, in one pass over each."""
        held = self.held[unit.index]
        held.leave_to_keepers(1.0)
        pairs = list(held.pairs())
        both = [is_used and has for is_used, has in zip(used, has_grad, strict=True)]
        summed = [is_summed(param) for _, param in pairs]
        short = [held.sums_in_fp32(param) for _, param in pairs]
        begin = [b and s and not already for b, s, already in zip(both, short, summed, strict=True)]
        add_to_sum = [b and already for b, already in zip(both, summed, strict=True)]
        in_place = [b and not x and not y for b, x, y in zip(both, begin, add_to_sum, strict=True)]
        new = [is_used and not has for is_used, has in zip(used, has_grad, strict=True)]

        staged = self._stage(unit, slot)
        gradient = self._gradient(unit)
        sums = self._sums(unit).data if any(begin) or any(add_to_sum) else gradient
        stretches = unit.layout.stretches
        squares: list[float] = []

        def accumulate() -> None:
            for s in stretches(begin):
                squares.append(native.add(array(s.state(sums)), *_arrays(s, gradient, staged)))
            for s in stretches(add_to_sum):
                squares.append(native.accumulate(array(s.state(sums)), *_arrays(s, staged)))
            for s in stretches(in_place):
                squares.append(native.accumulate(*_arrays(s, gradient, staged)))
            for s in stretches(new):
                s.view(gradient).copy_(s.view(staged))

        # reads the staged gradient and the host gradient, writes the latter
        self._issuer.issue(ops.accumulate(unit.index, slot, 3 * unit.layout.grad_nbytes), accumulate)
        for (slice, param), begins in zip(pairs, begin, strict=True):
            if begins:
                held.show(slice, param, summed=True)
        self._show(unit, new)
        return (lambda: sum(squares)) if both == has_grad and not any(new) else None

    def _stage(self, unit: Unit, slot: int) -> torch.Tensor:
        """Page out ``slot`` to the staging buffer of the same number."""
        if not self._staging:
            self._check_host({"gradient staging": len(self.slots.buffers) * self._nbytes})
            self._staging = self._store.staging(len(self.slots.buffers), self._nbytes)
        nbytes = unit.layout.grad_nbytes
        staged, source = self._staging[slot][:nbytes], self.slots.buffers[slot][:nbytes]
        op = ops.stage_grad(unit.index, slot, slot, nbytes)
        self._issuer.issue(op, lambda: self._issuer.backend.copy(staged, source))
        return staged

    @as_plain
    def _show(self, unit: Unit, which: Sequence[bool]) -> None:
        """Let the gradient that has just been paged out be ``p.grad``, where there is none."""
        held = self.held[unit.index]
        for (slice, param), is_new in zip(held.pairs(), which, strict=True):
            if is_new and param.grad is None:
                held.show(slice, param, summed=False)

    def _gradient(self, unit: Unit) -> torch.Tensor:
        # .data: a version counter of its own, so that our writes are not taken for the user's
        return self._store.shards[unit.index].gradient.data

    def _sums(self, unit: Unit) -> torch.Tensor:
        """The fp32 sums of ``unit`` in host memory, for which all units get room when the first needs it."""
        shard = self._store.shards[unit.index]
        if SUMS.name not in shard.held:
            # without gradients of layers on the host there is nothing to add to them either
            holders = [shard for shard in self._store.shards if shard.gradient.numel()]
            self._check_host(host_bytes([shard.layout for shard in holders], [SUMS]))
            self._store.add([SUMS], only=holders)
        return shard.sums

    def _sums_of_root(self) -> torch.Tensor:
        """The root's fp32 sums, on the device; where they leave to is made room for too."""
        if not self.root_sums.numel():
            self._sums(self._root)
            self.root_sums = self._issuer.backend.device_buffer(4 * self._root.layout.state_numel)
        return self.root_sums.view(FP32)

    def _check_host(self, wanted: dict[str, int]) -> None:
        needed, available = sum(wanted.values()), self._issuer.backend.host_available()
        if needed > available:
            raise MemoryError(
                f"a second backward before the step needs {needed} bytes more of host memory "
                f"({', '.join(wanted)}) and {available} are free: wrap with grad_dtype=None to add gradients "
                "up in the parameters' own dtype, or with a larger batch in place of several"
            )

    def before_access(self, unit: Unit, *, in_use: bool) -> None:
        """Return when the user's code may read and write the gradient of ``unit``; ``in_use`` says whether an
        update may be reading it."""
        if self.scale != 1.0:
            self.settle_scale()
        if in_use:
            self.held[unit.index].before_write()

    def _before_writing_root(self) -> None:
        # no need to block: what the caller's thread does on the device comes after
        self._issuer.issue(ops.sync((ops.grad_slot(ROOT),), to_write=True), lambda: None)

    def _before_write(self, unit: Unit) -> None:
        self.settle_scale()
        self._issuer.wait((ops.gradient(unit.index),), to_write=True)


def _arrays(stretch: Stretch, *buffers: torch.Tensor) -> list[Any]:
    """A stretch of each of these gradient buffers as the kernels take it."""
    return [array(stretch.view(buffer)) for buffer in buffers]
