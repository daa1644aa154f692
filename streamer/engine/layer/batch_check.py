"""Checks that a layer's batch is in the dimension that is cut, and finds it in the layer's outputs.

[Note: the check of a batch]
A layer computes each sample by itself. So two slices that run together must give the same results as the same
slices apart, if they are cut along the batch. This fails if they are cut along time: attention, a convolution
or a table of positions then reads other tokens. So the first two slices run both ways when a kind of layer is
cut for the first time (a kind is a class and shapes of parameters in a list, and the arguments with the
dimensions along which they are cut). These runs are in evaluation mode, without dropout and without a graph.
Random states, buffers and attributes are restored. The user's hooks inside the layer are left out, unless the
layer fails the check without them. Once a kind has passed, nothing is computed again, unless it returns other
tensors than in the check.

A tensor that is as long for both slices together as for each of them has no batch: it must then be the same
for all. Any other tensor must be as long as both, and equal the results of the slices one after the other.

Kernels round differently for different batch lengths. Differences are therefore relative to the layer's
change of its hidden states, or to the output itself if it has another shape. By that measure the right
dimension gave up to 1e-7 in fp32 and 0 in bf16 and fp16 (on a CPU). The wrong one gave 0.18 or more for
pre-norm blocks, causal or not, of widths 64 and 512 with hidden states of scales from 0.03 to 30. Relative to
the whole output it gave 1e-4 if hidden states were large. The check does not detect attention that adds less
than a fiftieth of the rest of its layer (a five hundredth in fp32). Means of magnitudes are compared, so that
a few tokens that go to another expert, because scores were rounded differently, do not count.

A layer that computes across its batch (experts with a capacity), or that adds noise in evaluation, is refused
as well, in training; in inference it then runs the whole batch. A dimension that ``batch_dims`` names for the
hidden states is used as it is, and values are not compared.
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
from streamer.engine.layer.micro_batches import AmbiguousBatchError, BatchSlices, Joined, Part, Parts
from streamer.engine.layer.surroundings import autocast_settings
from streamer.engine.tensors import Tensors, constants, flatten
from streamer.engine.unit import Unit
from streamer.errors import warn
from streamer.quantized.parts import plain_parts

#: The relative difference allowed for rounding in 16 bits, and in fp32, where TF32 may be on.
ROUNDING, ROUNDING_FP32 = 0.02, 0.002


class Runs(Protocol):
    """A call of a layer."""

    @property
    def unit(self) -> Unit: ...

    def run_aside(self, weights: torch.Tensor, inputs: Tensors) -> Outputs:
        """The layer's result for ``inputs`` on the slot ``weights``. The run has no side effects."""


class WrongBatchError(AmbiguousBatchError):
    """Two slices of a batch give other results together than apart."""


def check_once(cut: BatchSlices, call: Runs, weights: torch.Tensor, inputs: Tensors) -> None:
    """If this kind of layer is cut for the first time, raise WrongBatchError if the first two slices that
    ``cut`` makes of ``inputs`` give other results together than apart; ``call`` runs on the slot ``weights``.
    [Note: the check of a batch]"""
    if cut.is_named or cut.kind in cut.checked.passed or inputs[cut.hidden].is_meta:
        return
    compare = partial(_compare, cut, call, weights, inputs)
    try:
        pair = _without_hooks(compare, call.unit.modules) or compare()
    except Exception as error:
        cut.explain(error, call.unit.name, inputs)
        raise
    if pair is None:
        dim = cut.dim
        raise WrongBatchError(
            f"micro_batch_size: layer '{call.unit.name}' computes other values for two slices together than "
            f"for each alone; {cut.described(inputs)}, or {{'{cut.layers}': {dim}}} if dimension {dim} is "
            "the batch and the layer computes across it (experts with a capacity) or adds noise in evaluation"
        )
    cut.checked.passed[cut.kind] = {pair.dims: pair.have_batch}


def passes(cut: BatchSlices, call: Runs, weights: torch.Tensor, inputs: Tensors) -> bool:
    """Whether the layer may run in slices, by `check_once`. Warns once for a kind of layer that may not."""
    if cut.kind in cut.checked.refused:
        return False
    try:
        check_once(cut, call, weights, inputs)
    except Exception as error:  # if the layer itself fails, the whole batch raises the error, too
        cut.checked.refused.add(cut.kind)
        warn(f"layer '{call.unit.name}' runs its whole batch without gradients: {error}")
        return False
    return True


def run_in_slices(
    cut: BatchSlices,
    call: Runs,
    weights: torch.Tensor,
    inputs: Tensors,
    runs: Sequence[Callable[[Tensors], Outputs]],
) -> Joined:
    """The result of ``call`` for ``inputs`` on the slot ``weights``, by ``runs``, one for each slice that
    ``cut`` makes."""
    joined: Joined | None = None
    try:
        for number, run in enumerate(runs):
            part = cut.inputs(inputs, number)
            outputs, rebuild = run(part)
            if joined is None:
                joined = Joined(call.unit.name, cut, _parts(cut, call, weights, inputs, outputs))
            joined.add(number, outputs, rebuild, part)
    except Exception as error:
        if inputs[cut.hidden].is_meta and not isinstance(error, torch.OutOfMemoryError):
            raise AmbiguousBatchError(
                f"micro_batch_size: layer '{call.unit.name}' cannot run on a part of its batch ({error}); "
                f"{cut.described(inputs)}"
            ) from error
        cut.explain(error, call.unit.name, inputs)
        raise
    assert joined is not None, "there is a slice"
    return joined


def _parts(cut: BatchSlices, call: Runs, weights: torch.Tensor, inputs: Tensors, outputs: Tensors) -> Parts:
    """The batch dimensions of ``outputs``, which the layer has returned for the first slice."""
    known, dim, (_, length) = cut.checked.passed.setdefault(cut.kind, {}), cut.dim, cut.slices[0]
    lengths = [output.shape[dim] if output.dim() > dim else 0 for output in outputs]
    dims = tuple(output.dim() for output in outputs)
    if dims not in known:
        of_slice = list(inputs[cut.hidden].shape)
        of_slice[dim] = length
        if all(list(output.shape) == of_slice for output in outputs):
            known[dims] = [True] * len(outputs)
        elif inputs[cut.hidden].is_meta:
            # a plan has no values to compare
            known[dims] = [each > 0 and not each % length for each in lengths]
        else:
            known[dims] = _Pair(cut, call, weights, inputs).have_batch
    of_each = zip(known[dims], lengths, strict=True)
    return [Part(dim, each // length) if has_batch else None for has_batch, each in of_each]


def _without_hooks(compare: Callable[[], _Pair | None], modules: Sequence[nn.Module]) -> _Pair | None:
    """The result of ``compare`` without the user's hooks on ``modules``; None if there are none."""
    hooks = [hooks for module in modules for hooks in (module._forward_pre_hooks, module._forward_hooks)]
    if all(_is_of_torch(hook) for of_one in hooks for hook in of_one.values()):
        return None
    try:
        with _without_users(hooks):
            return compare()
    except Exception:
        # the layer may need a hook, for example one that computes a weight: the next try runs with all of
        # them
        return None


class _Pair:
    """The first two slices of a batch, which a layer runs together and apart."""

    def __init__(self, cut: BatchSlices, call: Runs, weights: torch.Tensor, inputs: Tensors) -> None:
        self.cut = cut._replace(slices=cut.slices[:2])
        lengths = [length for _, length in self.cut.slices]
        self.both = cut._replace(slices=[(0, sum(lengths))]).inputs(inputs, 0)
        self.slices = [self.cut.inputs(self.both, number) for number in range(2)]
        self.together = call.run_aside(weights, self.both)
        self.apart = [call.run_aside(weights, each) for each in self.slices]
        # `Joined` finds tensors that only some slices have returned
        of_each = zip(self.together[0], *(outputs for outputs, _ in self.apart), strict=False)
        self.parts = [_part(cut.dim, lengths, tensors) for tensors in of_each]
        self.have_batch = [part is not None for part in self.parts]
        self.dims = tuple(output.dim() for output in self.together[0])


def _compare(cut: BatchSlices, call: Runs, weights: torch.Tensor, inputs: Tensors) -> _Pair | None:
    """Two slices that give the same results together and apart, up to rounding; None if they do not."""
    unit = call.unit
    with _in_evaluation(unit.modules), _WithoutDropout():
        pair = _Pair(cut, call, weights, inputs)
    joined = Joined(unit.name, pair.cut, pair.parts)
    for number, (outputs, rebuild) in enumerate(pair.apart):
        joined.add(number, outputs, rebuild, pair.slices[number])
    is_cast = any(enabled for _, enabled, _ in autocast_settings(weights.device))
    tolerance = ROUNDING if is_cast or any(map(_is_short, (*unit.params, *pair.both))) else ROUNDING_FP32
    apart, together = joined.rebuild([*joined.tensors, *pair.both]), _result(pair.together, pair.both)
    return pair if _are_alike(apart, together, pair.both[cut.hidden], tolerance) else None


def _part(dim: int, lengths: Sequence[int], tensors: Sequence[torch.Tensor]) -> Part | None:
    """The batch dimension of a tensor that the layer has returned for two slices of these ``lengths``
    together and then for each."""
    sizes = [tensor.shape[dim] if tensor.dim() > dim else 0 for tensor in tensors]
    per_sample, rest = divmod(sizes[0], sum(lengths))
    is_of_each = sizes[1:] == [per_sample * length for length in lengths]
    return Part(dim, per_sample) if per_sample and not rest and is_of_each else None


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
    # rows of padding alone may be NaN
    one, other = (tensor.where(of_one, 0) for tensor in (one, other))
    added = other
    if other.shape == hidden.shape and hidden.is_floating_point():
        added = other.float() - hidden.where(of_one, 0).float()
    wide = torch.complex64 if one.is_complex() else torch.float32
    difference = (one.to(wide) - other.to(wide)).abs().mean()
    return bool(difference <= tolerance * added.to(wide).abs().mean())


class _WithoutDropout(TorchFunctionMode):
    """Leaves out dropout that a layer applies regardless of its modules' training mode."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func in _DROPOUTS:
            options["training"] = False
        elif func is torch.dropout:
            return options.get("input", next(iter(args), None))
        elif func is F.scaled_dot_product_attention and len(args) > 4:
            args = (*args[:4], 0.0, *args[5:])
        elif func is F.scaled_dot_product_attention:
            options["dropout_p"] = 0.0
        return func(*args, **options)


_DROPOUTS = frozenset(
    (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
)


@contextmanager
def _in_evaluation(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let ``modules`` be in evaluation mode inside the block."""
    # not by `eval`, which modules may override, for example to merge adapters
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
    """Inside the block, each of ``hooks``, of a module, has no hooks except PyTorch's own, which compute
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
            # restore their order
            of_one.clear()
            of_one.update(had | others)


def _is_of_torch(hook: Callable[..., Any]) -> bool:
    """Whether ``hook`` is a function of PyTorch, or an object of one of its classes."""
    if isinstance(hook, functools.partial):
        hook = hook.func
    owners = [hook, *type(hook).__mro__]
    return any(str(getattr(owner, "__module__", "")).partition(".")[0] == "torch" for owner in owners)
