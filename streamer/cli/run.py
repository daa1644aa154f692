"""Parts that all runs share: one update, the files in a run's folder, signals, the table at the end."""

from __future__ import annotations

import inspect
import json
import math
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import streamer
from streamer.checkpoint.manifest import new_file
from streamer.cli.build import dtype_of
from streamer.cli.config import TRAINER, Config, RunError, in_keys
from streamer.errors import amount
from streamer.integrations.causal_lm import CausalHead
from streamer.model.units import kept_dtype
from streamer.optim.state import parse_state_dtype
from streamer.quantized.parts import parts_of, values_in
from streamer.store.purposes import MOMENTS
from streamer_native import QUANTUM

#: Tokens [sequences, time], targets of the same shape, and options of the model's forward.
Batch = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def loss_function(model: nn.Module) -> Callable[[nn.Module, Batch], torch.Tensor]:
    """A function that computes the sum of the cross-entropies of a batch, in nats. It never holds all logits
    for a causal language model of transformers, nor for a model with a ``forward`` that takes ``loss_of``, a
    function of the last hidden states [sequences, time, width] and the head's weight. Other models return
    logits."""
    if "loss_of" in inspect.signature(model.forward).parameters:
        return _by_model
    head = CausalHead.of(model)

    def of_head(model: nn.Module, batch: Batch) -> torch.Tensor:
        assert head is not None
        tokens, targets, options = batch
        found = head.run(model, {"input_ids": tokens, **options})
        return _by_logits(model, batch) if found is None else head.sum_of_losses(found[0], targets)

    return _by_logits if head is None else of_head


def _by_model(model: nn.Module, batch: Batch) -> torch.Tensor:
    tokens, targets, _ = batch

    def loss_of(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return streamer.chunked_cross_entropy(hidden, weight, targets.to(hidden.device), reduction="sum")

    total: torch.Tensor = model(tokens, loss_of=loss_of)
    return total


def _by_logits(model: nn.Module, batch: Batch) -> torch.Tensor:
    tokens, targets, options = batch
    logits = logits_of(model(tokens, **options))
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten().to(logits.device), reduction="sum")


def logits_of(output: Any) -> torch.Tensor:
    """The logits from a model's output: the output itself, or its attribute."""
    logits: torch.Tensor = getattr(output, "logits", output)
    return logits


def step_on(
    config: Config,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[nn.Module, Batch], torch.Tensor],
    batches: Sequence[Batch],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One update by the mean loss over all tokens of ``batches``, each a forward and a backward. Returns the
    loss, and the norm of the gradient before clipping, None if layers are updated in backward."""
    count = sum(batch[1].numel() for batch in batches)
    total = torch.zeros(())
    for batch in batches:
        loss = loss_of(model, batch) / count
        loss.backward()
        total = total.to(loss.device) + loss.detach()
    norm = None
    if config.stream.update == "step":
        # 0 means no clipping, but the norm is still logged
        norm = streamer.clip_grad_norm_(model, config.train.max_grad_norm or math.inf)
    optimizer.step()
    optimizer.zero_grad()
    return total, norm


#: Files in a run's folder: its configuration, values by step, the last ops, and bytes and seconds of the
#: whole run.
CONFIG, METRICS, TRACE, SUMMARY = "config.toml", "metrics.jsonl", "trace.json", "summary.json"


class Lines:
    """A file with a line of JSON for each step, such as ``metrics.jsonl``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, values: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # JSON has no NaN
        line = {key: None if value != value else value for key, value in values.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """All whole lines; a killed run may have left a partial one."""
        found = []
        if self.path.is_file():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    found.append(json.loads(line))
                except ValueError:
                    continue
        return found

    def forget_after(self, step: int) -> None:
        """Drop the lines after ``step``, which a resumed run writes again."""
        kept = [line for line in self.read() if line["step"] <= step]
        if self.path.is_file():
            with new_file(self.path) as file:
                file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept))


def silent(*_: object, **__: object) -> None:
    """In place of ``print`` on ranks after the first."""


#: Errors that end a run with a line that names the remedy.
FAILURES = (torch.OutOfMemoryError, MemoryError, streamer.NonFiniteError)


def failed(step: int, error: Exception) -> RunError:
    """The line for one of `FAILURES` in ``step``."""
    remedy = "; lower stream.micro_batch_size" if isinstance(error, torch.OutOfMemoryError) else ""
    return RunError(f"step {step}: {in_keys(' '.join(str(error).split()))}{remedy}")


class Stop:
    """Inside its block the first SIGINT, SIGTERM or SIGHUP only sets `signal`; the second ends the
    process."""

    signal: signal.Signals | None = None

    def __enter__(self) -> Stop:
        self._before = {
            number: signal.signal(number, self._note)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) is not signal.SIG_IGN  # nohup ignores SIGHUP
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)
        os.write(2, b"\nfinishing this step, then saving; Ctrl-C again to stop without\n")


@dataclass(frozen=True)
class Space:
    """Bytes of disk: of a checkpoint and of the weights at the end. The folder keeps ``count`` checkpoints
    while one more is written."""

    checkpoint: int
    count: int
    weights: int

    @property
    def peak(self) -> int:
        """The most bytes that the run's folder holds."""
        return self.checkpoint * self.count + self.weights

    def line(self) -> str:
        weights = f", and weights of {amount(self.weights)}" if self.weights else ""
        return f"{self.count} checkpoints of {amount(self.checkpoint)}{weights}"


def space_of(config: Config, model: nn.Module) -> Space:
    """The files of a run of ``config``; ``model`` is its model, with values or without. A trained parameter
    takes its fp32 master and its moments, a frozen one its values; the base of adapters is left out."""
    streamed = dtype_of(config)
    state, fp32 = MOMENTS[parse_state_dtype(config.optimizer.state_dtype)], MOMENTS[torch.float32]
    checkpoint = weights = 0
    for param in model.parameters():
        dtype = (kept_dtype(param) or streamed or param.dtype) if param.is_floating_point() else param.dtype
        if param.requires_grad:
            moments = state if dtype is torch.bfloat16 else fp32
            per_value = sum(purpose.dtype.itemsize for purpose in moments[:2])
            per_block = sum(purpose.dtype.itemsize for purpose in moments[2:])
            checkpoint += param.numel() * (4 + per_value) + -(-param.numel() // QUANTUM) * per_block
        elif not config.lora:
            checkpoint += param.numel() * dtype.itemsize
        if param.requires_grad or not config.lora:
            weights += param.numel() * dtype.itemsize
    if config.model.path is None:
        return Space(checkpoint, config.train.save_total_limit + 1, 0)
    saves = config.trainer.get("save_strategy", "steps") != "no"
    return Space(
        checkpoint, ((TRAINER | config.trainer)["save_total_limit"] or 2) + 1 if saves else 0, weights
    )


#: Seconds by lane: busy, and exposed.
Seconds = tuple[dict[str, float], dict[str, float]]


def seconds_of(model: nn.Module) -> Seconds:
    """Seconds by lane of a wrapped model so far."""
    stats = streamer.stats(model)
    return dict(stats.busy_seconds), dict(stats.exposed_seconds)


def model_line(model: nn.Module) -> str:
    """The parameters of a wrapped model, and the bytes that it holds now."""
    held, params = streamer.stats(model), list(model.parameters())
    trained = sum(param.numel() for param in params if param.requires_grad)
    on_disk = f", {amount(sum(held.disk_bytes.values()))} on disk" if held.disk_bytes else ""
    return (
        f"{sum(map(values_in, params)):,} parameters, {trained:,} of them trained; "
        f"{amount(held.device_bytes_now)} on the device ({params[0].device.type}), "
        f"{amount(sum(held.host_bytes.values()))} in host memory{on_disk}"
    )


def write_end(
    model: nn.Module, out: Path, first: Seconds | None, trained: Mapping[str, float], *, unit: str = "token"
) -> None:
    """Write ``trace.json`` and ``summary.json``, and print the summary as a table: bytes, seconds by lane
    without those of the ``first`` step, and ``trained``: tokens per second, and losses in nats."""
    streamer.synchronize(model)
    with new_file(out / TRACE) as file:
        streamer.save_trace(model, file)
    stats, params = streamer.stats(model), list(model.parameters())
    busy, exposed = seconds_of(model)
    if first is not None and busy["compute"] > first[0]["compute"]:
        busy = {lane: max(0.0, seconds - first[0][lane]) for lane, seconds in busy.items()}
        exposed = {lane: max(0.0, seconds - first[1][lane]) for lane, seconds in exposed.items()}
    parameters = sum(map(values_in, params))
    summary = {
        "parameters": parameters,
        "weight_bytes": sum(part.nbytes for param in params for part in parts_of(param)),
        "device_bytes_peak": stats.device_bytes_peak,
        "host_bytes_per_parameter": sum(stats.host_bytes.values()) / parameters,
        "disk_bytes_per_parameter": sum(stats.disk_bytes.values()) / parameters,
        **trained,
        "busy_seconds": busy,
        "exposed_seconds": exposed,
        "overlap": {lane: 1 - exposed[lane] / busy[lane] if busy[lane] else None for lane in busy},
    }
    with new_file(out / SUMMARY) as file:
        file.write_text(json.dumps(summary, indent=2) + "\n")
    print(f"\n{summary_table(summary, unit)}\n")


def summary_table(summary: Mapping[str, Any], unit: str) -> str:
    """The summary for the terminal."""
    # the two fp32 moments of a plain optimizer, besides weights and gradients
    resident = 2 * summary["weight_bytes"] + 8 * summary["parameters"]
    rows = {
        "parameters": f"{summary['parameters']:,}",
        "weights": amount(summary["weight_bytes"]),
        "peak on the device": f"{amount(summary['device_bytes_peak'])} with the layers' saved inputs",
        "if all were held there": f"{amount(resident)} of weights, gradients and moments",
        "host bytes per parameter": f"{summary['host_bytes_per_parameter']:.2f}",
        "disk bytes per parameter": f"{summary['disk_bytes_per_parameter']:.2f}",
        "tokens/s": f"{summary['tokens_per_second']:,.0f}",
    }
    losses = {
        "first_val_loss": "validation loss before",
        "last_val_loss": "validation loss after",
        "last_loss": "training loss at the end",
        "unigram_loss": f"{unit} frequencies alone",
    }
    rows |= {words: f"{summary[key]:.3f} nats per {unit}" for key, words in losses.items() if key in summary}
    lines = [f"{name:26}{value}" for name, value in rows.items()]
    lines.append(f"\n{'lane':14}{'busy s':>10}{'exposed s':>12}{'overlap':>10}")
    for lane, busy in summary["busy_seconds"].items():
        if busy:
            exposed, overlap = summary["exposed_seconds"][lane], summary["overlap"][lane]
            figures = (
                f"{'-':>12}{'-':>10}" if lane == "compute" else f"{exposed:>12.2f}{max(0, overlap):>10.1%}"
            )
            lines.append(f"{lane:14}{busy:>10.2f}{figures}")
    return "\n".join(lines)
