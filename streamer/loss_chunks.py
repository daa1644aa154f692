"""The logits of a language model a chunk at a time: their losses, and what goes back from these.

[Note: chunked loss]
A chunk's logits, the gradient of its losses and what that adds to the gradients of hidden states and weight
need nothing of other chunks, so for a mean or a sum all of it is done in the forward pass, where the logits
are; backward multiplies by the gradient that comes in. Two cases wait for backward and make the logits again
there: losses that are not reduced, of which each has an incoming gradient of its own, and fp16, where without
the loss scale, which comes in with backward, the gradients of logits would round to zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from streamer.engine.asked import graph_is_retained

#: Of hidden states, weight and bias, in this order.
Wanted = tuple[bool, bool, bool]
Gradients = Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class Loss:
    """What is asked for; logits are of ``dtype``."""

    dtype: torch.dtype
    chunk_size: int
    ignore_index: int
    label_smoothing: float
    softcap: float | None
    reduction: str

    @property
    def exact(self) -> torch.dtype:
        """What losses, and sums of gradients, are computed in."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def waits_for_backward(self) -> bool:
        """Whether gradients are made there. [Note: chunked loss]"""
        return self.reduction == "none" or self.dtype == torch.float16

    def factors(self, targets: torch.Tensor) -> torch.Tensor:
        """What the tokens' losses are multiplied by in the result's gradient: [tokens]."""
        counted = (targets != self.ignore_index).to(self.exact)
        return counted / counted.sum().clamp(min=1) if self.reduction == "mean" else counted

    def reduce(self, losses: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.reduction == "none":
            return losses
        total = losses.sum()
        return total / (targets != self.ignore_index).sum() if self.reduction == "mean" else total

    def losses(
        self, logits: torch.Tensor, targets: torch.Tensor, factors: torch.Tensor | None
    ) -> torch.Tensor:
        """The losses of a chunk, [tokens]. ``logits``, of the exact dtype, become their gradient if there are
        ``factors``, [tokens], and are spoilt if there are none."""
        slope = None
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_()
            slope = None if factors is None else logits.square().neg_().add_(1)
            logits.mul_(self.softcap)
        logits.sub_(logits.amax(-1, keepdim=True))
        counted = targets != self.ignore_index
        place = targets.where(counted, 0)[:, None]
        wanted = logits.gather(-1, place).squeeze(-1)
        if self.label_smoothing:
            wanted = torch.lerp(wanted, logits.mean(-1), self.label_smoothing)
        total = logits.exp_().sum(-1, keepdim=True)
        losses = (total.squeeze(-1).log() - wanted).where(counted, 0)
        if factors is not None:
            factors = factors[:, None]
            logits.mul_(factors / total)
            if self.label_smoothing:
                logits.sub_(factors * (self.label_smoothing / logits.shape[-1]))
            at_target = logits.gather(-1, place) - factors * (1 - self.label_smoothing)
            logits.scatter_(-1, place, at_target)
            if slope is not None:
                logits.mul_(slope)
        return losses


class _Head:
    """Hidden states [tokens, C], weight and bias in the dtype of the logits, and their gradients, of which
    those ``wanted`` are added up."""

    def __init__(
        self,
        loss: Loss,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        wanted: Wanted,
    ) -> None:
        self.hidden, self.weight = hidden.to(loss.dtype), weight.to(loss.dtype)
        self.bias = None if bias is None else bias.to(loss.dtype)
        self._of_hidden = torch.empty_like(self.hidden) if wanted[0] else None
        self._of_weight = torch.zeros_like(weight, dtype=loss.exact) if wanted[1] else None
        self._of_bias = torch.zeros_like(bias, dtype=loss.exact) if bias is not None and wanted[2] else None

    @property
    def gradients(self) -> Gradients:
        return self._of_hidden, self._of_weight, self._of_bias

    def logits(self, rows: slice) -> torch.Tensor:
        return F.linear(self.hidden[rows], self.weight, self.bias)

    def add(self, rows: slice, of_logits: torch.Tensor) -> None:
        """Take a chunk's gradient of the logits."""
        if self._of_bias is not None:
            self._of_bias.add_(of_logits.sum(0))
        of_logits = of_logits.to(self.hidden.dtype)
        if self._of_hidden is not None:
            torch.mm(of_logits, self.weight, out=self._of_hidden[rows])
        if self._of_weight is None:
            return
        if self._of_weight.dtype == of_logits.dtype:
            torch.addmm(self._of_weight, of_logits.t(), self.hidden[rows], out=self._of_weight)
        else:
            self._of_weight.add_(of_logits.t() @ self.hidden[rows])


def _over_chunks(
    loss: Loss, head: _Head, targets: torch.Tensor, factors: torch.Tensor | None
) -> torch.Tensor:
    """The losses of all tokens; with ``factors``, [tokens], the head's gradients of their weighted sum."""
    losses = targets.new_empty(targets.shape, dtype=loss.exact)
    for rows in _chunks(len(targets), loss.chunk_size):
        _chunk(loss, head, rows, targets, factors, losses)
    return losses


def _chunk(
    loss: Loss,
    head: _Head,
    rows: slice,
    targets: torch.Tensor,
    factors: torch.Tensor | None,
    losses: torch.Tensor,
) -> None:
    # a function, so that nothing of a chunk is left when the next one begins
    logits = head.logits(rows).to(loss.exact)
    losses[rows] = loss.losses(logits, targets[rows], None if factors is None else factors[rows])
    if factors is not None:
        head.add(rows, logits)


def _chunks(tokens: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        loss: Loss,
        wanted: Wanted,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.loss, ctx.wanted = loss, wanted
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        at_once = any(wanted) and not loss.waits_for_backward
        with _without_autocast(hidden.device):
            head = _Head(loss, hidden, weight, bias, wanted if at_once else (False, False, False))
            losses = _over_chunks(loss, head, targets, loss.factors(targets) if at_once else None)
        if at_once:
            ctx.save_for_backward(*head.gradients)
        elif any(wanted):
            ctx.save_for_backward(hidden, weight, bias, targets)
        return loss.reduce(losses, targets)

    @staticmethod
    def backward(ctx: Any, incoming: torch.Tensor | None) -> Any:
        if incoming is None:
            return (None,) * 6
        _check_backward(incoming)
        loss: Loss = ctx.loss
        if loss.waits_for_backward:
            hidden, weight, bias, targets = ctx.saved_tensors
            with _without_autocast(hidden.device):
                head = _Head(loss, hidden, weight, bias, ctx.wanted)
                _over_chunks(loss, head, targets, loss.factors(targets) * incoming)
            gradients: Gradients = head.gradients
        elif graph_is_retained():
            gradients = tuple(None if saved is None else saved * incoming for saved in ctx.saved_tensors)
        else:
            # nobody will ask for them again
            gradients = tuple(None if saved is None else saved.mul_(incoming) for saved in ctx.saved_tensors)
        pairs = zip(gradients, ctx.dtypes, strict=True)
        return None, None, *(None if found is None else found.to(dtype) for found, dtype in pairs), None


def _without_autocast(device: torch.device) -> AbstractContextManager[None]:
    if not torch.amp.is_autocast_available(device.type):  # the meta device
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def _check_backward(incoming: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True: chunked_cross_entropy has no gradients of gradients: leave create_graph out, "
            "or use torch.nn.functional.cross_entropy"
        )
    if torch._C._functorch.is_legacy_batchedtensor(incoming):
        raise RuntimeError("chunked_cross_entropy takes no batched gradients (is_grads_batched=True)")
