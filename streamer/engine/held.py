"""What ``p.grad`` shows: places in the buffers that hold a unit's gradients.

[Note: sums]
A gradient is held as it left the device. Where a second one is to be added to it, and its dtype is
bfloat16 or float16, both go into an fp32 sum: thousands of additions in eight bits of precision would lose
most of what is small. ``p.grad`` is then fp32, which PyTorch allows (``Tensor.grad_dtype``), until it is
dropped. A gradient that stays alone never takes those four bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from streamer.engine.unit import Unit
from streamer.memory.layout import Slice

FP32 = torch.float32


class Held:
    """The gradients of one unit: ``gradient`` (flat uint8, in the parameters' dtypes) and, once there is a
    use for them, the fp32 sums that ``make_sums`` returns, both laid out by the unit's layout. [Note: sums]

    ``before_write`` blocks until the caller's thread may write them.
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
        self._before_write = before_write

    def pairs(self) -> Iterator[tuple[Slice, nn.Parameter]]:
        """Each trainable parameter and its place."""
        return zip(self._unit.layout.trainable, self._unit.params, strict=False)

    def sums(self, param: nn.Parameter) -> bool:
        """Whether a second gradient of ``param`` is to be added in fp32, beside its own dtype."""
        return self._make_sums is not None and param.dtype != FP32

    def place(self, slice: Slice, *, summed: bool) -> torch.Tensor:
        """The place of a parameter's gradient."""
        if not summed:
            if slice.nbytes > self._gradient.numel():
                raise RuntimeError(
                    f"'{slice.param.name}' has a gradient from outside of its layer, for which "
                    "update='backward' has no room: wrap with update='step'"
                )
            return slice.view(self._gradient)
        assert self._make_sums is not None, "only gradients that may be summed are"
        return slice.state(self._make_sums())

    def show(self, slice: Slice, param: nn.Parameter, *, summed: bool) -> None:
        """Let ``p.grad`` be what is in that place."""
        param.grad = None
        param.grad_dtype = FP32 if summed else param.dtype
        param.grad = self.place(slice, summed=summed)

    def is_ours(self, slice: Slice, param: nn.Parameter) -> bool:
        """Whether ``p.grad`` is there and in one of our places."""
        grad = param.grad
        return grad is not None and grad.data_ptr() == self.place(slice, summed=is_summed(param)).data_ptr()

    def adopt(self) -> None:
        """Bring gradients that were put in place of ours (``p.grad = ...``) into our buffers."""
        for slice, param in self.pairs():
            if param.grad is not None and not self.is_ours(slice, param):
                grad = param.grad.to_dense() if param.grad.is_sparse else param.grad
                summed = is_summed(param)
                self._before_write()
                self.place(slice, summed=summed).copy_(grad)
                self.show(slice, param, summed=summed)

    def widen(self, slice: Slice, param: nn.Parameter) -> None:
        """Autograd is about to add to ``p.grad`` by itself: let it be fp32 where it is to be summed."""
        if param.grad is None:
            param.grad_dtype = param.dtype
        elif self.sums(param) and not is_summed(param):
            grad = param.grad
            self._before_write()
            self.place(slice, summed=True).copy_(grad.to_dense() if grad.is_sparse else grad)
            self.show(slice, param, summed=True)

    def narrow(self) -> None:
        """Let every ``p.grad`` have its parameter's dtype, as other optimizers than ours expect."""
        for slice, param in self.pairs():
            if is_summed(param):
                sum_ = param.grad
                assert sum_ is not None
                self._before_write()
                self.place(slice, summed=False).copy_(sum_)
                self.show(slice, param, summed=False)


def is_summed(param: torch.Tensor) -> bool:
    """Whether ``p.grad`` is an fp32 sum beside a parameter of a shorter dtype."""
    return param.grad is not None and param.grad.dtype == FP32 != param.dtype
