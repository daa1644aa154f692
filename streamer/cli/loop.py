"""`streamer train` for your own model: a loop over crops of a text, as in nanoGPT."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import streamer
from streamer.backends.ranks import Ranks
from streamer.checkpoint.manifest import Manifest
from streamer.cli.build import build_model, build_optimizer
from streamer.cli.config import Config, ConfigError, TrainConfig, dump_config, in_keys
from streamer.cli.data import TOKEN_FILES, find_files
from streamer.cli.export import checkpoints_of
from streamer.cli.plan.command import check_memory
from streamer.cli.plan.planning import settle
from streamer.cli.run import (
    CONFIG,
    FAILURES,
    METRICS,
    Batch,
    Lines,
    Stop,
    failed,
    logits_of,
    loss_function,
    model_line,
    seconds_of,
    silent,
    step_on,
    write_end,
)
from streamer.engine.handle import wrapped

#: Length of the prompt of the final sample, in tokens of validation text.
PROMPT = 64


# data


@dataclass(frozen=True)
class Text:
    """Tokens to train on and to validate on, 1-dimensional arrays of integers; bytes if the files are
    text."""

    train: Any
    val: Any
    is_bytes: bool

    def crops(self, split: Any, starts: np.ndarray[Any, Any], time: int) -> Batch:
        places = starts[:, None] + np.arange(time + 1)
        crops = torch.from_numpy(np.asarray(split[places], dtype=np.int64))
        return crops[:, :-1], crops[:, 1:], {}

    def drawn(self, count: int, time: int, draws: torch.Generator) -> Batch:
        """Crops of the training tokens at random places."""
        starts = torch.randint(len(self.train) - time, (count,), generator=draws)
        return self.crops(self.train, starts.numpy(), time)

    def validation(self, batches: int, count: int, time: int) -> list[Batch]:
        """Batches of crops spaced evenly over the validation tokens, the same at each call."""
        starts = np.linspace(0, len(self.val) - time - 1, batches * count).astype(np.int64)
        return [
            self.crops(self.val, starts[begin : begin + count], time)
            for begin in range(0, len(starts), count)
        ]

    def unigram_loss(self) -> float:
        """Nats per token of a model that knows only the frequencies of the training tokens."""
        size = int(max(self.train.max(), self.val.max())) + 1
        train, val = (np.bincount(np.asarray(split), minlength=size) for split in (self.train, self.val))
        logs = np.log((train + 1) / (train + 1).sum())
        return float(-(val / val.sum() * logs).sum())

    def decode(self, tokens: Sequence[int]) -> str:
        return (
            bytes(tokens).decode("utf-8", errors="replace") if self.is_bytes else " ".join(map(str, tokens))
        )


def load_text(config: Config) -> Text:
    """The data of ``config``: text as bytes, or files of tokens (uint16 ``.bin`` as nanoGPT's, ``.npy``),
    mapped.

    A hash of their names selects a share of the files for validation; a single file is split at its tail.
    Raises ConfigError if a split is shorter than ``train.max_length``.
    """
    data, files = config.data, find_files(config.data.paths)
    if data.dataset is not None or any(path.suffix in (".jsonl", ".parquet") for path in files):
        raise ConfigError("your own model trains on text or tokens: JSON lines and datasets need model.path")
    is_bytes = not any(path.suffix in TOKEN_FILES for path in files)
    if data.val_paths:
        val_files = find_files(data.val_paths)
        train, val = _joined(files), _joined(val_files)
    elif len(files) == 1:
        tokens = _joined(files)
        held_out = max(1, round(len(tokens) * data.val_fraction))
        train, val = tokens[:-held_out], tokens[-held_out:]
    else:
        root = os.path.commonpath([path.parent for path in files])
        shares = {path: _share(os.path.relpath(path, root)) for path in files}
        limit = max(data.val_fraction, min(shares.values()))
        train = _joined([path for path in files if shares[path] > limit])
        val = _joined([path for path in files if shares[path] <= limit])
    context = config.train.max_length
    for name, split in (("training", train), ("validation", val)):
        if len(split) <= context:
            raise ConfigError(
                f"the {name} data has {len(split)} tokens, and train.max_length = {context} needs more"
            )
    return Text(train, val, is_bytes)


def _share(name: str) -> float:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32


def _joined(files: Sequence[Path]) -> Any:
    parts: list[Any] = []
    for path in files:
        if path.suffix == ".npy":
            parts.append(np.load(path, mmap_mode="r"))
        elif path.suffix == ".bin":
            parts.append(np.memmap(path, dtype=np.uint16, mode="r"))
        else:
            parts.append(np.memmap(path, dtype=np.uint8, mode="r"))
    return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.zeros(0, np.uint8)


def schedule(train: TrainConfig) -> Callable[[int], float]:
    """The factor of the learning rate at each step, as transformers' schedules of the same names."""
    share = train.warmup_steps
    warmup = round(share * train.max_steps) if 0 < share < 1 else int(share)
    least = float(train.lr_scheduler_kwargs.get("min_lr", 0.0)) / train.learning_rate

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        done = min(1.0, (step - warmup) / max(1, train.max_steps - warmup))
        if train.lr_scheduler_type == "constant":
            return 1.0
        if train.lr_scheduler_type == "linear":
            return 1.0 - done
        return least + (1 - least) * 0.5 * (1 + math.cos(math.pi * done))

    return factor


# the run


class Loop:
    """A run: model, optimizer, data, and the position in the data."""

    def __init__(self, config: Config, model: nn.Module, text: Text, ranks: Ranks) -> None:
        self.config, self.train, self.model, self.text, self.ranks = config, config.train, model, text, ranks
        self.optimizer = build_optimizer(config, model)
        self.factor = schedule(self.train)
        self.draws = torch.Generator().manual_seed(self.train.seed)
        self.loss_of = loss_function(model)
        self.step = 0
        self.losses: dict[str, float] = {}
        model.train()

    def batches(self) -> list[Batch]:
        """This rank's forwards of the next step. The step's crops are the same for any number of ranks."""
        train, ranks = self.train, self.ranks
        crops = self.text.drawn(train.batch_size * ranks.size, train.max_length, self.draws)
        mine = [
            part.chunk(ranks.size)[ranks.rank].split(train.per_device_train_batch_size) for part in crops[:2]
        ]
        return [(tokens, targets, {}) for tokens, targets in zip(*mine, strict=True)]

    def train_step(self) -> dict[str, float]:
        """The next update; its loss in nats per token, over all ranks, learning rate and norm."""
        rate = self.train.learning_rate * self.factor(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss, norm = step_on(self.config, self.model, self.optimizer, self.loss_of, self.batches())
        self.step += 1
        of_all = self.ranks.exchange(f"the loss of step {self.step}", float(loss))
        values = {"loss": sum(of_all) / len(of_all), "lr": rate}
        return values if norm is None else values | {"grad_norm": float(norm)}

    @torch.no_grad()
    def validate(self) -> float:
        """The mean loss on the validation batches, in nats per token; each rank computes part of them. Raises
        ConfigError for a model that cannot run on them."""
        train, ranks = self.train, self.ranks
        batches = self.text.validation(
            train.eval_batches, train.per_device_train_batch_size, train.max_length
        )
        try:
            with self._evaluating():
                mine = [float(self.loss_of(self.model, batch)) for batch in batches[ranks.rank :: ranks.size]]
        except (ValueError, IndexError) as error:
            raise ConfigError(
                f"the model cannot run on sequences of train.max_length = {train.max_length}: "
                f"{in_keys(str(error))}; correct model.args or train.max_length"
            ) from error
        found = ranks.exchange(f"the validation after step {self.step}", sum(mine), patient=True)
        loss: float = sum(found) / sum(batch[1].numel() for batch in batches)
        self.losses.setdefault("first_val_loss", loss)
        self.losses["last_val_loss"] = loss
        return loss

    @torch.no_grad()
    def sample(self, count: int) -> str:
        """Text of ``count`` tokens that the model writes after the first `PROMPT` tokens of validation
        text."""
        options, draws = self.config.sample, torch.Generator().manual_seed(self.train.seed)
        tokens = self.text.val[:PROMPT].tolist()
        with self._evaluating():
            for _ in range(count):
                window = tokens[-self.train.max_length :]
                logits = logits_of(self.model(torch.tensor([window])))[0, -1].float().cpu()
                if 0 < options.top_k < len(logits):
                    logits[logits < logits.topk(options.top_k).values[-1]] = -math.inf
                chances = F.softmax(logits / max(options.temperature, 1e-6), -1)
                tokens.append(int(torch.multinomial(chances, 1, generator=draws)))
        return self.text.decode(tokens)

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Inside the block the model is in evaluation mode, as are the weights of schedule-free
        optimizers."""
        modes: list[Any] = [self.model] + [self.optimizer] * hasattr(self.optimizer, "eval")
        for each in modes:
            each.eval()
        try:
            yield
        finally:
            for each in modes:
                each.train()

    def save(self, out: Path) -> Path:
        """Write the checkpoint of this step into ``out``, and delete the oldest beyond
        ``train.save_total_limit``."""
        place = out / f"checkpoint-{self.step}"
        extra = {"draws": self.draws.get_state(), "losses": self.losses}
        if not place.exists():
            streamer.save(self.model, self.optimizer, place, step=self.step, extra=extra)
        if self.ranks.is_first:
            for old in checkpoints_of(out)[: -self.train.save_total_limit]:
                shutil.rmtree(old)
        return place

    def load(self, checkpoint: Path) -> None:
        """Continue from ``checkpoint``, bitwise; learning rates follow the configuration."""
        loaded = streamer.load(self.model, self.optimizer, checkpoint)
        self.step, self.losses = loaded.step, dict(loaded.extra["losses"])
        self.draws.set_state(loaded.extra["draws"])


def train_own(config: Config, *, resume: str | None = None) -> None:
    """Train the model of ``model.factory``; write checkpoints, metrics and a summary into
    ``train.output_dir``, or, if it exists, a folder with a number after its name.

    ``resume`` is a checkpoint or a run's folder, or empty for the last run of that name. On the first Ctrl-C
    or SIGTERM the run finishes its step and saves. Raises ConfigError, in one line, for an unusable
    configuration."""
    checkpoint = None if resume is None else _checkpoint_to_resume(config, resume)
    with _ranks(config) as ranks:
        say: Callable[..., None] = print if ranks.is_first else silent
        config, chosen = settle(config, ranks=ranks.local_size, machines=ranks.machines)
        if chosen is not None:
            say(f"chosen: {chosen.reason}")
        text = load_text(config)
        check_memory(config, ranks.local_size, ranks.machines)
        out = checkpoint.parent if checkpoint is not None else _free(Path(config.train.output_dir))
        torch.manual_seed(config.train.seed)
        model = build_model(config, process_group=None if ranks.is_alone else dist.group.WORLD)
        try:
            loop = Loop(config, model, text, ranks)
            if checkpoint is not None:
                loop.load(checkpoint)
            else:
                loop.validate()
            out = Path(ranks.from_first("the folder of the run", str(out)))
            if ranks.is_first:
                out.mkdir(parents=True, exist_ok=checkpoint is not None)
                (out / CONFIG).write_text(dump_config(config))
            train, unit = config.train, "bytes" if text.is_bytes else "tokens"
            each = "" if ranks.is_alone else f" on each of {ranks.size} ranks"
            say(model_line(model))
            say(f"data: {len(text.train):,} {unit} to train on, {len(text.val):,} to validate")
            say(
                f"steps {loop.step + 1} to {train.max_steps} of {train.batch_size} x {train.max_length} "
                f"tokens{each}, to {out}"
            )
            _run(loop, out, say)
        finally:
            wrapped(model).close()


def _run(loop: Loop, out: Path, say: Callable[..., None]) -> None:
    train, ranks, lines, first = loop.train, loop.ranks, Lines(out / METRICS), None
    tokens, seconds = train.batch_size * ranks.size * train.max_length, list[float]()
    unit, unigram = "byte" if loop.text.is_bytes else "token", loop.text.unigram_loss()
    if ranks.is_first:
        lines.forget_after(loop.step)

    def log(values: dict[str, float], words: str | None) -> None:
        if ranks.is_first:
            lines.add({"step": loop.step, **values})
        if words is not None:
            say(f"step {loop.step}: {words}", flush=True)

    def log_validation() -> None:
        loss = loop.losses["last_val_loss"]
        log({"val_loss": loss}, f"validation loss {loss:.3f} ({unit} frequencies alone: {unigram:.3f})")

    with Stop() as stop:
        if loop.step == 0:
            log_validation()
        while loop.step < train.max_steps:
            begun = time.perf_counter()
            try:
                values = loop.train_step()
            except FAILURES as error:
                raise failed(loop.step + 1, error) from error
            seconds.append(time.perf_counter() - begun)
            first = first or seconds_of(loop.model)
            values["tokens_per_second"] = tokens / seconds[-1]
            words = f"loss {values['loss']:.3f}, {values['tokens_per_second']:,.0f} tokens/s"
            log(values, words if loop.step % train.logging_steps == 0 else None)
            if loop.step % train.eval_steps == 0 or loop.step == train.max_steps:
                loop.validate()
                log_validation()
            is_stopped = any(ranks.exchange(f"signals after step {loop.step}", stop.signal is not None))
            is_due = train.save_steps and loop.step % train.save_steps == 0
            if is_due or is_stopped or loop.step == train.max_steps:
                place = loop.save(out)
            if is_stopped and loop.step < train.max_steps:
                say(f"stopped after step {loop.step}; --resume {place} continues")
                return
    if loop.config.sample.tokens:
        sample = loop.sample(loop.config.sample.tokens)
        say(f"\nA sample, after the first {PROMPT} {unit}s of validation text:\n\n{sample}")
    if ranks.is_first:
        speed = tokens / statistics.median(seconds[len(seconds) // 10 :]) if seconds else 0.0
        trained = {"tokens_per_second": speed, **loop.losses, "unigram_loss": unigram}
        write_end(loop.model, out, first, trained, unit=unit)
    say(f"Written to {out}: streamer plot {out} draws it, streamer export {out} --to DIR writes its weights")


def _free(wanted: Path) -> Path:
    """``wanted``, or the first path with a number after it that does not exist."""
    numbered = (wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([wanted], numbered) if not path.exists())


def _checkpoint_to_resume(config: Config, resume: str) -> Path:
    wanted = Path(config.train.output_dir)
    runs = [Path(resume)]
    if not resume:
        runs = sorted(wanted.parent.glob(f"{wanted.name}*"), key=lambda path: path.stat().st_mtime)
    found = [each for run in runs for each in checkpoints_of(run)]
    if not found:
        raise ConfigError(f"{resume or wanted} has no complete checkpoint: train without --resume")
    if Manifest.read(found[-1]).step >= config.train.max_steps:
        raise ConfigError(f"{found[-1]} is the end of its run: for more steps, --set train.max_steps=...")
    return found[-1]


@contextlib.contextmanager
def _ranks(config: Config) -> Iterator[Ranks]:
    """The processes that torchrun has started, or this one alone. Raises ConfigError for more than GPUs."""
    kind = (config.stream.device or ("cuda" if torch.cuda.is_available() else "cpu")).partition(":")[0]
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield Ranks(None, torch.device(kind))
        return
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    if kind == "cuda":
        if here > (gpus := torch.cuda.device_count()):
            raise ConfigError(f"torchrun has started {here} processes here, and there are {gpus} GPUs")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    ranks = Ranks(dist.group.WORLD, torch.device(kind))
    try:
        yield ranks
    finally:
        ranks.leave()
        dist.destroy_process_group()
