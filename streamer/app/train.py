"""The command `streamer train`: the steps of a run, the files it writes, and how it ends early."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

import streamer
from streamer.app.config import Config, check_steps, in_keys
from streamer.app.data.load import check_data, load_data
from streamer.app.data.rows import Rows
from streamer.app.data.splits import TokenData
from streamer.app.plan.command import check_memory
from streamer.app.plan.planning import RunPlan, settle
from streamer.app.run.adapters import write_adapters
from streamer.app.run.build import (
    build_model,
    build_optimizer,
    check_fits,
    dtype_of,
    settle_fp16,
    without_values,
    write_pretrained,
)
from streamer.app.run.flops import model_flops_per_token, peak_of
from streamer.app.run.lines import Lines, forget_after
from streamer.app.run.loop import Loop, packs
from streamer.app.run.ranks import RunRanks, ToldByTheFirstError, check_ranks, share_of_machine
from streamer.app.run.reports import Report, check_reports, open_reports
from streamer.app.run.run_folder import (
    FOLDER,
    SUMMARY,
    Checkpoints,
    Lanes,
    best_checkpoint,
    ended_early,
    has_finished,
    locked,
    numbered,
    run_directory,
    summary_of,
    summary_table,
    until_written,
    write_config,
)
from streamer.app.run.space import Space, check_space
from streamer.app.signals import Stop, stopping
from streamer.checkpoint.manifest import Manifest, new_file
from streamer.engine.handle import wrapped
from streamer.errors import amount
from streamer.model.options import parse_bytes
from streamer.quantized.parts import values_in
from streamer.store.ledger import limit_of

#: Tokens of validation text that the sample at the end continues.
PROMPT_TOKENS = 64
#: Where a pretrained model is written in the end, in the run's directory.
PRETRAINED = "model"
#: Where adapters of one are.
ADAPTERS = "adapters"
#: The loss, the learning rate and the like, a line for each step, and for each validation.
METRICS = "metrics.jsonl"
#: What the model has written on its way, a line for each prompt and time.
SAMPLES = "samples.jsonl"
#: The ops that ran last.
TRACE = "trace.json"
#: A run that has gone back to a checkpoint this often stops.
MOST_RETURNS = 10


class StoppedError(RuntimeError):
    """A run that cannot go on: one line that says why, and from which checkpoint to resume."""


def train(
    config: Config, resume: Path | None = None, *, fall_back: bool = False, ranks: RunRanks | None = None
) -> dict[str, Any] | None:
    """Train as ``config`` says, printing to the terminal; writes ``config.toml``, ``metrics.jsonl``,
    ``trace.json`` (of the last 20,000 ops), ``summary.json`` and checkpoints into a new directory.

    With ``resume``, a checkpoint's folder, goes on from there in its run's directory; where it is damaged
    and ``fall_back`` says so, from the one before. Ctrl-C or SIGTERM lets the step end, saves, says where to
    go on from, and None is returned; a second one ends the process. Else returns what ``summary.json`` holds;
    None on ``ranks`` that do not lead, all of which call this.

    Raises ConfigError, in one line, for anything in the config that cannot be honoured, StoppedError where a
    gradient is not finite and the config says to stop, and OSError where a checkpoint cannot be written.
    """
    directory, ranks = None if resume is None else resume.parent.parent, ranks or RunRanks()
    if resume is not None and has_finished(resume, config):
        step = Manifest.read(resume).step
        print(
            f"{directory} has finished at step {step}: nothing is left to do; for more steps name them, "
            f"--set {_what_ended(resume, config)} say"
        )
        return None
    with contextlib.ExitStack() as ends:
        with ranks.checked():
            check_reports(config.run.report)
            if directory is not None and ranks.leads:
                ends.enter_context(locked(directory))
        return _train(config, resume, directory, ranks, fall_back=fall_back)


def _what_ended(checkpoint: Path, config: Config) -> str:
    """The key, with a value, that lets the finished run of ``checkpoint`` go on."""
    run, step = config.run, Manifest.read(checkpoint).step
    if ended_early(checkpoint, config):
        return "run.patience=0"
    if run.epochs and not (run.steps and step >= run.steps):
        return f"run.epochs={2 * run.epochs}"
    return f"run.steps={2 * step}"


def _train(
    config: Config, resume: Path | None, directory: Path | None, ranks: RunRanks, *, fall_back: bool
) -> dict[str, Any] | None:
    with ranks.checked():
        check_ranks(config, ranks.size)
        check_data(config)
        config, told = settle_fp16(config)
        if told is not None:
            print(told)
        # each machine has its own memory, for its part of every batch
        here = share_of_machine(config, ranks.local_size, ranks.size)
        settled, chosen = settle(here, ranks=ranks.local_size, machines=ranks.machines)
        config = replace(config, stream=settled.stream)
        if chosen is not None:
            print(f"chosen: {chosen.reason}")
    # what is free now may differ from rank to rank
    config = ranks.as_first("what was chosen", config)
    with ranks.checked():
        here = share_of_machine(config, ranks.local_size, ranks.size)
        plan = check_memory(here, ranks.local_size, ranks.machines)
        space = _check_space(config, directory)
        with ranks.progress_of_first():
            data = load_data(config)
        rows = _rows(config, data)
        asked = config
        config = _with_steps(asked, rows)
    torch.manual_seed(config.run.seed)
    with contextlib.ExitStack() as ends:
        with ranks.checked():
            model = build_model(_leaving_room(config, plan), process_group=ranks.group)
        # unlike unwrap, close does not copy the weights back, for which there may be no memory
        ends.callback(wrapped(model).close)
        with ranks.checked():
            optimizer = build_optimizer(
                config.optimizer, model, skip_nonfinite=config.run.nonfinite == "skip"
            )
            wrapped(model).executor.host_limit = limit_of(parse_bytes("host_memory", config.memory.host))
            check_fits(model, data, config.data.context)
        if rows is not None and rows.packing and not ranks.as_first("packing", packs(model, data.vocab_size)):
            print(f"{type(model).__name__} does not keep the texts of a row apart: each has a row of its own")
            rows = replace(rows, packing=False)
            config = _with_steps(asked, rows)
        if not ranks.leads:  # each draws numbers of its own from here on, for dropout
            torch.manual_seed(config.run.seed + ranks.rank)
        loop = Loop(config, model, optimizer, data, rows, ranks)
        if resume is None:
            # a model that cannot run on this data raises here, before there is a directory
            loop.first_val_loss = loop.validate()
        else:
            assert directory is not None
            saved = Checkpoints(directory, keep=config.run.keep)
            loop.go_on_from(saved.load(model, optimizer, resume, fall_back=fall_back))
        with ranks.checked():
            if ranks.leads:
                directory = _begun(asked, loop, directory, ends)
        directory = ranks.as_first("the folder of the run", directory)
        assert directory is not None
        reports = open_reports(config, directory, loop.step, tell=tqdm.write) if ranks.leads else []
        for report in reports:
            ends.callback(report.close)
        stop = ends.enter_context(stopping())
        _print_beginning(loop, directory, space)
        metrics, samples = (
            ends.enter_context(Lines(directory / name, tqdm.write)) for name in (METRICS, SAMPLES)
        )
        with _bar(loop) as bar:
            run = _Run(loop, directory, metrics, samples, bar, stop, reports, space)
            has_ended = run.run()
        return _finish(loop, directory, run) if has_ended else None


def _begun(config: Config, loop: Loop, directory: Path | None, ends: contextlib.ExitStack) -> Path:
    """The folder of the run, new if there is no ``directory`` yet, else with what is beyond the step that
    ``loop`` goes on from forgotten. It is this run's alone until ``ends``."""
    if directory is None:
        directory = run_directory(config)
        ends.enter_context(locked(directory))
        return directory
    if config.run.keep_best:
        Checkpoints(directory, keep=config.run.keep).note_best(loop.best_step, loop.best_val_loss)
    for name in (METRICS, SAMPLES):
        forget_after(directory / name, loop.step)
    write_config(directory, config)
    (directory / SUMMARY).unlink(missing_ok=True)
    return directory


def _rows(config: Config, data: TokenData) -> Rows | None:
    """Whole conversations in rows, or windows of a text for epochs; None for crops at random."""
    if not data.targets and not config.run.epochs:
        return None
    given = config.data
    return Rows(data, given.context, given.batch_size, given.packing, config.run.seed)


def _with_steps(config: Config, rows: Rows | None) -> Config:
    """``config`` with the steps that its epochs are, unless its own end the run before."""
    run = config.run
    if rows is None or not run.epochs:
        return config
    steps = rows.steps(run.epochs)
    epochs = f"{run.epochs} epoch{'s' if run.epochs > 1 else ''}"
    if run.steps and run.steps < steps:
        print(f"{epochs} are {steps:,} steps, and run.steps = {run.steps:,} ends the run before")
        steps = run.steps
    check_steps(config.optimizer, steps)
    return replace(config, run=replace(run, steps=steps))


def _check_space(config: Config, directory: Path | None) -> Space | None:
    """What the run writes; None for a model that cannot be made without values. Raises ConfigError where
    there is too little room for it."""
    try:
        model = without_values(config.model, config.lora, dtype_of(config.stream))
    except (TypeError, ValueError):
        return None  # which building the model is about to refuse, in better words
    return check_space(config, model, directory) if isinstance(model, nn.Module) else None


def _leaving_room(config: Config, plan: RunPlan | None) -> Config:
    """``config`` for a model and an optimizer that leave room in host memory for what a step takes there
    besides, which ``plan`` knows, and have more on disk."""
    if plan is None or not plan.has_disk or not plan.step.host_beside:
        return config
    room = max(1, plan.room.host_room() - plan.step.host_beside)
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
        disable=not loop.ranks.leads,
    )


class _Run:
    """The steps of a run, with the metrics and checkpoints that they leave."""

    def __init__(
        self,
        loop: Loop,
        directory: Path,
        metrics: Lines,
        samples: Lines,
        bar: tqdm[Any],
        stop: Stop,
        reports: Sequence[Report],
        space: Space | None,
    ) -> None:
        self._loop = loop
        self._ranks = loop.ranks
        self._reports = reports
        self._config = loop.config.run
        self._directory = directory
        self._metrics = metrics
        self._samples = samples
        self._bar = bar
        self.stop = stop
        if self._ranks.leads:
            stop.answer = self._answer
        #: seconds of each step
        self.seconds: list[float] = []
        #: what saving takes, as far as it is known: bytes, and then the seconds of the last checkpoint
        self._to_save = "" if space is None else f" {amount(space.checkpoint)}"
        #: what is being done
        self._doing = ""
        #: what the first step has taken, which compiles
        self.first = Lanes({}, {})
        # the base of adapters is in files already
        frozen = not loop.config.lora.rank
        self._checkpoints = Checkpoints(directory, keep=self._config.keep, frozen=frozen)
        self._unigram = loop.data.unigram_entropy()
        #: seconds that a step's arithmetic takes at the GPU's peak; None where that is not known
        self._at_peak = None
        if (peak := peak_of(loop.model)) is not None:
            self._at_peak = model_flops_per_token(loop.model) * loop.tokens_per_step / peak
        #: what the bar tells of the last step
        self._shown = ""
        #: why the last checkpoint is not there, where only the weights are
        self.failed: OSError | ToldByTheFirstError | None = None

    def run(self) -> bool:
        """Make the steps that are left; False if a signal ended the run before."""
        loop, run = self._loop, self._config
        if loop.step == 0:
            self._report_validation()
        while loop.step < run.steps and not loop.ends_early():
            if not self._step():
                continue
            is_best = False
            if loop.step % run.eval_every == 0 or loop.step == run.steps:
                with self.doing("the validation"):
                    loop.validate()
                is_best = loop.judge()
                self._report_validation(", the lowest so far" if is_best else "")
            last = loop.step == run.steps or loop.ends_early()
            keeps_best = is_best and run.keep_best
            # a pretrained model is also written as a whole in the end
            is_written = loop.config.model.pretrained is not None
            needs_last = last and (run.save_every > 0 or not is_written)
            if needs_last or keeps_best or run.save_every and loop.step % run.save_every == 0:
                try:
                    self._save(is_needed=needs_last and not is_written, is_best=keeps_best)
                except (OSError, ToldByTheFirstError) as error:
                    if not (last and is_written):
                        raise
                    self.failed = error
                    self._bar.write(f"{error}; the weights are written all the same")
            if loop.ends_early() and loop.step < run.steps:
                self._bar.write(
                    f"ends after step {loop.step}: the last {loop.since_best} validations (run.patience) "
                    f"have not been below {loop.best_val_loss:.3f}, that of step {loop.best_step}"
                )
            every = loop.config.sample.every
            if last or (every and loop.step % every == 0 and self._signal() is None):
                self._sample()
            if not last and (number := self._signal()) is not None:
                path = self._save(is_needed=True)
                resume = f"; go on with --resume {path}"
                self._bar.write(f"stopped by {number.name} after step {loop.step}{resume}")
                return False
        return True

    def _signal(self) -> signal.Signals | None:
        """The signal that some rank has got, as all of them see it."""
        told = self._ranks.meet("whether a signal ends the run", self.stop.signal)
        return next((number for number in told if number is not None), None)

    def _answer(self) -> str:
        """What the first Ctrl-C is answered with, at once."""
        again = "Ctrl-C again to stop without"
        if self._doing.startswith(("saving", "writing")):
            return f"{self._doing}; {again}"
        what = self._doing or f"what follows step {self._loop.step}"
        return f"finishing {what}, then saving{self._to_save}; {again}"

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Inside the block the run does ``what``, of which a signal's answer tells."""
        self._doing = what
        try:
            yield
        finally:
            self._doing = ""

    def _step(self) -> bool:
        """Whether a step was made; False where the run went back to a checkpoint instead."""
        loop = self._loop
        begun = time.perf_counter()
        skipped = streamer.stats(loop.model).skipped_steps
        scale = None if loop.scaler is None else loop.scaler.get_scale()
        try:
            seconds = f", some {self.seconds[-1]:.0f} s" if self.seconds else ""
            with self.doing(f"step {loop.step + 1}{seconds}"):
                measured = loop.train_step()
        except streamer.NonFiniteError as error:
            self._return(error)
            return False
        except (torch.OutOfMemoryError, MemoryError) as error:
            remedy = "; lower stream.micro_batch_size" if isinstance(error, torch.OutOfMemoryError) else ""
            raise StoppedError(f"step {loop.step + 1}: {in_keys(str(error))}{remedy}") from error
        self.seconds.append(time.perf_counter() - begun)
        stats = streamer.stats(loop.model)
        if len(self.seconds) == 1:
            self.first = Lanes(stats.busy_seconds, stats.exposed_seconds)
        if stats.skipped_steps > skipped:
            scaled = (
                ""
                if scale is None or loop.scaler is None
                else (f" with the loss times {scale:,.0f}; from here on it is {loop.scaler.get_scale():,.0f}")
            )
            self._bar.write(f"step {loop.step}: skipped, a gradient was not finite{scaled}")
        speed = loop.tokens_per_step / self.seconds[-1]
        used = {} if self._at_peak is None else {"mfu": self._at_peak / self.seconds[-1]}
        self._log(
            **measured,
            **used,
            tokens_per_second=speed,
            device_bytes=stats.device_bytes_now,
            device_bytes_peak=stats.device_bytes_peak,
        )
        held = f"device {amount(stats.device_bytes_now)}, peak {amount(stats.device_bytes_peak)}"
        share = "".join(f", MFU {value:.1%}" for value in used.values())
        self._shown = f"loss {measured['loss']:.3f}, {speed:,.0f} tokens/s{share}, {held}"
        self._bar.set_postfix_str(self._shown, refresh=False)
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
        if self._ranks.leads:
            for lines in (self._metrics, self._samples):
                lines.forget_after(loop.step)
        self._bar.write(f"{what}; back to step {loop.step}, and on with other batches")
        self._bar.n = loop.step

    def _save(self, *, is_needed: bool, is_best: bool = False) -> Path | None:
        """The checkpoint of this step, or None if it could not be written and need not be. One that
        ``is_needed`` holds what is nowhere else; one that ``is_best`` is noted as that."""
        loop, saved, run = self._loop, self._checkpoints, self._config
        wanted = saved.path(loop.step)

        def save(path: Path) -> None:
            saved.write(loop.model, loop.optimizer, path, step=loop.step, extra=loop.state())

        def lead(save: Callable[[Path], object]) -> Path:
            def write(path: Path) -> Path:
                if path == wanted:
                    return saved.save(save, step=loop.step, best=loop.val_loss if is_best else None)
                save(path)
                return path

            if is_needed or run.save_failure == "stop":
                return until_written(write, wanted, self._directory, self.stop, minutes=run.save_wait)
            return write(wanted)

        what, begun = f"saving step {loop.step}{self._to_save}", time.perf_counter()
        self._bar.set_postfix_str(what)
        try:
            with self.doing(what):
                path: Path = self._ranks.led(f"the checkpoint of step {loop.step}", save, lead)
        except (OSError, ToldByTheFirstError) as error:
            if is_needed or run.save_failure == "stop":
                raise
            self._bar.write(f"step {loop.step}: {error}; going on without")
            return None
        finally:
            self._bar.set_postfix_str(self._shown, refresh=False)
        if path != wanted:
            self._bar.write(f"the checkpoint of step {loop.step} is {path}")
        self._to_save = f", some {time.perf_counter() - begun:.0f} s"
        return path

    def _report_validation(self, remark: str = "") -> None:
        loop = self._loop
        self._log(val_loss=loop.val_loss)
        self._bar.write(
            f"step {loop.step:5d}: validation loss {loop.val_loss:.3f} ({loop.data.unit} frequencies alone: "
            f"{self._unigram:.3f}){remark}"
        )

    def _sample(self) -> None:
        """Write what the model makes of the prompts of ``[sample]``."""
        loop = self._loop
        if not loop.prompts:
            return
        if not self._ranks.leads:
            self._ranks.meet("the samples", None)
            return
        with self.doing("the samples"):
            for prompt, text in zip(loop.prompts, loop.samples(), strict=True):
                self._samples.add({"step": loop.step, "prompt": prompt.text, "text": text})
                self._bar.write(f"step {loop.step:5d}: after {prompt.text!r}: {text}")
        self._ranks.meet("the samples", None)

    def _log(self, **values: float) -> None:
        if not self._ranks.leads:
            return
        rate = float(self._loop.rates.get_last_lr()[0])
        values = {"lr": rate, **values}
        # JSON has no NaN
        line = {key: value if math.isfinite(value) else None for key, value in values.items()}
        self._metrics.add({"step": self._loop.step, **line})
        for report in self._reports:
            report.log(self._loop.step, values)


def _finish(loop: Loop, directory: Path, run: _Run) -> dict[str, Any] | None:
    """Write the files of a finished run; what ``summary.json`` holds. Ranks that do not lead wait, since what
    is written is read from memory that all share, and get None."""
    summary = None
    if loop.ranks.leads:
        summary = _write_last(loop, directory, run)
    elif run.failed is not None:
        raise run.failed
    loop.ranks.meet("the end of the run", None)
    return summary


def _write_last(loop: Loop, directory: Path, run: _Run) -> dict[str, Any]:
    # the first steps compile the update's kernels
    steady = run.seconds[len(run.seconds) // 10 :]
    summary = summary_of(
        loop.model,
        run.first,
        tokens_per_second=loop.tokens_per_step / statistics.median_high(steady) if steady else 0.0,
        unigram_loss=loop.data.unigram_entropy(),
        first_val_loss=loop.first_val_loss,
        last_val_loss=loop.val_loss,
        **({} if math.isinf(loop.best_val_loss) else {"best_val_loss": loop.best_val_loss}),
    )
    try:
        with new_file(directory / TRACE) as file:
            streamer.save_trace(loop.model, file)
    except OSError as error:
        print(f"{error.filename}: {error.strerror}; the run ends without it")
    if loop.config.run.sample_tokens:
        print(f"\nA sample, after the first {PROMPT_TOKENS} {loop.data.unit}s of validation text:\n")
        print(loop.sample(PROMPT_TOKENS))
    print(f"\n{summary_table(summary, unit=loop.data.unit)}\n")
    if loop.config.model.pretrained is not None:
        adapts = bool(loop.config.lora.rank)
        name = ADAPTERS if adapts else PRETRAINED
        free = next(path for path in numbered(directory / name) if not path.exists())

        def write(folder: Path) -> None:
            if adapts:
                write_adapters(loop.model, loop.config, folder)
            else:
                write_pretrained(loop.model, loop.config, folder)

        with run.doing("writing the weights"):
            until_written(write, free, directory, run.stop, minutes=loop.config.run.save_wait)
    if run.failed is not None:
        raise run.failed
    # says that the run has finished, so that it comes last
    with new_file(directory / SUMMARY) as file:
        file.write_text(json.dumps(summary, indent=2) + "\n")
    print(f"Written to {directory}: config.toml {METRICS} {SUMMARY}, and {TRACE} of the last steps")
    if loop.config.run.keep_best and (best := best_checkpoint(directory / FOLDER)) is not None:
        print(
            f"The lowest validation loss, {loop.best_val_loss:.3f}, is that of {best}: streamer export "
            f"{directory} --best --to DIR writes its weights"
        )
    return summary


def _print_beginning(loop: Loop, directory: Path, space: Space | None) -> None:
    config, model, data = loop.config, loop.model, loop.data
    held = streamer.stats(model)
    device = next(iter(model.parameters())).device
    slots = config.stream.num_slots or 2
    more = ", later more," if config.stream.num_slots is None and config.stream.device_memory else ""
    on_disk = f", {amount(sum(held.disk_bytes.values()))} on disk" if held.disk_bytes else ""
    learnt = f" ({data.count_learnt('train'):,} of them learnt)" if data.targets else ""
    left = f"steps {loop.step + 1} to {config.run.steps}" if loop.step else f"{config.run.steps} steps"
    parts = f", in parts for {loop.ranks.size} processes" if loop.ranks.size > 1 else ""
    parameters = f"{sum(map(values_in, model.parameters())):,} parameters"
    if loop.rows is not None and loop.rows.has_documents:
        epoch = loop.rows.steps(1)
        cut = f"; {loop.rows.cut:,} are longer than a row and cut" if loop.rows.cut else ""
        documents = len(data.documents["train"]) - 1
        packed = "several to a row" if loop.rows.packing else "one to a row"
        print(f"data: {documents:,} whole conversations, {packed}, {epoch:,} steps an epoch{cut}")
    if config.lora.rank:
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        parameters += f" ({trained:,} of them trained)"
    print(
        f"{config.run.name}: {parameters}, of which the device "
        f"({device.type}) holds {slots} layers{more} at a time: {amount(held.device_bytes_now)} there, "
        f"{amount(sum(held.host_bytes.values()))} in host memory{on_disk}\n"
        f"data: {data.sources}\n"
        f"data: {data.train.numel():,} {data.unit}s to train on{learnt}, {data.val.numel():,} to validate; "
        f"{data.unit} frequencies alone give {data.unigram_entropy():.3f} nats per {data.unit}\n"
        f"{left} of {config.data.batch_size} x {config.data.context} tokens{parts}, to {directory}"
    )
    if space is not None and space.peak:
        print(f"there {space.line()}")
