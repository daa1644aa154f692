"""A layer's forward without a graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from streamer.engine.cut import Cut
from streamer.engine.joining import Joined
from streamer.engine.kvcache import holds_cache
from streamer.engine.micro_batches import AmbiguousBatchError, MicroBatches
from streamer.engine.sharing import untangle
from streamer.engine.tree import fingerprint, flatten, reachable
from streamer.engine.unit import Unit


def infer(
    run: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    unit: Unit,
    micro_batches: MicroBatches,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """What ``run`` makes of ``args`` and ``kwargs``: of the very same objects where the batch is not cut, as
    it is not beside a key/value cache, which is written.

    Raises ValueError where a layer whose batch is cut changes what it is given, or writes a cache of its own.
    """
    inputs, rebuild = flatten((args, kwargs))
    cut = Cut.none(inputs)
    # generation comes by sequences that are as long as the batch: all of them at a time is never wrong
    with suppress(AmbiguousBatchError):
        cut = micro_batches.cut(args, kwargs, inputs) if not holds_cache(args, kwargs) else cut
    if len(cut.slices) == 1:
        return run(args, kwargs)
    joined = Joined(unit.name, cut, inputs)
    start_again = unit.start_again()
    for number in range(len(cut.slices)):
        start_again()
        given = cut.inputs(inputs, number)
        given_args, given_kwargs = rebuild(given)
        before, kept = fingerprint((given_args, given_kwargs)), _kept(unit)
        outputs, rebuild_result = untangle(unit.name, *flatten(run(given_args, given_kwargs)), given)
        if fingerprint((given_args, given_kwargs)) != before:
            raise ValueError(
                f"layer '{unit.name}' changes what it is given (a tensor in place, or a list), and would do "
                "so for each micro-batch: let it return the new value, or wrap without micro_batch_size"
            )
        _check_kept(unit, kept, cut.slices[number][1])
        joined.add(number, outputs, rebuild_result, given)
    return joined.rebuild([*joined.tensors, *inputs])


def _kept(unit: Unit) -> list[tuple[torch.Tensor, int]]:
    """Tensors of two dimensions or more that the modules of ``unit`` have beside parameters, and their
    versions."""
    held = [
        value
        for values in unit.attributes().values()
        for name, value in values.items()
        if name not in ("_parameters", "_modules")
    ]
    return [
        (tensor, 0 if tensor.is_inference() else tensor._version)
        for tensor in reachable(held)
        if tensor.dim() > 1
    ]


def _check_kept(unit: Unit, before: list[tuple[torch.Tensor, int]], length: int) -> None:
    """Refuse what is kept of a slice of ``length`` samples, since the next one would find it as its own."""
    versions = {id(tensor): version for tensor, version in before}
    for tensor, version in _kept(unit):
        if version != versions.get(id(tensor), version) or (
            id(tensor) not in versions and tensor.shape[0] == length
        ):
            raise ValueError(
                f"layer '{unit.name}' writes a tensor of shape {tuple(tensor.shape)} that it keeps, a "
                "key/value cache say, where micro-batches would find one another's: wrap without "
                "micro_batch_size"
            )
