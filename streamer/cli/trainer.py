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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from tqdm import tqdm
from transformers.trainer_callback import PrinterCallback
from trl import SFTConfig  # type: ignore[attr-defined]

import streamer
from streamer.cli.build import build_model, optimizer_of, refusals, settle_fp16, without_values
from streamer.cli.config import Config, ConfigError, dump_config, with_keys
from streamer.cli.data.dataset import check_data, load_data, load_tokenizer
from streamer.cli.export import export, files_to_copy, write_adapters
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
    check_space,
    failed,
    seconds_of,
    write_end,
)
from streamer.config_values import nearest
from streamer.engine.handle import wrapped
from streamer.errors import amount
from streamer.integrations.transformers import is_complete, last_checkpoint
from streamer.integrations.trl import PackingError, SFTTrainer
from streamer.quantized.parts import values_in

#: Folder of the final weights: those of a model, or only adapters.
WEIGHTS, ADAPTERS = "model", "adapters"
#: Our defaults in place of those of `trl.SFTConfig`. Without ``use_cpu`` accelerate averages nothing over CPU
#: ranks.
DEFAULTS: dict[str, Any] = {
    "assistant_only_loss": True,
    "bf16": False,  # not autocast: weights are streamed in [stream] dtype
    "gradient_checkpointing": False,  # the engine recomputes layers in backward anyway
    "report_to": "none",
    "disable_tqdm": True,  # the bar is ours
    "packing": True,
    "restore_callback_states_from_checkpoint": True,
    "logging_nan_inf_filter": False,
    "save_total_limit": 2,
}


def arguments_of(config: Config) -> SFTConfig:
    """``[train]`` as `trl.SFTConfig`. Raises ConfigError for unknown keys and refused values."""
    known = {item.name for item in dataclasses.fields(SFTConfig) if item.init}
    for name in config.trainer:
        if name not in known:
            raise ConfigError(f"[train] has no {name!r}; {nearest(name, known)}")
    usual = DEFAULTS | {"use_cpu": not torch.cuda.is_available() or config.stream.device == "cpu"}
    options = usual | {"output_dir": config.train.output_dir} | config.trainer
    is_adamw = config.optimizer.name == "adamw" and not config.optimizer.args
    if is_adamw and (config.optimizer.state_dtype != "float32" or not config.optimizer.skip_nonfinite):
        skips = str(config.optimizer.skip_nonfinite).lower()
        options["optim_args"] = f"state_dtype={config.optimizer.state_dtype},skip_nonfinite={skips}"
    if config.data.val_paths or "eval_steps" in options:
        options.setdefault("eval_strategy", "steps")
    if options.get("eval_strategy", "no") != "no":
        options.setdefault("eval_on_start", True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return SFTConfig(**options)
    except (TypeError, ValueError, ImportError) as error:
        raise ConfigError(f"[train]: {' '.join(str(error).split())}") from error


def train_folder(config: Config, *, resume: str | None = None) -> None:
    """Train the model of ``model.path``; write checkpoints and, at the end, its weights into
    ``train.output_dir``.

    ``resume`` is a checkpoint, or empty for the last one in ``train.output_dir``. On the first Ctrl-C or
    SIGTERM the run finishes its step and saves. Raises ConfigError, in one line, for an unusable
    configuration, before any file is written."""
    args, original = arguments_of(config), config
    config = with_keys(config, train=_sizes(args))
    out, is_first = Path(str(args.output_dir)), args.process_index == 0
    say = print if is_first else _silent
    checkpoint = _checkpoint_to_resume(out, resume)
    check_data(config)
    tokenizer = load_tokenizer(str(config.model.path))
    config, line = settle_fp16(config)
    if line is not None:
        say(line)
    config = _planned(config, args, say)
    check_space(config, out)
    _check_context(config)
    with args.main_process_first():  # the other ranks find its tokens
        train, validation = load_data(
            config, tokenizer, seed=args.seed, answers_only=args.assistant_only_loss
        )
    _check_tokens(config, tokenizer, train)
    args.assistant_only_loss = False  # the labels already mask prompts
    transformers.set_seed(args.seed)  # for the initial values of adapters
    model = build_model(config, process_group=dist.group.WORLD if args.world_size > 1 else None)
    try:
        progress, stop = Progress(out), Stopping()
        others: list[Any] = [_callback(name, options) for name, options in config.callbacks.items()]
        if config.sample.prompts:
            others.append(Samples(Writer(model, tokenizer, config.sample), out, progress))
        build = partial(
            SFTTrainer,
            model,
            args,
            train_dataset=train,
            eval_dataset=validation if args.eval_strategy != "no" else None,
            processing_class=tokenizer,
            callbacks=[progress, stop, *others],
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
            raise ConfigError(f"[train]: {' '.join(str(error).split())}") from error
        trainer.remove_callback(PrinterCallback)
        if checkpoint is not None and _has_ended(checkpoint, args):
            say(f"{checkpoint} is the end of its run; for more, --set train.max_steps=...")
            return
        if is_first:
            out.mkdir(parents=True, exist_ok=True)
            settled = replace(original, stream=config.stream)
            (out / CONFIG).write_text(dump_config(_with_whole_path(settled)))
        say(_beginning(model, trainer, config, len(train)))
        try:
            with stop:
                trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        except FAILURES as error:
            raise failed(trainer.state.global_step + 1, error) from error
        if stop.signal is not None:
            say(f"stopped by {stop.signal.name} after step {trainer.state.global_step}: --resume continues")
            return
        _finish(trainer, config, out, progress)
    finally:
        wrapped(model).close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _optimizer(config: Config, args: Any) -> dict[str, Any]:
    """Arguments of the Trainer for an optimizer other than its own AdamW."""
    if config.optimizer.name == "adamw" and not config.optimizer.args:
        return {}
    names = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
    config = with_keys(config, train={name: getattr(args, name) for name in names})
    return {"optimizer_cls_and_kwargs": optimizer_of(config)}


def _sizes(args: Any) -> dict[str, Any]:
    """The keys of ``[train]`` that streamer reads, with the Trainer's values."""
    names = ("output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "max_length", "seed")
    return {name: getattr(args, name) for name in names} | {"max_steps": max(0, args.max_steps)}


def _silent(*_: object) -> None:
    pass


def _planned(config: Config, args: Any, say: Any) -> Config:
    """``config`` with a choice for every "auto". Raises ConfigError if the run does not fit."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    machines = max(1, args.world_size // here)
    config, chosen = settle(config, ranks=here, machines=machines)
    if chosen is not None:
        say(f"chosen: {chosen.reason}")
    check_memory(config, here, machines)
    return config


def _check_context(config: Config) -> None:
    context, model = config.train.max_length, without_values(config)
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(longest, int) and context > longest:
        raise ConfigError(
            f"train.max_length = {context} is above the model's max_position_embeddings = {longest}: lower "
            "it, or set model.args.max_position_embeddings"
        )


def _check_tokens(config: Config, tokenizer: Any, train: Any) -> None:
    embedding = getattr(without_values(config), "get_input_embeddings", lambda: None)()
    rows = getattr(embedding, "num_embeddings", len(tokenizer))
    # padded vocabularies are the usual case
    if len(tokenizer) > rows and (highest := max(max(row["input_ids"]) for row in train)) >= rows:
        raise ConfigError(
            f"the data has token {highest} and the model embeds {rows}: put the model's own tokenizer into "
            f"{config.model.path}"
        )


def _with_whole_path(config: Config) -> Config:
    return with_keys(config, model={"path": os.path.abspath(str(config.model.path))})


def _callback(name: str, options: dict[str, Any]) -> Any:
    """A callback of transformers, or ``module:Class``."""
    module, _, kind = name.rpartition(":")
    try:
        return getattr(importlib.import_module(module) if module else transformers, kind)(**options)
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(f"[callbacks] {name}: {error}") from error


def _beginning(model: nn.Module, trainer: Any, config: Config, documents: int) -> str:
    held, args = streamer.stats(model), trainer.args
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    rows = len(trainer.train_dataset)
    steps = f"{args.max_steps} steps" if args.max_steps > 0 else f"{args.num_train_epochs:g} epochs"
    on_disk = f", {amount(sum(held.disk_bytes.values()))} on disk" if held.disk_bytes else ""
    parts = f" on each of {args.world_size} ranks" if args.world_size > 1 else ""
    sequences = args.train_batch_size * args.gradient_accumulation_steps
    return "\n".join(
        [
            f"{config.model.path}: {sum(map(values_in, model.parameters())):,} parameters, {trained:,} of "
            f"them trained; {amount(held.device_bytes_now)} on the device, "
            f"{amount(sum(held.host_bytes.values()))} in host memory{on_disk}",
            f"data: {documents:,} documents in {rows:,} rows",
            f"{steps} of {sequences} x {args.max_length} tokens{parts}, to {args.output_dir}",
        ]
    )


# checkpoints


def _checkpoint_to_resume(out: Path, resume: str | None) -> Path | None:
    """The checkpoint to continue from; None without ``resume``. Removes incomplete files of a killed run.
    Raises ConfigError if there is none, and without ``resume`` if the folder has some."""
    last = last_checkpoint(out)
    if resume is None:
        if last is not None:
            raise ConfigError(f"{out} has checkpoints of a run: use --resume, or another train.output_dir")
        return None
    if resume:
        found = Path(resume)
        found = last_checkpoint(found) or found
        if not is_complete(found):
            raise ConfigError(
                f"--resume {resume}: there is no complete checkpoint: use a run's folder, or checkpoint-N "
                "in it"
            )
        return found
    if last is None:
        raise ConfigError(f"{out} has no complete checkpoint: train without --resume")
    for path in out.glob("checkpoint-*"):
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


def _finish(trainer: Any, config: Config, out: Path, progress: Progress) -> None:
    """Write the weights and the summary. Weights are read from a checkpoint, one tensor at a time: those on
    disk would not fit in memory."""
    args, model = trainer.args, trainer.model
    place = out / (ADAPTERS if config.lora else WEIGHTS)
    if args.process_index == 0:
        shutil.rmtree(place, ignore_errors=True)
    if args.save_strategy == "no" and config.lora:
        if args.process_index == 0:
            streamer.synchronize(model)
            trained = {
                name: param.detach() for name, param in model.named_parameters() if param.requires_grad
            }
            write_adapters(model, trained, config, place)
    elif args.save_strategy == "no":
        trainer.save_model(str(place))
    else:
        source = out / f"checkpoint-{trainer.state.global_step}"
        if args.load_best_model_at_end and trainer.state.best_model_checkpoint:
            source = Path(trainer.state.best_model_checkpoint)
        elif not is_complete(source):  # save_strategy "best"
            trainer._save_checkpoint(model, None)
        if args.process_index == 0:
            export(source, place)
    if args.process_index == 0:
        if args.save_strategy == "no" and not config.lora:
            for path in files_to_copy(config):
                shutil.copyfile(path, place / path.name)
        write_end(model, out, progress.first, {"tokens_per_second": progress.speed, **progress.losses})
        library = "peft.AutoPeftModelForCausalLM" if config.lora else "transformers.AutoModelForCausalLM"
        print(
            f"The weights are in {place}: {library}.from_pretrained({str(place)!r}), or streamer chat {out}"
        )
    if dist.is_initialized():
        dist.barrier()


# callbacks


class Progress(transformers.TrainerCallback):
    """A bar on a terminal, else a line every ``logging_steps``; all values go to ``metrics.jsonl``."""

    def __init__(self, out: Path) -> None:
        self.lines = Lines(out / METRICS)
        self.speed = 0.0
        self.losses: dict[str, float] = {}
        #: seconds by lane after the first step, which includes compilation
        self.first: Seconds | None = None
        self._bar: tqdm[Any] | None = None
        self._time, self._tokens = 0.0, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        self.lines.forget_after(state.global_step)
        self._bar = tqdm(
            total=state.max_steps, initial=state.global_step, unit="step", dynamic_ncols=True,
            disable=not sys.stderr.isatty(),
        )  # fmt: skip
        self._time, self._tokens = time.perf_counter(), 0

    def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        if self.first is None:
            self.first = seconds_of(options["model"])
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_log(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        logs: dict[str, float] = options["logs"]
        if self._bar is None or "train_runtime" in logs:
            return
        line: dict[str, float] = {"step": state.global_step}
        if "loss" in logs:
            now, tokens = time.perf_counter(), int(logs.get("num_tokens", 0))
            if self._tokens:
                self.speed = (tokens - self._tokens) / (now - self._time)
            self._time, self._tokens = now, tokens
            self.losses["last_loss"] = logs["loss"]
            line |= {"loss": logs["loss"], "lr": logs["learning_rate"], "grad_norm": logs["grad_norm"]}
            line |= {"epoch": logs["epoch"]} | ({"tokens_per_second": self.speed} if self.speed else {})
        if "eval_loss" in logs:
            self.losses.setdefault("first_val_loss", logs["eval_loss"])
            self.losses["last_val_loss"] = line["val_loss"] = logs["eval_loss"]
            self._time, self._tokens = time.perf_counter(), 0  # the time of a validation does not count
        self.lines.add(line)
        words = ", ".join(f"{name} {_short(name, value)}" for name, value in line.items() if name != "step")
        if "loss" in logs and not self._bar.disable:
            self._bar.set_postfix_str(words)
        else:
            self.write(f"step {state.global_step}: {words}")

    def write(self, text: str) -> None:
        """Print ``text`` above the bar."""
        tqdm.write(text)
        sys.stdout.flush()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self._bar is not None:
            self._bar.close()


def _short(name: str, value: float) -> str:
    return (
        f"{value:,.0f}" if name == "tokens_per_second" else f"{value:.3g}" if name == "lr" else f"{value:.4g}"
    )


class Samples(transformers.TrainerCallback):
    """Writes the model's answers to the prompts of ``[sample]``, every ``every`` steps and at the end."""

    def __init__(self, writer: Writer, out: Path, progress: Progress) -> None:
        self.writer, self.lines, self.progress = writer, Lines(out / "samples.jsonl"), progress

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            self.lines.forget_after(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        every = self.writer.options.every
        if not (state.global_step >= state.max_steps or (every and state.global_step % every == 0)):
            return
        for prompt, text in self.writer.samples(seed=args.seed):  # on all ranks, which share the weights
            if state.is_world_process_zero:
                self.lines.add({"step": state.global_step, "prompt": prompt, "text": text})
                self.progress.write(f"step {state.global_step}: after {prompt!r}: {text}")


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
