"""The command `streamer train`: a plain PyTorch loop around a wrapped model, and what it leaves behind."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

import streamer
from streamer.app.build import build_model, build_optimizer, schedule
from streamer.app.config import Config, ConfigError, dump_config
from streamer.app.data import ByteData, load_bytes
from streamer.app.report import Summary, amount, summary_table
from streamer.handle import wrapped

#: Bytes of validation text that the sample at the end continues.
PROMPT_BYTES = 64


def train(config: Config) -> Summary:
    """Train as ``config`` says, printing to the terminal; writes ``config.toml``, ``metrics.jsonl``,
    ``trace.json`` (of the last 20,000 ops) and ``summary.json`` into a new directory.

    Raises ConfigError, in one line, for anything in the config that cannot be honoured.
    """
    data = load_bytes(config.data.paths, val_fraction=config.data.val_fraction)
    torch.manual_seed(config.run.seed)
    model = build_model(config)
    try:
        return _train(config, model, data)
    finally:
        # the weights end here, so they need not be taken out, for which there may be no room
        wrapped(model).close()


def _train(config: Config, model: nn.Module, data: ByteData) -> Summary:
    """Train the wrapped ``model``; see `train`."""
    optimizer = build_optimizer(config.optimizer, model)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(config.optimizer, config.run.steps))
    run = _Run(config, model, optimizer, rates, data)
    # a model that cannot run on this data says so before there is a directory
    first_val_loss = run.validate()
    directory = _run_directory(config)
    _print_beginning(config, model, data, directory)
    with (directory / "metrics.jsonl").open("w") as metrics:
        summary = run.train(first_val_loss, metrics)
    streamer.save_trace(model, directory / "trace.json")
    (directory / "summary.json").write_text(json.dumps(summary.as_json(), indent=2) + "\n")
    if config.run.sample_tokens:
        print(f"\nA sample, after the first {PROMPT_BYTES} bytes of validation text:\n")
        print(_sample(config, model, data))
    print(f"\n{summary_table(summary)}\n")
    print(f"Written to {directory}: config.toml metrics.jsonl summary.json, and trace.json of the last steps")
    return summary


@dataclass
class _Run:
    config: Config
    model: nn.Module
    optimizer: streamer.AdamW
    schedule: torch.optim.lr_scheduler.LambdaLR
    data: ByteData

    def train(self, first_val_loss: float, metrics: TextIO) -> Summary:
        """All steps, with validation during and after; a line of JSON for each step and each validation."""
        run, batch = self.config.run, self.config.data
        crops = torch.Generator().manual_seed(run.seed)
        unigram = self.data.unigram_entropy()
        val_loss = first_val_loss
        self._log(metrics, 0, val_loss=val_loss)
        print(f"step {0:5d}: validation loss {val_loss:.3f} (byte frequencies alone: {unigram:.3f})")
        seconds: list[float] = []
        # a log file needs a line now and then, a terminal wants to be alive
        interval = 0.2 if sys.stderr.isatty() else 10.0
        with tqdm(total=run.steps, unit="step", dynamic_ncols=True, mininterval=interval) as bar:
            for step in range(1, run.steps + 1):
                begun = time.perf_counter()
                tokens, targets = self.data.batch("train", batch.batch_size, batch.context, crops)
                loss, measured = self._step(tokens, targets)
                seconds.append(time.perf_counter() - begun)
                speed = tokens.numel() / seconds[-1]
                stats = streamer.stats(self.model)
                self._log(
                    metrics,
                    step,
                    loss=loss,
                    **measured,
                    tokens_per_second=speed,
                    device_bytes=stats.device_bytes_now,
                    device_bytes_peak=stats.device_bytes_peak,
                )
                held = f"device {amount(stats.device_bytes_now)}, peak {amount(stats.device_bytes_peak)}"
                bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s, {held}", refresh=False)
                bar.update()
                if step % run.eval_every == 0 or step == run.steps:
                    val_loss = self.validate()
                    self._log(metrics, step, val_loss=val_loss)
                    line = f"step {step:5d}: validation loss {val_loss:.3f}"
                    bar.write(f"{line} (byte frequencies alone: {unigram:.3f})")
        # the first steps compile the update's kernels
        steady = sorted(seconds[len(seconds) // 10 :])
        return Summary.of(
            self.model,
            tokens_per_second=batch.batch_size * batch.context / steady[len(steady) // 2],
            first_val_loss=first_val_loss,
            last_val_loss=val_loss,
            unigram_loss=unigram,
        )

    def _step(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[float, dict[str, float]]:
        """The loss, and the gradient's norm where there is one to be had."""
        measured = {}
        loss = _loss(self.model, tokens, targets)
        loss.backward()
        if self.config.stream.update == "step":
            # 0 in the config means no clipping, but the norm is worth a look all the same
            norm = streamer.clip_grad_norm_(self.model, self.config.optimizer.grad_clip or math.inf)
            measured["grad_norm"] = norm.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return loss.item(), measured

    @torch.no_grad()
    def validate(self) -> float:
        """The loss on the validation batches, in nats per byte.

        Raises ConfigError where the model cannot take tokens 0 to 255 in sequences of ``data.context``.
        """
        self.model.eval()
        config = self.config
        batches = self.data.val_batches(config.run.eval_batches, config.data.batch_size, config.data.context)
        try:
            losses = [_loss(self.model, tokens, targets).item() for tokens, targets in batches]
        except (ValueError, IndexError) as error:
            raise ConfigError(
                f"the model cannot run on sequences of data.context = {config.data.context} bytes "
                f"(tokens 0 to 255): {error}; mend model.args or data.context"
            ) from error
        self.model.train()
        return sum(losses) / len(losses)

    def _log(self, metrics: TextIO, step: int, **values: float) -> None:
        rate = self.schedule.get_last_lr()[0]
        metrics.write(json.dumps({"step": step, "lr": rate, **values}) + "\n")
        metrics.flush()


def _loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per token of logits [batch, time, vocabulary], in fp32."""
    result: Any = model(tokens)
    logits: torch.Tensor = getattr(result, "logits", result)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten().to(logits.device))


@torch.no_grad()
def _sample(config: Config, model: nn.Module, data: ByteData) -> str:
    """Text that the streamed model writes, byte by byte, after the beginning of the validation text."""
    model.eval()
    draws = torch.Generator().manual_seed(config.run.seed)
    text = data.val[:PROMPT_BYTES].long()[None]
    for _ in range(config.run.sample_tokens):
        result: Any = model(text[:, -config.data.context :])
        logits: torch.Tensor = getattr(result, "logits", result)[:, -1].float().cpu()
        text = torch.cat(
            [text, torch.multinomial(torch.softmax(logits / 0.8, -1), 1, generator=draws)], dim=1
        )
    model.train()
    return bytes(text[0].tolist()).decode("utf-8", errors="replace")


def _run_directory(config: Config) -> Path:
    """A new directory for the run with the resolved config in it: ``name`` or, where there has been a run of
    that name, ``name-2`` and so on."""
    wanted = Path(config.run.out) / config.run.name
    names = itertools.chain([wanted], (wanted.with_name(f"{wanted.name}-{n}") for n in itertools.count(2)))
    try:
        wanted.parent.mkdir(parents=True, exist_ok=True)
        for directory in names:
            with contextlib.suppress(FileExistsError):
                directory.mkdir()
                break
        (directory / "config.toml").write_text(dump_config(config))
    except OSError as error:
        raise ConfigError(f"cannot write to {wanted} ({error.strerror}): set run.out or run.name") from error
    return directory


def _print_beginning(config: Config, model: nn.Module, data: ByteData, directory: Path) -> None:
    held = streamer.stats(model)
    device = next(iter(model.parameters())).device
    slots = config.stream.num_slots
    print(
        f"{config.run.name}: {sum(p.numel() for p in model.parameters()):,} parameters, of which the device "
        f"({device.type}) holds {slots} layers at a time: {amount(held.device_bytes_now)} there, "
        f"{amount(sum(held.host_bytes.values()))} in host memory\n"
        f"data: {data.train.numel():,} bytes to train on, {data.val.numel():,} to validate; byte frequencies "
        f"alone give {data.unigram_entropy():.3f} nats per byte\n"
        f"{config.run.steps} steps of {config.data.batch_size} x {config.data.context} tokens, to {directory}"
    )
