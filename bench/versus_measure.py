"""Blocks of steps in turn: how bench/versus.py takes times and bytes of its contenders."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Mapping

import psutil
import torch

from bench.versus_contenders import Contender
from bench.versus_report import Losses, Result, first_line
from bench.versus_task import EVALUATION, Task

Builders = Mapping[str, Callable[[], Contender]]


class Entry:
    """A contender in the running, and what has been measured of it."""

    def __init__(self, build: Callable[[], Contender], task: Task, steps: int, untimed: int) -> None:
        self.task, self.steps, self.untimed = task, steps, untimed
        self.next_batch = 0
        self.seconds: list[float] = []
        self.step_bytes: list[int] = []
        free(task.device)
        before = held(task.device)
        self.contender = build()
        try:
            self.loss_before = self.contender.evaluate(task.batch(EVALUATION))
            self._block()
            free(task.device)
        except BaseException:
            self.discard()
            raise
        self.added = {name: amount - before[name] for name, amount in held(task.device).items()}

    def block(self) -> None:
        """A block that counts."""
        seconds, step_bytes = self._block()
        self.seconds.append(seconds)
        self.step_bytes.append(step_bytes)

    def _block(self) -> tuple[float, int]:
        """The seconds of a step, and the bytes that PyTorch took on the device above those it had."""
        device = self.task.device
        # made beforehand: what feeds a loop is not measured here
        batches = [self.task.batch(self.next_batch + number) for number in range(self.untimed + self.steps)]
        self.next_batch += len(batches)
        if device.type == "cuda":
            # another's blocks, of other sizes, are not to be given back under this one's clock
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        found = allocated(device)
        for batch in batches[: self.untimed]:
            self.contender.step(batch)
        wait_for(device)
        began = time.perf_counter()
        for batch in batches[self.untimed :]:
            self.contender.step(batch)
        if not self.untimed:
            # with nothing under way when the clock started, nothing may be when it stops
            self.contender.settle()
        wait_for(device)
        seconds = (time.perf_counter() - began) / self.steps
        self.contender.settle()
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else found
        return seconds, peak - found

    def result(self) -> Result:
        """All of it, with the loss after the last step."""
        losses = Losses(self.loss_before, self.contender.evaluate(self.task.batch(EVALUATION)))
        host = {name: self.added[name] for name in ("resident", "pinned_by_pytorch")}
        device: dict[str, int] | None = None
        if self.task.device.type == "cuda":
            device = {"at_rest": self.added["device"], "step": max(self.step_bytes)}
        if (stats := self.contender.stats()) is not None:
            host["counted"] = sum(stats.host_bytes.values())
            if device is None:
                buffers = sum(stats.device_bytes.values())
                device = {"at_rest": buffers, "step": stats.device_bytes_peak - buffers}
        traits = {name: getattr(self.contender, name) for name in ("exact", "clips", "remark")}
        return Result(losses, self.seconds, device, host, **traits)

    def discard(self) -> None:
        """Give up the contender, which is measured or has failed: that this fails too takes nothing away."""
        try:
            self.contender.close()
        except Exception as error:
            print(f"{type(self.contender).__name__} did not close: {first_line(error)}", flush=True)


def measure(
    builders: Builders,
    task: Task,
    *,
    rounds: int,
    steps: int,
    untimed: int = 1,
    seconds: float = math.inf,
) -> tuple[dict[str, Result], dict[str, str]]:
    """What is known of each contender that came through, and of the others why they did not.

    A block takes ``untimed`` steps (0 or 1) before its ``steps``. After ``seconds`` no more rounds are begun,
    but for the two that quartiles need.
    """
    began = time.monotonic()
    entries: dict[str, Entry] = {}
    results: dict[str, Result] = {}
    left_out: dict[str, str] = {}

    def attempt(name: str, work: Callable[[], None]) -> None:
        try:
            work()
            return
        # whatever a library raises is why its contender is left out; the others go on
        except Exception as error:
            left_out[name] = first_line(error)
        # only here are the error and its frames gone, with the tensors that they held
        print(f"{name} is left out: {left_out[name]}", flush=True)
        if name in entries:
            entries.pop(name).discard()
        free(task.device, pinned=True)

    def build(name: str) -> None:
        entries[name] = Entry(builders[name], task, steps, untimed)
        print(f"{name} is built and warm after {time.monotonic() - began:.0f} s", flush=True)

    def finish(name: str) -> None:
        results[name] = entries[name].result()

    order = random.Random(0)
    try:
        for name in builders:
            attempt(name, lambda name=name: build(name))
        for number in range(rounds):
            if number >= 2 and time.monotonic() - began > seconds:
                break
            for name in order.sample(list(entries), len(entries)):
                attempt(name, lambda name=name: entries[name].block())
            # so that a run that is cut short has told something
            steps_took = ", ".join(f"{name} {entry.seconds[-1]:.4g}" for name, entry in entries.items())
            print(f"round {number + 1}, seconds per step: {steps_took}", flush=True)
        for name in list(entries):
            attempt(name, lambda name=name: finish(name))
    finally:
        for entry in entries.values():
            entry.discard()
        entries.clear()
        entry = None  # or it would outlive them
        free(task.device, pinned=True)
    return results, left_out


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device, *, pinned: bool = False) -> None:
    """Give back what nobody uses.

    ``pinned`` is for when a contender has gone: PyTorch keeps its pinned blocks for later, and those of
    others too, which will take them anew in a step that is not timed.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        # it has no public name
        if pinned and (empty := getattr(torch._C, "_host_emptyCache", None)) is not None:
            empty()


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def held(device: torch.device) -> dict[str, int]:
    """Bytes of this process: in PyTorch's tensors on the device, resident, pinned by PyTorch."""
    pinned = torch.cuda.host_memory_stats() if device.type == "cuda" else {}
    return {
        "device": allocated(device),
        "resident": psutil.Process().memory_info().rss,
        "pinned_by_pytorch": pinned.get("allocated_bytes.current", 0),
    }
