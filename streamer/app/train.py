"""The command `streamer train`: the steps of a run, the files it writes, and how it ends early."""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import torch
from tqdm import tqdm

import streamer
from streamer.app.config import Config
from streamer.app.plan.command import check_memory
from streamer.app.plan.planning import RunPlan, settle
from streamer.app.run.adapters import write_adapters
from streamer.app.run.build import build_model, build_optimizer, check_fits, load_data, write_pretrained
from streamer.app.run.loop import Loop
from streamer.app.run.run_folder import (
    Checkpoints,
    amount,
    forget_after,
    numbered,
    run_directory,
    summary_of,
    summary_table,
)
from streamer.app.signals import Stop, stopping
from streamer.engine.paging.handle import wrapped
from streamer.model.options import parse_bytes

#: Tokens of validation text that the sample at the end continues.
PROMPT_TOKENS = 64
#: Where a pretrained model is written in the end, in the run's directory.
PRETRAINED = "model"
#: Where adapters of one are.
ADAPTERS = "adapters"
#: A run that has gone back to a checkpoint this often stops.
MOST_RETURNS = 10


class StoppedError(RuntimeError):
    """A run that cannot go on: one line that says why, and from which checkpoint to resume."""


def train(config: Config, resume: Path | None = None, *, fall_back: bool = False) -> dict[str, Any] | None:
    """Train as ``config`` says, printing to the terminal; writes ``config.toml``, ``metrics.jsonl``,
    ``trace.json`` (of the last 20,000 ops), ``summary.json`` and checkpoints into a new directory.

    With ``resume``, a checkpoint's folder, goes on from there in its run's directory; where it is damaged
    and ``fall_back`` says so, from the one before. Ctrl-C or SIGTERM lets the step end, saves, says where to
    go on from, and None is returned; a second one ends the process. Else returns what ``summary.json`` holds.

    Raises ConfigError, in one line, for anything in the config that cannot be honoured, StoppedError where a
    gradient is not finite and the config says to stop, and OSError where a checkpoint cannot be written.
    """
    data = load_data(config)
    config, chosen = settle(config)
    if chosen is not None:
        print(f"chosen: {chosen.reason}")
    plan = check_memory(config)
    torch.manual_seed(config.run.seed)
    model = build_model(_leaving_room(config, plan))
    try:
        optimizer = build_optimizer(config.optimizer, model, skip_nonfinite=config.run.nonfinite == "skip")
        wrapped(model).executor.host_limit = parse_bytes("host_memory", config.memory.host)
        check_fits(model, data, config.data.context)
        loop = Loop(config, model, optimizer, data)
        if resume is None:
            # a model that cannot run on this data raises here, before there is a directory
            loop.first_val_loss = loop.validate()
            directory = run_directory(config)
        else:
            directory = resume.parent.parent
            saved = Checkpoints(directory, keep=config.run.keep)
            loop.go_on_from(saved.load(model, optimizer, resume, fall_back=fall_back))
            forget_after(directory / "metrics.jsonl", loop.step)
        with stopping() as stop:
            _print_beginning(loop, directory)
            with (directory / "metrics.jsonl").open("a") as metrics, _bar(loop) as bar:
                seconds = _Run(loop, directory, metrics, bar).run(stop)
            return _finish(loop, directory, seconds) if seconds is not None else None
    finally:
        # unlike unwrap, close does not copy the weights back, for which there may be no memory
        wrapped(model).close()


def _leaving_room(config: Config, plan: RunPlan | None) -> Config:
    """``config`` for a model and an optimizer that leave room in host memory for the layer inputs that wait
    there in a step, which ``plan`` knows, and have more on disk."""
    if plan is None or not plan.has_disk or not plan.step.host_for_inputs:
        return config
    room = max(1, plan.room.host_room() - plan.step.host_for_inputs)
    return replace(config, memory=replace(config.memory, host=f"{room}B"))


def _bar(loop: Loop) -> tqdm[Any]:
    # a log file needs a line now and then, a terminal wants to be alive
    interval = 0.2 if sys.stderr.isatty() else 10.0
    return tqdm(
        total=loop.config.run.steps,
        initial=loop.step,
        unit="step",
        dynamic_ncols=True,
        mininterval=interval,
    )


class _Run:
    """The steps of a run, with the metrics and checkpoints that they leave."""

    def __init__(self, loop: Loop, directory: Path, metrics: TextIO, bar: tqdm[Any]) -> None:
        self._loop = loop
        self._config = loop.config.run
        self._metrics = metrics
        self._bar = bar
        # the base of adapters is in files already
        frozen = not loop.config.lora.rank
        self._checkpoints = Checkpoints(directory, keep=self._config.keep, frozen=frozen)
        self._unigram = loop.data.unigram_entropy()
        self._seconds: list[float] = []

    def run(self, stop: Stop) -> list[float] | None:
        """Make the steps that are left: the seconds of each, or None if a signal ended the run before."""
        loop, run = self._loop, self._config
        if loop.step == 0:
            self._report_validation()
        while loop.step < run.steps:
            if not self._step():
                continue
            last = loop.step == run.steps
            if loop.step % run.eval_every == 0 or last:
                loop.validate()
                self._report_validation()
            if run.save_every and (loop.step % run.save_every == 0 or last):
                self._save()
            if stop.signal is not None and not last:
                path = self._save()
                saved = ", but not saved" if path is None else f"; go on with --resume {path}"
                self._bar.write(f"stopped by {stop.signal.name} after step {loop.step}{saved}")
                return None
        return self._seconds

    def _step(self) -> bool:
        """Whether a step was made; False where the run went back to a checkpoint instead."""
        loop = self._loop
        begun = time.perf_counter()
        skipped = streamer.stats(loop.model).skipped_steps
        try:
            measured = loop.train_step()
        except streamer.NonFiniteError as error:
            self._return(error)
            return False
        except (torch.OutOfMemoryError, MemoryError) as error:
            remedy = "; lower stream.micro_batch_size" if isinstance(error, torch.OutOfMemoryError) else ""
            raise StoppedError(f"step {loop.step + 1}: {error}{remedy}") from error
        self._seconds.append(time.perf_counter() - begun)
        stats = streamer.stats(loop.model)
        if stats.skipped_steps > skipped:
            self._bar.write(f"step {loop.step}: skipped, a gradient was not finite")
        speed = loop.tokens_per_step / self._seconds[-1]
        self._log(
            **measured,
            tokens_per_second=speed,
            device_bytes=stats.device_bytes_now,
            device_bytes_peak=stats.device_bytes_peak,
        )
        held = f"device {amount(stats.device_bytes_now)}, peak {amount(stats.device_bytes_peak)}"
        self._bar.set_postfix_str(
            f"loss {measured['loss']:.3f}, {speed:,.0f} tokens/s, {held}", refresh=False
        )
        self._bar.update()
        return True

    def _return(self, error: streamer.NonFiniteError) -> None:
        """Go back to the last checkpoint after a gradient that was not finite, or raise StoppedError."""
        loop = self._loop
        latest = self._checkpoints.latest()
        what = f"step {loop.step + 1}: {error.what}"
        if self._config.nonfinite != "back" or latest is None or loop.returns >= MOST_RETURNS:
            where = "" if latest is None else f"; the last checkpoint is {latest}"
            raise StoppedError(f"{what}{where}") from error
        loop.optimizer.zero_grad()
        loop.go_back_to(self._checkpoints.load(loop.model, loop.optimizer, latest, fall_back=False))
        self._metrics.flush()
        forget_after(Path(self._metrics.name), loop.step)
        self._bar.write(f"{what}; back to step {loop.step}, and on with other batches")
        self._bar.n = loop.step

    def _save(self) -> Path | None:
        """The checkpoint of this step, or None if it could not be written and need not be."""
        loop = self._loop
        try:
            return self._checkpoints.save(loop.model, loop.optimizer, step=loop.step, extra=loop.state())
        except OSError as error:
            if self._config.save_failure == "stop":
                raise
            self._bar.write(f"step {loop.step}: {error}; going on without")
            return None

    def _report_validation(self) -> None:
        loop = self._loop
        self._log(val_loss=loop.val_loss)
        self._bar.write(
            f"step {loop.step:5d}: validation loss {loop.val_loss:.3f} ({loop.data.unit} frequencies alone: "
            f"{self._unigram:.3f})"
        )

    def _log(self, **values: float) -> None:
        rate = self._loop.rates.get_last_lr()[0]
        self._metrics.write(json.dumps({"step": self._loop.step, "lr": rate, **values}) + "\n")
        self._metrics.flush()


def _finish(loop: Loop, directory: Path, seconds: list[float]) -> dict[str, Any]:
    """Write the files of a finished run; what ``summary.json`` holds."""
    # the first steps compile the update's kernels
    steady = seconds[len(seconds) // 10 :]
    summary = summary_of(
        loop.model,
        tokens_per_second=loop.tokens_per_step / statistics.median_high(steady) if steady else 0.0,
        unigram_loss=loop.data.unigram_entropy(),
        first_val_loss=loop.first_val_loss,
        last_val_loss=loop.val_loss,
    )
    streamer.save_trace(loop.model, directory / "trace.json")
    (directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    if loop.config.run.sample_tokens:
        print(f"\nA sample, after the first {PROMPT_TOKENS} {loop.data.unit}s of validation text:\n")
        print(loop.sample(PROMPT_TOKENS))
    print(f"\n{summary_table(summary, unit=loop.data.unit)}\n")
    if (base := loop.config.model.pretrained) is not None:
        adapts = bool(loop.config.lora.rank)
        name = ADAPTERS if adapts else PRETRAINED
        free = next(path for path in numbered(directory / name) if not path.exists())
        if adapts:
            write_adapters(loop.model, base, free)
        else:
            write_pretrained(loop.model, loop.data.tokenizer, free)
    print(f"Written to {directory}: config.toml metrics.jsonl summary.json, and trace.json of the last steps")
    return summary


def _print_beginning(loop: Loop, directory: Path) -> None:
    config, model, data = loop.config, loop.model, loop.data
    held = streamer.stats(model)
    device = next(iter(model.parameters())).device
    slots = config.stream.num_slots or 2
    more = ", later more," if config.stream.num_slots is None and config.stream.device_memory else ""
    on_disk = f", {amount(sum(held.disk_bytes.values()))} on disk" if held.disk_bytes else ""
    learnt = f" ({data.count_learnt('train'):,} of them learnt)" if data.targets else ""
    left = f"steps {loop.step + 1} to {config.run.steps}" if loop.step else f"{config.run.steps} steps"
    parameters = f"{sum(p.numel() for p in model.parameters()):,} parameters"
    if config.lora.rank:
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        parameters += f" ({trained:,} of them trained)"
    print(
        f"{config.run.name}: {parameters}, of which the device "
        f"({device.type}) holds {slots} layers{more} at a time: {amount(held.device_bytes_now)} there, "
        f"{amount(sum(held.host_bytes.values()))} in host memory{on_disk}\n"
        f"data: {data.train.numel():,} {data.unit}s to train on{learnt}, {data.val.numel():,} to validate; "
        f"{data.unit} frequencies alone give {data.unigram_entropy():.3f} nats per {data.unit}\n"
        f"{left} of {config.data.batch_size} x {config.data.context} tokens, to {directory}"
    )
