"""Gradients: filled in a slot on the device, paged out, added up on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from streamer.engine import op as ops
from streamer.engine.issuer import Issuer
from streamer.engine.op import ROOT
from streamer.engine.unit import Unit
from streamer.memory.host import HostStore
from streamer.memory.slots import GradientSlots


def num_grad_slots(num_slots: int) -> int:
    """Gradient slots beside ``num_slots`` weight slots: one is filled while another leaves."""
    return min(num_slots, 2)


class Gradients:
    """The gradient slots of the layers, and the root unit's own gradient buffer.

    A layer's ``p.grad`` is a view of its host gradient, the root's of its buffer on the device.
    """

    def __init__(
        self, issuer: Issuer, units: Sequence[Unit], root: Unit, store: HostStore, *, num_slots: int
    ) -> None:
        nbytes = max(unit.layout.grad_nbytes for unit in units)
        self.slots = GradientSlots(num_grad_slots(num_slots), nbytes, issuer.backend.device_buffer)
        self.root_buffer = issuer.backend.device_buffer(root.layout.grad_nbytes)
        #: what the held gradients of layers are still to be multiplied by
        self.scale = 1.0
        self._issuer = issuer
        self._units = units
        self._root = root
        self._store = store
        self._staging: list[torch.Tensor] = []

    def offload(self, unit: Unit, slot: int, used: Sequence[bool]) -> bool:
        """Page out the gradient in ``slot``; ``used`` says which trainable parameters have one.

        It becomes ``p.grad``, or is added to it where there is one already, as autograd would. Returns
        whether it is now the whole gradient of the unit.
        """
        self.adopt(unit)
        trainable = unit.layout.trainable
        held = [param.grad is not None for param in unit.params[: len(trainable)]]
        nbytes = unit.layout.grad_nbytes
        source = self.slots.buffers[slot][:nbytes]
        # .data: a version counter of its own, so that our writes are not taken for the user's
        gradient = self._store.shards[unit.index].gradient.data
        if not any(held):
            op = ops.offload_grad(unit.index, slot, nbytes)
            self._issuer.issue(op, lambda: self._issuer.backend.copy(gradient, source))
        else:
            self._accumulate(unit, slot, used, held)
        for slice, param, is_used in zip(trainable, unit.params, used, strict=False):
            if is_used and param.grad is None:
                param.grad = slice.view(self._store.shards[unit.index].gradient)
        return not any(held)

    def offload_root(self) -> None:
        """Page out the root unit's gradient."""
        self._issuer.compute(ops.collect(), lambda: self.adopt(self._root))
        into = self._store.shards[ROOT].gradient
        op = ops.offload_grad(ROOT, ROOT, into.numel())
        self._issuer.issue(op, lambda: self._issuer.backend.copy(into, self.root_buffer))

    def adopt_all(self) -> None:
        """`adopt` for all layers."""
        for unit in self._units:
            self.adopt(unit)

    def adopt(self, unit: Unit) -> None:
        """Bring gradients that were put in place of ours (``p.grad = ...``) into our buffer."""
        for view, param in self._views(unit):
            if param.grad is not None and param.grad.data_ptr() != view.data_ptr():
                if unit.index != ROOT:
                    self.settle_scale()
                    self._issuer.wait((ops.gradient(unit.index),), to_write=True)
                view.copy_(param.grad.to_dense() if param.grad.is_sparse else param.grad)
                param.grad = view

    def rescale(self, factor: float) -> None:
        """Multiply all gradients by ``factor``: the root's at once, the layers' when they are next used.

        The root's cannot wait, since autograd adds to them before any layer's backward is asked for.
        """
        self.scale *= factor
        for param in self._root.params:
            if param.grad is not None:
                param.grad.mul_(factor)

    def settle_scale(self) -> None:
        """Apply `scale` to the gradients that are held: others, unscaled, are about to join them.

        An update does not settle it: as in PyTorch, gradients stay clipped until they are dropped.
        """
        scale, self.scale = self.scale, 1.0
        held = [
            param.grad
            for unit in self._units
            for view, param in self._views(unit)
            if scale != 1.0 and param.grad is not None and param.grad.data_ptr() == view.data_ptr()
        ]
        if held:
            self._issuer.wait((ops.gradient(unit.index) for unit in self._units), to_write=True)
            for gradient in held:
                gradient.mul_(scale)

    def finish(self) -> None:
        """Block until the gradients of all layers are in host memory, where ``p.grad`` shows them."""
        self._issuer.wait(ops.gradient(unit.index) for unit in self._units if unit.layout.grad_nbytes)

    def _views(self, unit: Unit) -> list[tuple[torch.Tensor, torch.nn.Parameter]]:
        """The place in our buffer of each trainable parameter's gradient, and the parameter."""
        buffer = self.root_buffer if unit.index == ROOT else self._store.shards[unit.index].gradient
        return [(s.view(buffer), p) for s, p in zip(unit.layout.trainable, unit.params, strict=False)]

    def _accumulate(self, unit: Unit, slot: int, used: Sequence[bool], held: Sequence[bool]) -> None:
        if not self._staging:
            self._staging = self._store.staging(len(self.slots.buffers))
        nbytes = unit.layout.grad_nbytes
        source = self.slots.buffers[slot][:nbytes]
        staged = self._staging[slot][:nbytes]
        gradient = self._store.shards[unit.index].gradient.data
        op = ops.stage_grad(unit.index, slot, nbytes)
        self._issuer.issue(op, lambda: self._issuer.backend.copy(staged, source))
        which = list(zip(unit.layout.trainable, used, held, strict=True))
        add = [slice for slice, is_used, is_held in which if is_used and is_held]
        new = [slice for slice, is_used, is_held in which if is_used and not is_held]

        def accumulate() -> None:
            for slice in add:
                slice.view(gradient).add_(slice.view(staged))
            for slice in new:
                slice.view(gradient).copy_(slice.view(staged))

        # reads the staged gradient and the host gradient, writes the latter
        self._issuer.issue(ops.accumulate(unit.index, slot, 3 * nbytes), accumulate)
