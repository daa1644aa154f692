"""`streamer train` for a Hugging Face folder: TRL's SFTTrainer with streamer's optimizer, loss and
checkpoints."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import transformers
from tqdm import tqdm
from trl import SFTConfig  # type: ignore[attr-defined]

from streamer.cli.build import build_model, optimizer_of, refusals, settle_fp16, without_values
from streamer.cli.config import TRAINER, Config, ConfigError, OptimizerConfig, dump_config, with_keys
from streamer.cli.data import check_data, load_data, load_tokenizer
from streamer.cli.export import export
from streamer.cli.generate import Writer
from streamer.cli.plan.command import check_memory
from streamer.cli.plan.planning import settle
from streamer.cli.run import (
    CONFIG,
    FAILURES,
    METRICS,
    Lines,
    Seconds,
    Stop,
    failed,
    model_line,
    seconds_of,
    silent,
    write_end,
)
from streamer.config_values import nearest
from streamer.engine.handle import wrapped
from streamer.integrations.transformers import is_complete, last_checkpoint
from streamer.integrations.trl import PackingError, SFTTrainer

#: Folder of the final weights: those of a model, or only adapters; and the file of samples.
WEIGHTS, ADAPTERS, SAMPLES = "model", "adapters", "samples.jsonl"


def arguments_of(config: Config) -> SFTConfig:
    """``[train]`` as `trl.SFTConfig`. Raises ConfigError for unknown keys and refused values."""
    known = {item.name for item in dataclasses.fields(SFTConfig) if item.init}
    for name in config.trainer:
        if name not in known:
            raise ConfigError(f"[train] has no {name!r}; {nearest(name, known)}")
    options = {
        **TRAINER,
        # else accelerate averages nothing over CPU ranks
        "use_cpu": not torch.cuda.is_available() or config.stream.device == "cpu",
        "disable_tqdm": not sys.stderr.isatty(),
        "output_dir": config.train.output_dir,
        **config.trainer,
    }
    if config.data.val_paths or "eval_steps" in options:
        options.setdefault("eval_strategy", "steps")
    if options.get("eval_strategy", "no") != "no":
        options.setdefault("eval_on_start", True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return SFTConfig(**options)
    except (TypeError, ValueError, ImportError) as error:
        raise ConfigError(f"[train]: {error}") from error


def train_folder(config: Config, *, resume: str | None = None) -> None:
    """Train the model of ``model.path``; write checkpoints and, at the end, its weights into
    ``train.output_dir``.

    ``resume`` is a checkpoint, or empty for the last one in ``train.output_dir``. On the first Ctrl-C or
    SIGTERM the run finishes its step and saves. Raises ConfigError, in one line, for an unusable
    configuration, before any file is written."""
    args, original = arguments_of(config), config
    sizes = ("output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "max_length", "seed")
    steps = max(0, args.max_steps)
    config = with_keys(config, train={"max_steps": steps, **{name: getattr(args, name) for name in sizes}})
    out, is_first = Path(str(args.output_dir)), args.process_index == 0
    say = print if is_first else silent
    checkpoint = _checkpoint_to_resume(out, resume)
    check_data(config)
    tokenizer = load_tokenizer(str(config.model.path))
    config = _planned(config, args, say)
    with args.main_process_first():  # the other ranks find its tokens
        train, validation = load_data(
            config, tokenizer, seed=args.seed, answers_only=args.assistant_only_loss
        )
    args.assistant_only_loss = False  # the labels already mask prompts
    transformers.set_seed(args.seed)  # for the initial values of adapters
    model = build_model(config, process_group=dist.group.WORLD if args.world_size > 1 else None)
    try:
        metrics, stop = Metrics(out), Stopping()
        callbacks: list[Any] = [metrics, stop]
        callbacks += [_callback(name, options) for name, options in config.callbacks.items()]
        if config.sample.prompts:
            callbacks.append(Samples(Writer(model, tokenizer, config.sample), out))
        build = partial(
            SFTTrainer,
            model,
            args,
            train_dataset=train,
            eval_dataset=validation if args.eval_strategy != "no" else None,
            processing_class=tokenizer,
            callbacks=callbacks,
            **_optimizer(config, args),
        )
        try:
            with refusals("[train]", besides=PackingError):
                trainer = build()
        except PackingError:
            say(f"{type(model).__name__} does not separate packed texts: each has a row of its own")
            args.packing = False
            trainer = build()
        except (ImportError, RuntimeError) as error:  # a library in report_to is not installed
            raise ConfigError(f"[train]: {error}") from error
        if checkpoint is not None and _has_ended(checkpoint, args):
            say(f"{checkpoint} is the end of its run; for more, --set train.max_steps=...")
            return
        if is_first:
            out.mkdir(parents=True, exist_ok=True)
            done = 0 if checkpoint is None else int(checkpoint.name.rpartition("-")[2])
            for name in (METRICS, SAMPLES):
                Lines(out / name).forget_after(done)
            place = {"path": os.path.abspath(str(config.model.path))}
            (out / CONFIG).write_text(
                dump_config(with_keys(original, stream=vars(config.stream), model=place))
            )
        rows, sequences = len(trainer.train_dataset), args.train_batch_size * args.gradient_accumulation_steps
        length = f"{args.max_steps} steps" if args.max_steps > 0 else f"{args.num_train_epochs:g} epochs"
        ranks = f" on each of {args.world_size} ranks" if args.world_size > 1 else ""
        say(f"{config.model.path}: {model_line(model)}")
        say(f"data: {len(train):,} documents in {rows:,} rows")
        say(f"{length} of {sequences} x {args.max_length} tokens{ranks}, to {out}")
        try:
            with stop:
                trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        except FAILURES as error:
            raise failed(trainer.state.global_step + 1, error) from error
        if stop.signal is not None:
            say(f"stopped by {stop.signal.name} after step {trainer.state.global_step}: --resume continues")
            return
        _finish(trainer, config, out, metrics)
    finally:
        wrapped(model).close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _planned(config: Config, args: Any, say: Callable[..., None]) -> Config:
    """``config`` with a dtype and a choice for every "auto". Raises ConfigError if the run does not fit."""
    config, line = settle_fp16(config)
    if line is not None:
        say(line)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    machines = max(1, args.world_size // here)
    config, chosen = settle(config, ranks=here, machines=machines)
    if chosen is not None:
        say(f"chosen: {chosen.reason}")
    check_memory(config, here, machines)
    longest = getattr(getattr(without_values(config), "config", None), "max_position_embeddings", None)
    if isinstance(longest, int) and args.max_length > longest:
        raise ConfigError(
            f"train.max_length = {args.max_length} is above the model's max_position_embeddings = {longest}: "
            "lower it, or set model.args.max_position_embeddings"
        )
    return config


def _optimizer(config: Config, args: Any) -> dict[str, Any]:
    """Arguments of the Trainer for ``[optimizer]``; without it ``train.optim`` names the optimizer."""
    if config.optimizer == OptimizerConfig():
        return {}
    names = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
    config = with_keys(config, train={name: getattr(args, name) for name in names})
    return {"optimizer_cls_and_kwargs": optimizer_of(config)}


def _callback(name: str, options: dict[str, Any]) -> Any:
    """A callback of transformers, or ``module:Class``."""
    module, _, kind = name.rpartition(":")
    try:
        return getattr(importlib.import_module(module) if module else transformers, kind)(**options)
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(f"[callbacks] {name}: {error}") from error


# checkpoints


def _checkpoint_to_resume(out: Path, resume: str | None) -> Path | None:
    """The checkpoint to continue from; None without ``resume``. Removes incomplete files of a killed run.
    Raises ConfigError if there is none, and without ``resume`` if the folder has some."""
    if resume and is_complete(Path(resume)):
        return Path(resume)
    last = last_checkpoint(Path(resume or out))
    if resume is None:
        if last is not None:
            raise ConfigError(f"{out} has checkpoints of a run: use --resume, or another train.output_dir")
        return None
    if last is None:
        raise ConfigError(f"{resume or out} has no complete checkpoint: train without --resume")
    for path in last.parent.glob("checkpoint-*"):
        if not is_complete(path):
            shutil.rmtree(path, ignore_errors=True)
    return last


def _has_ended(checkpoint: Path, args: Any) -> bool:
    """Whether the run of ``checkpoint`` has ended there; the Trainer would add a step."""
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    if args.max_steps > 0:
        return bool(state["global_step"] >= args.max_steps)
    is_longer = args.num_train_epochs > state["num_train_epochs"]
    return bool(state["global_step"] >= state["max_steps"]) and not is_longer


def _finish(trainer: Any, config: Config, out: Path, metrics: Metrics) -> None:
    """Write the weights and the summary. Weights are read from a checkpoint, one tensor at a time: those on
    disk would not fit in memory."""
    args, model = trainer.args, trainer.model
    place = out / (ADAPTERS if config.lora else WEIGHTS)
    if args.process_index == 0:
        shutil.rmtree(place, ignore_errors=True)
    if args.save_strategy == "no" and not config.lora:
        trainer.save_model(str(place))
    else:
        source = out / f"checkpoint-{trainer.state.global_step}"
        if args.load_best_model_at_end and trainer.state.best_model_checkpoint:
            source = Path(trainer.state.best_model_checkpoint)
        elif not is_complete(source):  # save_strategy "best" or "no"
            trainer._save_checkpoint(model, None)
        if args.process_index == 0:
            export(source, place)
            if args.save_strategy == "no":
                shutil.rmtree(source)
    if args.process_index == 0:
        write_end(model, out, metrics.first, {"tokens_per_second": metrics.speed, **metrics.losses})
        library = "peft.AutoPeftModelForCausalLM" if config.lora else "transformers.AutoModelForCausalLM"
        print(
            f"The weights are in {place}: {library}.from_pretrained({str(place)!r}), or streamer chat {out}"
        )
    if dist.is_initialized():
        dist.barrier()


# callbacks


class Metrics(transformers.TrainerCallback):
    """Writes the Trainer's logs to ``metrics.jsonl``, with tokens per second."""

    #: Keys of the file, by the Trainer's.
    NAMES: ClassVar = {"learning_rate": "lr", "eval_loss": "val_loss"} | {
        name: name for name in ("loss", "grad_norm", "epoch", "tokens_per_second")
    }

    def __init__(self, out: Path) -> None:
        self.lines = Lines(out / METRICS)
        self.speed = 0.0
        self.losses: dict[str, float] = {}
        #: seconds by lane after the first step, which includes compilation
        self.first: Seconds | None = None
        self._before: tuple[float, float] | None = None  # time and tokens at the last log

    def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        if self.first is None:
            self.first = seconds_of(options["model"])

    def on_log(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        logs: dict[str, float] = options["logs"]
        if not state.is_world_process_zero or "train_runtime" in logs:
            return
        if "loss" in logs:
            now = time.perf_counter(), logs.get("num_tokens", 0.0)
            if self._before is not None:
                self.speed = (now[1] - self._before[1]) / (now[0] - self._before[0])
                logs["tokens_per_second"] = round(self.speed)
            self._before = now
            self.losses["last_loss"] = logs["loss"]
        if "eval_loss" in logs:
            self.losses.setdefault("first_val_loss", logs["eval_loss"])
            self.losses["last_val_loss"] = logs["eval_loss"]
            self._before = None  # the time of a validation does not count
        found = {key: logs[name] for name, key in self.NAMES.items() if name in logs}
        self.lines.add({"step": state.global_step, **found})


class Samples(transformers.TrainerCallback):
    """Writes the model's answers to the prompts of ``[sample]``, every ``every`` steps and at the end."""

    def __init__(self, writer: Writer, out: Path) -> None:
        self.writer, self.lines = writer, Lines(out / SAMPLES)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        every = self.writer.options.every
        if not (state.global_step >= state.max_steps or (every and state.global_step % every == 0)):
            return
        for prompt, text in self.writer.samples(seed=args.seed):  # on all ranks, which share the weights
            if state.is_world_process_zero:
                self.lines.add({"step": state.global_step, "prompt": prompt, "text": text})
                tqdm.write(f"step {state.global_step}: after {prompt!r}: {text}")


class Stopping(Stop, transformers.TrainerCallback):
    """On the first Ctrl-C or SIGTERM, on any rank, the run finishes its step and saves; the second ends the
    process."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.world_size > 1:
            found = torch.tensor(int(self.signal or 0), device=args.device)
            dist.all_reduce(found, dist.ReduceOp.MAX)
            self.signal = signal.Signals(int(found)) if int(found) else None
        control.should_save |= self.signal is not None

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= self.signal is not None
