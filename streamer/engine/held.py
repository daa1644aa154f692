"""What ``p.grad`` shows: places in the buffers that hold a unit's gradients.

[Note: sums]
A gradient is held as it left the device. Where a second one is to be added to it, and its dtype is
bfloat16 or float16, both go into an fp32 sum: thousands of additions in eight bits of precision would lose
most of what is small. ``p.grad`` is then fp32, which PyTorch allows where ``Tensor.grad_dtype`` is None,
until it is dropped. A gradient that stays alone never takes those four bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterator, Sequence

import torch
from torch import nn

from streamer.engine.guarded import GUARD, Guard, GuardedTensor, as_plain
from streamer.engine.unit import Unit
from streamer.memory.host import HostShard
from streamer.memory.layout import Slice

FP32 = torch.float32

#: A parameter, its place, and a gradient for it.
Foreign = tuple[Slice, nn.Parameter, torch.Tensor]


class Held:
    """The gradients of one unit: ``gradient`` (flat uint8, in the parameters' dtypes) and, once there is a
    use for them, the fp32 sums that ``make_sums`` returns, both laid out by the unit's layout. [Note: sums]
    """

    def __init__(
        self,
        unit: Unit,
        gradient: torch.Tensor,
        *,
        make_sums: Callable[[], torch.Tensor] | None,
        before_write: Callable[[], None],
    ) -> None:
        self._unit = unit
        self._gradient = gradient
        self._make_sums = make_sums
        #: returns when what the caller does next may write the gradients
        self.before_write = before_write
        self._guard: Guard | None = None
        #: what ``p.grad`` has been, by the parameter's identity and whether it is a sum: it is the same at
        #: every step
        self._shown: dict[tuple[int, bool], torch.Tensor] = {}

    def guard_with(self, guard: Guard) -> None:
        """Let the user's code see gradients that ask ``guard`` first. [Note: what the user sees]"""
        self._guard = guard

    def pairs(self) -> Iterator[tuple[Slice, nn.Parameter]]:
        """Each trainable parameter and its place."""
        return zip(self._unit.layout.trainable, self._unit.params, strict=False)

    def sums_in_fp32(self, param: nn.Parameter) -> bool:
        """Whether a second gradient of ``param`` is to be added in fp32, beside its own dtype."""
        return self._make_sums is not None and param.dtype != FP32

    def place(self, slice: Slice, *, summed: bool) -> torch.Tensor:
        """The place of a parameter's gradient."""
        if slice.nbytes > self._gradient.numel():
            raise RuntimeError(
                f"'{slice.param.name}' has a gradient from outside of its layer, for which "
                "update='backward' has no room: wrap with update='step'"
            )
        if summed and self._make_sums is not None:
            return slice.state(self._make_sums())
        return slice.view(self._gradient)

    def show(self, slice: Slice, param: nn.Parameter, *, summed: bool) -> None:
        """Let ``p.grad`` be what is in that place."""
        shown = self._shown.get((id(param), summed))
        # the user may have given it other memory (p.grad.data = ...)
        if shown is None or summed or shown.data_ptr() != self._gradient.data_ptr() + slice.offset:
            shown = self.place(slice, summed=summed)
            if self._guard is not None:
                shown = GuardedTensor.of(shown, self._guard)
            self._shown[id(param), summed] = shown
        param.grad = shown

    @as_plain
    def leave_to_keepers(self, scale: float) -> None:
        """New gradients are about to be written: one of before that the user has kept (``g = p.grad``, and
        ``p.grad`` dropped since) gets memory of its own. ``scale`` is what is still to be applied to it."""
        for _, param in self.pairs():
            shown = self._shown.get((id(param), False))
            # held by the dict, by this name and by the call
            if shown is None or sys.getrefcount(shown) <= 3 or param.grad is shown:
                continue
            shown.data = shown.detach() * scale
            shown.__dict__.pop(GUARD, None)
            del self._shown[id(param), False]

    def is_ours(self, slice: Slice, param: nn.Parameter) -> bool:
        """Whether ``p.grad`` is there and in one of our places."""
        grad = param.grad
        if grad is None or grad.is_sparse:
            return False
        summed = is_summed(param)
        if summed or not slice.numel:
            place = self.place(slice, summed=summed)
            return (grad.data_ptr(), grad.stride()) == (place.data_ptr(), place.stride())
        return grad.data_ptr() == self._gradient.data_ptr() + slice.offset and grad.is_contiguous()

    @as_plain
    def foreign(self) -> list[Foreign]:
        """Gradients that were put in place of ours (``p.grad = ...``), apart from our buffers."""
        return [
            (slice, param, self._apart(param.grad))
            for slice, param in self.pairs()
            if param.grad is not None and not self.is_ours(slice, param)
        ]

    @as_plain
    def adopt(self, foreign: Sequence[Foreign]) -> None:
        """Bring gradients into our buffers, where ``p.grad`` shows them again."""
        if foreign:
            self.before_write()
        for slice, param, grad in foreign:
            summed = is_summed(param)
            self.place(slice, summed=summed).copy_(grad)
            self.show(slice, param, summed=summed)

    def _apart(self, grad: torch.Tensor) -> torch.Tensor:
        """``grad``, or a copy of it if it shows another parameter's place, which may be written first."""
        if grad.is_sparse:
            return grad.to_dense()
        ours = self._gradient.untyped_storage().data_ptr()
        return grad.clone() if grad.untyped_storage().data_ptr() == ours else grad

    @as_plain
    def widen(self, slice: Slice, param: nn.Parameter) -> None:
        """Autograd is about to add to ``p.grad`` by itself: let it be fp32 where it is to be summed."""
        grad = param.grad
        if grad is None:
            return
        self.before_write()
        if self.sums_in_fp32(param) and not is_summed(param):
            self.place(slice, summed=True).copy_(grad.to_dense() if grad.is_sparse else grad)
            self.show(slice, param, summed=True)

    @as_plain
    def narrow(self, params: Container[torch.Tensor]) -> None:
        """Let the gradients of ``params`` have the dtypes of those, as other optimizers than ours expect."""
        for slice, param in self.pairs():
            if param in params and is_summed(param):
                total = param.grad
                assert total is not None
                self.before_write()
                self.place(slice, summed=False).copy_(total)
                self.show(slice, param, summed=False)


def noticing_writes(unit: Unit, shard: HostShard, update: Callable[[], None]) -> Callable[[], None]:
    """``update``, which raises RuntimeError if somebody has written the gradients in ``shard`` meanwhile."""
    before = shard.gradient._version, shard.sums._version

    def work() -> None:
        update()
        if (shard.gradient._version, shard.sums._version) != before:
            raise RuntimeError(
                f"gradients of '{unit.name}' were written while its update was reading them, so that its "
                "weights are wrong: load a checkpoint, and call streamer.synchronize(model) between "
                "optimizer.step() and writing gradients (module.zero_grad(set_to_none=False))"
            )

    return work


def is_summed(param: torch.Tensor) -> bool:
    """Whether ``p.grad`` is an fp32 sum beside a parameter of a shorter dtype."""
    # asked several times a step for every parameter
    return param.dtype != FP32 and (grad := param.grad) is not None and grad.dtype == FP32
