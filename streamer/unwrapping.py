"""`unwrap`: a streamed model becomes a plain one again."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from streamer.engine import op as ops
from streamer.engine.executor import Executor
from streamer.engine.guarded import as_plain
from streamer.engine.layer import StreamedLayer
from streamer.handle import HANDLE, settle_out, wrapped
from streamer.memory.purposes import ALL_MOMENTS
from streamer.moving import take_out

M = TypeVar("M", bound=nn.Module)


@as_plain
def unwrap(model: M) -> M:
    """Make ``model`` a plain CPU module again, with the trained weights, and give its memory back.

    Parameters get the dtype that they had before `wrap`, from their exact masters, unless somebody has
    replaced them or their memory since; gradients are dropped. What an optimizer holds for the model is of no
    more use, and the memory of its moments comes back when it goes. Returns the model.

    Raises ValueError if the model is not wrapped.
    """
    handle = wrapped(model)
    executor = handle.executor
    executor.wait_for_saving()
    units = (*executor.units, executor.root)
    # copies to the device may have failed without harm to what is here
    executor.issuer.wait(ops.shard(unit.index) for unit in units)
    for unit in units:
        executor.weights.end_flight(unit)
    moved = {param for unit in units for _, param in executor.weights.elsewhere(unit)}
    executor.weights.refresh(moved)
    # room for the weights that come out
    executor.store.drop(ALL_MOMENTS)
    for unit in units:
        unit.drop_leaves()
        take_out(executor.backend, unit, executor.shard(unit), handle.plain_dtypes, moved)
    forget(model, executor)
    handle.take_off()
    handle.close()
    executor.release()
    return model


def forget(model: nn.Module, executor: Executor) -> None:
    """Take off what tells a wrapped model and its parameters where they live, and let its layers run as they
    are."""
    for unit in executor.units:
        stands_in = unit.module.__dict__.pop("forward", None)
        if isinstance(stands_in, StreamedLayer) and stands_in.had is not None:
            unit.module.__dict__["forward"] = stands_in.had
    settle_out(executor)
    model.__dict__.pop(HANDLE, None)
