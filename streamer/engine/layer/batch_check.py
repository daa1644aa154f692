"""Whether a layer's batch is where it is cut: once for each kind of layer, by what two slices give.

[Note: the check of a batch]
A layer computes each sample by itself. So two slices that it runs together give what they give apart, if they
are cut along the batch. Cut along time they do not: attention, a convolution or a table of positions sees
other tokens. The first time that a kind of layer is cut (a class and shapes of parameters in a list, and the
arguments with the dimensions along which they are cut), the first two slices therefore run both ways, in
evaluation mode, without dropout and without a graph. Random states, buffers and attributes are put back. The
user's hooks inside of the layer are left out, unless the layer does not pass without them. Once a kind has
passed, nothing is computed again.

Kernels for batches of other lengths round otherwise. Differences are therefore taken relative to what the
layer adds to its hidden states, or to the output itself where it has another shape. By that measure the right
dimension gave up to 1e-7 in fp32 and 0 in bf16 and fp16 (on a CPU). The wrong one gave 0.18 or more for
pre-norm blocks, causal or not, of widths 64 and 512 with hidden states of scales from 0.03 to 30; relative
to the whole output it gave 1e-4 where hidden states were large. Attention that adds less than a fiftieth of
what the rest of its layer adds (a five hundredth in fp32) is not noticed. Means of magnitudes are compared,
so that a few tokens that go to another expert, because scores were rounded otherwise, do not count.

A layer that looks across its batch (experts with a capacity), or that adds noise in evaluation, is refused
as well. A dimension that ``batch_dims`` names for the hidden states, by the argument or by the
list of layers, is taken as it is, without a check.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from streamer.engine.layer.arguments import Outputs
from streamer.engine.layer.micro_batches import ROUNDING, BatchSlices, Joined
from streamer.engine.layer.surroundings import autocast_settings
from streamer.engine.paging.unit import Unit
from streamer.engine.tensors.nested import Tensors, constants, flatten
from streamer.engine.tensors.parts import plain_parts

#: The relative difference that rounding may make in fp32, where TF32 may be on; `ROUNDING` is that of shorter
#: dtypes.
ROUNDING_FP32 = ROUNDING / 10


class Runs(Protocol):
    """A call of a layer."""

    @property
    def unit(self) -> Unit: ...

    def run_aside(self, weights: torch.Tensor, inputs: Tensors) -> Outputs:
        """What the layer returns for ``inputs`` on the slot ``weights``; nothing else is left of that run."""


def run_in_slices(
    cut: BatchSlices,
    call: Runs,
    weights: torch.Tensor,
    inputs: Tensors,
    runs: Sequence[Callable[[Tensors], Outputs]],
) -> Joined:
    """What ``call`` returns for ``inputs`` on the slot ``weights``, by ``runs``, one for each slice of them
    that ``cut`` makes."""
    joined = Joined(call.unit.name, cut, inputs, partial(call.run_aside, weights))
    if cut.unchecked is not None:
        check_batch(cut, call, weights, inputs)
    for number, run in enumerate(runs):
        given = cut.inputs(inputs, number)
        try:
            outputs, rebuild = run(given)
        except Exception as error:
            cut.explain(error, call.unit.name, inputs)
            raise
        joined.add(number, outputs, rebuild, given)
    return joined


def check_batch(cut: BatchSlices, call: Runs, weights: torch.Tensor, inputs: Tensors) -> None:
    """Raise ValueError if the first two slices that ``cut`` makes of ``inputs`` give other results together
    than apart, where ``call`` runs on the slot ``weights``. [Note: the check of a batch]"""
    assert cut.unchecked is not None
    is_right = partial(_is_right, cut, call, weights, inputs)
    try:
        passes = _passes_without_hooks(is_right, call.unit.modules) or is_right()
    except Exception as error:
        cut.explain(error, call.unit.name, inputs)
        raise
    if not passes:
        dim = cut.dim
        raise ValueError(
            f"micro_batch_size: layer '{call.unit.name}' computes other values for two slices together than "
            f"for each alone; {cut.described(inputs)}, or {{'{cut.layers}': {dim}}} if dimension {dim} is "
            "the batch and the layer looks across it (experts with a capacity) or adds noise in evaluation"
        )
    cut.unchecked.checked.add(cut.unchecked.kind)


def _passes_without_hooks(is_right: Callable[[], bool], modules: Sequence[nn.Module]) -> bool:
    """Whether ``is_right`` holds without the user's hooks on ``modules``; False where there are none."""
    hooks = [hooks for module in modules for hooks in (module._forward_pre_hooks, module._forward_hooks)]
    if all(_is_of_torch(hook) for of_one in hooks for hook in of_one.values()):
        return False
    try:
        with _without_users(hooks):
            return is_right()
    except Exception:
        # the layer may need a hook that computes a weight, say: it is to run with all of them next
        return False


def _is_right(cut: BatchSlices, call: Runs, weights: torch.Tensor, inputs: Tensors) -> bool:
    """Whether both ways give the same, up to rounding."""
    unit = call.unit
    run = partial(call.run_aside, weights)
    pair = cut._replace(slices=cut.slices[:2])
    both = cut._replace(slices=[(0, sum(length for _, length in pair.slices))]).inputs(inputs, 0)
    is_cast = any(enabled for _, enabled, _ in autocast_settings(weights.device))
    is_short = is_cast or any(map(_is_short, (*unit.params, *both)))
    with _in_evaluation(unit.modules), _WithoutDropout():
        together = _result(run(both), both)
        joined = Joined(unit.name, pair, both, run)
        for number in range(2):
            given = pair.inputs(both, number)
            outputs, rebuild = run(given)
            joined.add(number, outputs, rebuild, given)
        apart = joined.rebuild([*joined.tensors, *both])
    tolerance = ROUNDING if is_short else ROUNDING_FP32
    return _are_alike(apart, together, both[cut.hidden], tolerance)


def _result(returned: Outputs, inputs: Tensors) -> Any:
    outputs, rebuild = returned
    return rebuild([*outputs, *inputs])


def _is_short(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize < torch.float32.itemsize


@torch.no_grad()
def _are_alike(one: Any, other: Any, hidden: torch.Tensor, tolerance: float) -> bool:
    """Whether two results of a layer differ by rounding alone."""
    # a sparse tensor by its indices and values
    mine, theirs = ([part for t in flatten(each)[0] for part in plain_parts(t)] for each in (one, other))
    if [(t.shape, t.dtype) for t in mine] != [(t.shape, t.dtype) for t in theirs]:
        return False
    if constants(one) != constants(other):
        return False
    return all(_is_close(a, b, hidden, tolerance) for a, b in zip(mine, theirs, strict=True))


def _is_close(one: torch.Tensor, other: torch.Tensor, hidden: torch.Tensor, tolerance: float) -> bool:
    if torch.equal(one, other):
        return True
    if not one.is_floating_point() and not one.is_complex():
        return bool((one != other).float().mean() <= tolerance)
    of_one, of_other = one.isfinite(), other.isfinite()
    if not torch.equal(of_one, of_other):
        return False
    # rows that are padding all over may be NaN
    one, other = (tensor.where(of_one, 0) for tensor in (one, other))
    added = other
    if other.shape == hidden.shape and hidden.is_floating_point():
        added = other.float() - hidden.where(of_one, 0).float()
    wide = torch.complex64 if one.is_complex() else torch.float32
    difference = (one.to(wide) - other.to(wide)).abs().mean()
    return bool(difference <= tolerance * added.to(wide).abs().mean())


class _WithoutDropout(TorchFunctionMode):
    """Leaves out the dropout that a layer does whether its modules are in training mode or not."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in _DROPOUTS:
            given["training"] = False
        elif func is torch.dropout:
            return given.get("input", next(iter(args), None))
        elif func is F.scaled_dot_product_attention and len(args) > 4:
            args = (*args[:4], 0.0, *args[5:])
        elif func is F.scaled_dot_product_attention:
            given["dropout_p"] = 0.0
        return func(*args, **given)


_DROPOUTS = frozenset(
    (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
)


@contextmanager
def _in_evaluation(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let ``modules`` be in evaluation mode inside the block."""
    # not by `eval`, which modules may override to merge adapters, say
    training = [module for module in modules if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _without_users(hooks: Sequence[dict[int, Any]]) -> Iterator[None]:
    """Let each of ``hooks``, of a module, have none inside the block but those of PyTorch, which compute
    weights."""
    before = [(of_one, dict(of_one)) for of_one in hooks if of_one]
    try:
        for of_one, had in before:
            for key, hook in had.items():
                if not _is_of_torch(hook):
                    del of_one[key]
        yield
    finally:
        for of_one, had in before:
            others = {key: hook for key, hook in of_one.items() if key not in had}
            # in the order that they had
            of_one.clear()
            of_one.update(had | others)


def _is_of_torch(hook: Callable[..., Any]) -> bool:
    """Whether ``hook`` is a function of PyTorch, or an object of one of its classes."""
    if isinstance(hook, functools.partial):
        hook = hook.func
    owners = [hook, *type(hook).__mro__]
    return any(str(getattr(owner, "__module__", "")).partition(".")[0] == "torch" for owner in owners)
