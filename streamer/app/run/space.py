"""The disk that a run's own files take, known before it begins: checkpoints, and the weights at its end."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from streamer.app.config import Config, ConfigError
from streamer.app.run.beside import bytes_beside, files_beside
from streamer.app.run.run_folder import FOLDER
from streamer.checkpoint.manifest import checkpoints
from streamer.errors import amount
from streamer.model.units import kept_dtype
from streamer.optim.state import parse_state_dtype
from streamer.store.purposes import BF16, FP32, MOMENTS
from streamer_native import QUANTUM


@dataclass(frozen=True)
class Space:
    """Bytes on disk: of one ``checkpoint``, of which there are ``most`` at a time, the one that is being
    written with them, and of the ``weights`` that a pretrained model's run writes in the end, with what it
    writes ``beside`` them."""

    checkpoint: int
    most: int
    weights: int
    beside: int

    @property
    def peak(self) -> int:
        """The most that the run's folder holds."""
        return self.checkpoint * self.most + self.weights + self.beside

    def line(self) -> str:
        """What the run writes, in words."""
        times = f", {self.most} of them at the peak" if self.most > 1 else ""
        parts = [f"a checkpoint takes {amount(self.checkpoint)}{times}"] if self.most else []
        if self.weights:
            parts.append(f"the weights in the end {amount(self.weights)}, {amount(self.beside)} beside them")
        return f"{' and '.join(parts)}: {amount(self.peak)} in all"


def space_of(config: Config, model: nn.Module) -> Space:
    """What a run of ``config`` writes; ``model`` is its model, values or not.

    A trained parameter takes its fp32 master and its moments as they are held, a frozen one its own dtype;
    of adapters the base is left out, since it is in files already.
    """
    lora, run = bool(config.lora.rank), config.run
    streamed = None if config.stream.dtype is None else getattr(torch, config.stream.dtype)
    checkpoint = weights = tensors = 0
    for param in model.parameters():
        dtype = param.dtype
        if streamed is not None and param.is_floating_point():
            dtype = kept_dtype(param) or streamed
        if param.requires_grad:
            checkpoint += param.numel() * 4 + _moment_bytes(config, param.numel(), dtype)
        elif not lora:
            checkpoint += param.numel() * dtype.itemsize
        if param.requires_grad or not lora:
            weights += param.numel() * dtype.itemsize
            tensors += 1
    pretrained = config.model.pretrained is not None
    if run.save_every or run.keep_best:
        at_most = (
            run.steps // every + 1 for every in (run.save_every, run.keep_best * run.eval_every) if every
        )
        most = run.keep + 1 + run.keep_best
        # of epochs nobody knows yet how many steps they are
        most = min(most, sum(at_most)) if run.steps else most
    else:
        most = 0 if pretrained else 1
    if not pretrained:
        return Space(checkpoint, most, 0, 0)
    return Space(checkpoint, most, weights, bytes_beside(files_beside(config), tensors))


def _moment_bytes(config: Config, numel: int, dtype: torch.dtype) -> int:
    state = parse_state_dtype(config.optimizer.state_dtype) if dtype is BF16 else FP32
    first, second, *scales = MOMENTS[state]
    blocks = -(-numel // QUANTUM)
    of_scales = sum(scale.dtype.itemsize * blocks for scale in scales)
    return numel * (first.dtype.itemsize + second.dtype.itemsize) + of_scales


def check_space(config: Config, model: nn.Module, folder: Path | None = None) -> Space:
    """What the run writes into ``folder``, that of a run to go on, or into a new one. Raises ConfigError
    where its disk has too little room for it."""
    space = space_of(config, model)
    there = Path(config.run.out) if folder is None else folder
    while not there.exists():
        there = there.parent
    saved = [] if folder is None else checkpoints(folder / FOLDER)
    free = shutil.disk_usage(there).free + sum(map(_size, saved))
    if space.peak > free:
        others = ["run.out on a larger disk"]
        if space.most > 2 and space.peak - space.checkpoint * (space.most - 2) <= free:
            others.append("run.keep=1")
        raise ConfigError(
            f"the run's files do not fit: {space.line()}, and {os.path.abspath(there)} has {amount(free)} "
            f"free: give it {' or '.join(f'--set {other}' if '=' in other else other for other in others)}"
        )
    return space


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
