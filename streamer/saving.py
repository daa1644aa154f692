"""`save`: a wrapped model, its optimizer and all that a run goes on from, in safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from streamer.backends.handover import Handover, in_background
from streamer.content import content_of
from streamer.files.folder import new_folder
from streamer.fitting import check_owns
from streamer.handle import wrapped
from streamer.memory.host import HostShard
from streamer.optim import AdamW

#: Units that may wait in copies while training goes on.
MOST_COPIES = 2


def save(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    path: str | PathLike[str],
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    block: bool = True,
) -> Future[None]:
    """Write a checkpoint of a wrapped model into the new folder ``path``, complete or not at all.

    In it are, in safetensors files: for each unit the weights (fp32 masters where they are trained, whatever
    dtype they are streamed in, else as they are), the optimizer's moments as they are held and, between
    backward calls that add up, the gradients; buffers; the states of the generators of random numbers; and
    ``extra``, of numbers, strings, lists, tuples, dicts, tensors and arrays (``scheduler.state_dict()``,
    ``scaler.state_dict()``, the position in the data). ``manifest.json`` lists every tensor with its shape,
    dtype and CRC-32. There is no pickle. `streamer.load` goes on from there to the bit.

    Waits for the updates that are running, and writes straight from host memory: beside the model no more
    than two parameters' tensors are made. With ``block=False`` it returns once it knows what to write and
    training may go on: an update copies its unit first if that has not been written yet, up to two units,
    and waits beyond that. Then weights must not be written by hand until the returned future is done; its
    ``result()`` raises what went wrong, or else the next `save` does. ``optimizer`` may be one of
    ``torch.optim``, or None.

    Raises ValueError for what cannot be saved, FileExistsError where there is something at ``path``, and
    OSError, with the path and the bytes that are needed, where it cannot be written; then nothing is left.
    """
    executor = wrapped(model).executor
    executor.wait_for_saving()
    if executor.saving is not None and not executor.saving.asked:
        executor.saving.result()
    if isinstance(optimizer, AdamW):
        check_owns(optimizer, executor)
    executor.synchronize()
    content = content_of(model, optimizer, executor, step, dict(extra or {}))
    path = Path(path)
    if block:
        with new_folder(path, nbytes=content.nbytes) as folder, content.flushing:
            for unit in content.units:
                content.write_unit(folder, unit, executor.shard(unit), on_host=True)
            content.write_rest(folder)
        done: Future[None] = Future()
        done.set_result(None)
        return done
    content.hold()
    shards = {unit.index: executor.shard(unit) for unit in content.units}
    handover: Handover[int, HostShard] = Handover(shards, most_copies=MOST_COPIES)
    by_index = {unit.index: unit for unit in content.units}
    for index, shard in shards.items():
        shard.before_change = partial(handover.before_change, index, shard.copy)

    def write() -> None:
        try:
            with new_folder(path, nbytes=content.nbytes) as folder, content.flushing:
                handover.read_all(
                    lambda index, copy: content.write_unit(folder, by_index[index], copy or shards[index])
                )
                content.write_rest(folder)
        finally:
            handover.read_all(lambda *_: None)  # nobody is to wait, should the folder not be made
            for shard in shards.values():
                shard.before_change = None

    executor.saving = in_background(write, "streamer-save")
    return executor.saving
