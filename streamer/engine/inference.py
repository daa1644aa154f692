"""A layer's forward without a graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from streamer.engine.joining import Joined
from streamer.engine.kvcache import holds_cache
from streamer.engine.micro_batches import AmbiguousBatchError, Cut, MicroBatches
from streamer.engine.tree import fingerprint, flatten


def infer(
    run: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    layer: str,
    micro_batches: MicroBatches,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """What ``run`` makes of ``args`` and ``kwargs``: of the very same objects where the batch is not cut, as
    it is not beside a key/value cache, which is written.

    Raises ValueError where a layer whose batch is cut changes what it is given.
    """
    inputs, rebuild = flatten((args, kwargs))
    cut = Cut.none(inputs)
    # generation comes by sequences that are as long as the batch: all of them at a time is never wrong
    with suppress(AmbiguousBatchError):
        cut = micro_batches.cut(args, kwargs, inputs) if not holds_cache(args, kwargs) else cut
    if len(cut.slices) == 1:
        return run(args, kwargs)
    joined = Joined(layer, cut, inputs)
    results = []
    for number in range(len(cut.slices)):
        given = cut.inputs(inputs, number)
        given_args, given_kwargs = rebuild(given)
        before = fingerprint((given_args, given_kwargs))
        outputs, put_together = flatten(run(given_args, given_kwargs))
        if fingerprint((given_args, given_kwargs)) != before:
            raise ValueError(
                f"layer '{layer}' changes what it is given (a tensor in place, or a list), and would do so "
                "for each micro-batch: let it return the new value, or wrap without micro_batch_size"
            )
        joined.add(number, outputs, given)
        results.append(put_together)
    return results[0](joined.tensors)
