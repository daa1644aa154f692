"""`chunked_cross_entropy`: the loss of a language model, with logits computed one chunk at a time.

[Note: chunked loss]
A chunk's logits, and its part of the gradients of hidden states and weight, do not depend on other chunks. So
for a mean or a sum the forward pass computes the gradients too, and backward multiplies them by the incoming
gradient. Two cases wait for backward and compute the logits again there: losses that are not reduced, which
each have an incoming gradient, and fp16, whose gradients of logits would round to zero without the loss
scale, which is known only in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from streamer.engine.guard import never_traced
from streamer.engine.handle import home_of
from streamer.engine.layer.graph import graph_is_retained
from streamer.engine.schedule import op as ops
from streamer.planner.cost import repeated

#: One for hidden states, weight and bias each, in this order.
Gradients = list[torch.Tensor | None]

REDUCTIONS = ("mean", "sum", "none")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@never_traced  # Dynamo would unroll the loop, and does not know attributes of a wrapped model's parameters
def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    chunk_size: int = 2048,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """The cross entropy of a head's output, without the logits of all tokens in memory at once.

    The result is that of ``F.cross_entropy(F.linear(hidden, weight, bias).float(), targets)`` over all
    tokens, with PyTorch's meaning of ``ignore_index``, ``label_smoothing`` and ``reduction``: a mean over no
    targets is NaN, with gradients of zero. With V words and C features it takes, in addition to inputs and
    results,

    - ``chunk_size * V * b`` bytes while it runs: b is 4 in fp32, 6 in bf16 and fp16, 8 in fp64; with
      ``softcap`` 8, and 16 in fp64;
    - from forward to backward the gradients of ``hidden``, in its compute dtype, and of ``weight``,
      ``V * C * 4`` bytes (8 in fp64), and in bf16 and fp16 half as many more while a chunk is added. In fp16
      and with ``reduction="none"`` both are computed in backward, with the logits again [Note: chunked loss];
    - under autocast a copy of ``weight`` in its dtype, while it runs.

    Args:
        hidden: [..., C], floating point: the input of the head.
        weight: [V, C], such as ``model.lm_head.weight``. For a parameter of a wrapped model, the call waits
            for its update. Adapters on a head (peft) are not in its weight.
        targets: int64 [...], each 0 .. V - 1 or ``ignore_index``.
        bias: [V], or None.
        chunk_size: tokens whose logits are in memory at a time. Fewer save memory, but cost time once adding
            up the weight's gradient is no longer cheap compared with the products.
        ignore_index: the target of tokens to leave out.
        label_smoothing: from 0 to 1.
        softcap: logits become ``softcap * tanh(logits / softcap)``, in the loss's dtype.
        reduction: ``"mean"`` over the targets that are not ignored, ``"sum"``, or ``"none"``.

    Returns:
        A scalar, or with ``"none"`` the losses of the tokens, shaped as ``targets``: fp32, or fp64 of fp64.
        Logits are of the inputs' dtype, or of autocast's. Gradients have the dtypes of the inputs.

    Raises:
        ValueError: for shapes, dtypes or options that do not fit.
        IndexError: for a target that is out of range. On a GPU that is an assertion of the device, as with
            `F.cross_entropy`.
        RuntimeError: by backward with ``create_graph=True``, and, PyTorch's own, under transforms of
            torch.func and in forward mode.
    """
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size!r}: it must be an integer of 1 or more, in tokens")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing={label_smoothing!r} must be from 0 to 1")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap!r} must be above 0, or None for logits as they are")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} is unknown: use one of {', '.join(map(repr, REDUCTIONS))}")
    _check_shapes(hidden, weight, targets, bias)
    dtype = _compute_dtype(hidden, weight, bias)
    loss = Loss(dtype, chunk_size, ignore_index, label_smoothing, softcap, reduction)
    for param in (weight, bias):
        if param is not None:
            _wait_for_update(param)
    flat = targets.reshape(-1)
    _check_range(flat, ignore_index, weight.shape[0])
    inputs = hidden.reshape(-1, hidden.shape[-1]), weight, bias
    wanted = [
        torch.is_grad_enabled() and tensor is not None and tensor.requires_grad
        for tensor in (hidden, weight, bias)
    ]
    result: torch.Tensor = CrossEntropy.apply(loss, wanted, *inputs, flat)
    return result.view(targets.shape) if reduction == "none" else result


@dataclass(frozen=True)
class Loss:
    """The options of `chunked_cross_entropy`, and the dtype of the logits."""

    dtype: torch.dtype
    chunk_size: int
    ignore_index: int
    label_smoothing: float
    softcap: float | None
    reduction: str

    @property
    def exact(self) -> torch.dtype:
        """The dtype of losses and of sums of gradients."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def waits_for_backward(self) -> bool:
        """Whether backward computes the gradients. [Note: chunked loss]"""
        return self.reduction == "none" or self.dtype == torch.float16

    def factors(self, targets: torch.Tensor) -> torch.Tensor:
        """The factor of each token's loss in the result: [tokens]."""
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
        """The losses of a chunk, [tokens]. ``logits``, of the exact dtype, are overwritten: by their gradient
        if there are ``factors``, [tokens]."""
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


def _over_chunks(
    loss: Loss,
    inputs: Sequence[torch.Tensor | None],
    targets: torch.Tensor,
    factors: torch.Tensor | None = None,
    wanted: Sequence[bool] = (False, False, False),
) -> tuple[torch.Tensor, Gradients]:
    """The losses of all tokens, and the ``wanted`` gradients of their sum with ``factors``, [tokens].
    ``inputs`` are hidden states [tokens, C], weight and bias."""
    hidden, weight, bias = (None if each is None else each.to(loss.dtype) for each in inputs)
    assert hidden is not None and weight is not None
    losses = targets.new_empty(targets.shape, dtype=loss.exact)
    of_hidden = torch.empty_like(hidden) if wanted[0] else None
    of_weight = torch.zeros_like(weight, dtype=loss.exact) if wanted[1] else None
    of_bias = torch.zeros_like(bias, dtype=loss.exact) if bias is not None and wanted[2] else None

    def take(start: int) -> None:
        rows = slice(start, start + loss.chunk_size)
        logits = F.linear(hidden[rows], weight, bias).to(loss.exact)
        losses[rows] = loss.losses(logits, targets[rows], None if factors is None else factors[rows])
        if of_bias is not None:
            of_bias.add_(logits.sum(0))
        of_logits = logits if factors is None else logits.to(loss.dtype)
        if of_hidden is not None:
            torch.mm(of_logits, weight, out=of_hidden[rows])
        if of_weight is not None and of_weight.dtype == of_logits.dtype:
            torch.addmm(of_weight, of_logits.t(), hidden[rows], out=of_weight)
        elif of_weight is not None:
            of_weight.add_(of_logits.t() @ hidden[rows])

    starts = range(0, len(targets), loss.chunk_size)
    if targets.is_meta and len(starts) > 2:  # in a plan: all chunks except the last are as long as the first
        with repeated(len(starts) - 1):
            take(0)
        starts = starts[-1:]
    for start in starts:
        take(start)
    return losses, [of_hidden, of_weight, of_bias]


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        loss: Loss,
        wanted: Sequence[bool],
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        inputs = hidden, weight, bias
        ctx.loss, ctx.wanted, ctx.dtypes = (
            loss,
            wanted,
            [None if each is None else each.dtype for each in inputs],
        )
        with _without_autocast(hidden.device):
            if any(wanted) and not loss.waits_for_backward:
                losses, gradients = _over_chunks(loss, inputs, targets, loss.factors(targets), wanted)
                ctx.save_for_backward(*gradients)
            else:
                losses, _ = _over_chunks(loss, inputs, targets)
                if any(wanted):
                    ctx.save_for_backward(*inputs, targets)
        return loss.reduce(losses, targets)

    @staticmethod
    def backward(ctx: Any, incoming: torch.Tensor | None) -> Any:
        if incoming is None:
            return (None,) * 6
        if torch.is_grad_enabled():  # the gradients of forward would count as constants, without an error
            raise RuntimeError(
                "create_graph=True: chunked_cross_entropy has no gradients of gradients: leave create_graph "
                "out, or use torch.nn.functional.cross_entropy"
            )
        loss: Loss = ctx.loss
        if loss.waits_for_backward:
            *inputs, targets = ctx.saved_tensors
            with _without_autocast(targets.device):
                factors = loss.factors(targets) * incoming
                _, gradients = _over_chunks(loss, inputs, targets, factors, ctx.wanted)
        else:
            # in place if the graph is freed, and these with it
            times = torch.Tensor.mul if graph_is_retained() else torch.Tensor.mul_
            gradients = [None if saved is None else times(saved, incoming) for saved in ctx.saved_tensors]
        pairs = zip(gradients, ctx.dtypes, strict=True)
        return None, None, *(None if found is None else found.to(dtype) for found, dtype in pairs), None


def _without_autocast(device: torch.device) -> AbstractContextManager[None]:
    if not torch.amp.is_autocast_available(device.type):  # the meta device
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def _compute_dtype(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.dtype:
    """The dtype in which `F.linear` computes the logits."""
    dtypes = [tensor.dtype for tensor in (hidden, weight, bias) if tensor is not None]
    kind = hidden.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        # which does not change float64
        dtypes = [dtype if dtype == torch.float64 else torch.get_autocast_dtype(kind) for dtype in dtypes]
    if len(set(dtypes)) > 1 or dtypes[0] not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"hidden, weight and bias are of {names}: pass them in one floating-point dtype, or run under "
            "torch.autocast"
        )
    return dtypes[0]


def _wait_for_update(param: torch.Tensor) -> None:
    """Wait until a queued update of ``param`` is done."""
    home = home_of(param)
    if home is None or home.executor.released:
        return
    if home.unit is home.executor.root:
        if torch.is_grad_enabled():
            home.unit.wanted()  # refuses gradients without room
        home.executor.begin()
    else:
        home.executor.issuer.wait([ops.shard(home.unit.index)])


def _check_shapes(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, bias: torch.Tensor | None
) -> None:
    if hidden.dim() == 0 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden is {list(hidden.shape)} and weight {list(weight.shape)}: they must be "
            "[..., C] and [V, C]"
        )
    if targets.shape != hidden.shape[:-1] or targets.dtype != torch.int64:
        raise ValueError(
            f"targets are {targets.dtype} {list(targets.shape)} and hidden {list(hidden.shape)}: there must "
            f"be a word's number in torch.int64 for each token, {list(hidden.shape[:-1])}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias is {list(bias.shape)}: it must be [{weight.shape[0]}], a value for each word")


def _check_range(targets: torch.Tensor, ignore_index: int, words: int) -> None:
    wrong = (targets != ignore_index) & ((targets < 0) | (targets >= words))
    if targets.device.type != "cpu":
        # without waiting for the device
        torch._assert_async(~wrong.any(), f"a target is outside of 0 .. {words - 1}")
    elif wrong.any():
        raise IndexError(
            f"target {int(targets[wrong][0])} is outside of 0 .. {words - 1}, for which the weight has rows, "
            f"and not ignore_index={ignore_index}"
        )
