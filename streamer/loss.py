"""`chunked_cross_entropy`: the loss of a language model, of whose logits a chunk is there at a time."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from streamer.engine import op as ops
from streamer.engine.tracing import never_traced
from streamer.handle import home_of
from streamer.loss_chunks import CrossEntropy, Loss

REDUCTIONS = ("mean", "sum", "none")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@never_traced  # Dynamo would unroll the loop, and knows nothing of what a wrapped model's parameters have
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
    """The cross entropy of logits that are never there all at once, in forward or in backward.

    The same as ``F.cross_entropy(F.linear(hidden, weight, bias).float(), targets)`` over all tokens, with
    PyTorch's meaning of ``ignore_index``, ``label_smoothing`` and ``reduction``: a mean over no targets is
    NaN, with gradients of zero.

    Of V words and C features it takes, beside what it is given and returns,

    - while it runs, for a chunk, ``chunk_size * V * b`` bytes: b is 4 in fp32, 6 in bf16 and fp16, 8 in fp64;
      with ``softcap`` 8, and 16 in fp64;
    - from forward to backward the gradients of what is trained: of ``hidden`` in its compute dtype, and of
      ``weight`` ``V * C * 4`` bytes (8 in fp64), fp32 in which the chunks are added up; in bf16 and fp16
      half as many more while a chunk is added, and when backward rounds them to the weight's dtype. In fp16
      and with ``reduction="none"`` they are made in backward, which makes the logits again
      [Note: chunked loss];
    - under autocast a copy of ``weight`` in its dtype, while it runs.

    Args:
        hidden: [..., C], floating point; what the head is given.
        weight: [V, C], such as ``model.lm_head.weight``. May be a parameter of a wrapped model, whose update
            is then waited for. Adapters on a head (peft) are not in its weight.
        targets: int64 [...], each 0 .. V - 1 or ``ignore_index``.
        bias: [V], or None.
        chunk_size: tokens whose logits are there at a time. Fewer save memory, and cost time where adding
            up the weight's gradient is no longer small beside the products.
        ignore_index: the target of tokens that count for nothing.
        label_smoothing: from 0 to 1.
        softcap: logits become ``softcap * tanh(logits / softcap)``, in the loss's dtype.
        reduction: ``"mean"`` over the targets that are not ignored, ``"sum"``, or ``"none"``.

    Returns:
        A scalar, or with ``"none"`` the losses of the tokens, shaped as ``targets``: fp32, or fp64 of fp64.
        Logits are of the inputs' dtype, or of autocast's. Gradients have the dtypes of the inputs.

    Raises:
        ValueError: for shapes, dtypes, devices or options that do not fit.
        IndexError: for a target that is out of range. On a GPU that is an assertion of the device, as with
            `F.cross_entropy`.
        RuntimeError: under transforms of torch.func and forward-mode differentiation; by backward with
            ``create_graph=True``.
    """
    _check_options(chunk_size, label_smoothing, softcap, reduction)
    _check_shapes(hidden, weight, targets, bias)
    _check_transforms(hidden, weight, bias)
    loss = Loss(
        dtype=_compute_dtype(hidden, weight, bias),
        chunk_size=chunk_size,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=softcap,
        reduction=reduction,
    )
    for param in (weight, bias):
        if param is not None:
            _let_be_read(param)
    flat = targets.reshape(-1)
    _check_range(flat, ignore_index, weight.shape[0])
    rows = hidden.reshape(-1, hidden.shape[-1])
    wanted = tuple(
        torch.is_grad_enabled() and given is not None and given.requires_grad
        for given in (hidden, weight, bias)
    )
    result: torch.Tensor = CrossEntropy.apply(loss, wanted, rows, weight, bias, flat)  # type: ignore[no-untyped-call]
    return result.view(targets.shape) if reduction == "none" else result


def _compute_dtype(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.dtype:
    """The dtype in which `F.linear` would give the logits."""
    given = [hidden.dtype, weight.dtype] + ([] if bias is None else [bias.dtype])
    kind = hidden.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        # which leaves float64 alone
        given = [dtype if dtype == torch.float64 else torch.get_autocast_dtype(kind) for dtype in given]
    if len(set(given)) > 1 or given[0] not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in given)
        raise ValueError(
            f"hidden, weight and bias are of {names}: give them in one floating-point dtype, or run under "
            "torch.autocast"
        )
    return given[0]


def _let_be_read(param: torch.Tensor) -> None:
    """Let an update of ``param`` that is on its way arrive."""
    home = home_of(param)
    if home is None or home.executor.released:
        return
    if home.unit is home.executor.root:
        if torch.is_grad_enabled():
            home.unit.wanted()  # refuses what there is no room for
        home.executor.begin()
    else:
        home.executor.issuer.wait([ops.shard(home.unit.index)])


def _check_options(chunk_size: int, label_smoothing: float, softcap: float | None, reduction: str) -> None:
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size!r}: it must be an integer of 1 or more, in tokens")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing={label_smoothing!r} must be from 0 to 1")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap!r} must be above 0, or None for logits as they are")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} is unknown: use one of {', '.join(map(repr, REDUCTIONS))}")


def _check_shapes(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, bias: torch.Tensor | None
) -> None:
    if hidden.dim() == 0 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden is {list(hidden.shape)} and weight {list(weight.shape)}: they must be "
            "[..., C] and [V, C]"
        )
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"targets are {list(targets.shape)} and hidden {list(hidden.shape)}: there must be a target for "
            f"each token, {list(hidden.shape[:-1])}"
        )
    if targets.dtype != torch.int64:
        raise ValueError(f"targets are of {targets.dtype}: give the words' numbers in torch.int64")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias is {list(bias.shape)}: it must be [{weight.shape[0]}], a value for each word")
    devices = [str(given.device) for given in (hidden, weight, targets, bias) if given is not None]
    if len(set(devices)) > 1:
        raise ValueError(
            f"hidden, weight, targets (and bias) are on {', '.join(devices)}: move them to one device"
        )


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


def _check_transforms(*given: torch.Tensor | None) -> None:
    dual = forward_ad._current_level >= 0 and any(
        tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in given
    )
    if dual or torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "transforms of torch.func and forward-mode differentiation do not go through "
            "chunked_cross_entropy: use torch.nn.functional.cross_entropy"
        )
