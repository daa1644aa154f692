"""How fast is streamer compared with other ways to train the same model, and how much memory does each hold?

    python -m bench.versus --device cpu    # half a minute, no GPU: checks that all of it works
    python -m bench.versus --device cuda --n-layer 48 --n-head 25 --n-embd 1600 --vocab-size 50257 \\
        --context 1024 --batch-size 32 --lr 1e-4 --groups streamer-2,streamer-48,fsdp2 torchao-fp32,deepspeed

*plain-bf16* is PyTorch with everything on the device in bf16: the fastest, whose rounded weights lose small
updates. *plain-fp32* holds fp32 weights under bf16 autocast, masters as exact as streamer's; with
``--dtype float32`` there is only this one. *streamer-K* has K slots: 2, and ``--slots`` or as many as there
are layers. *torchao-...* has moments and update on the host, in either precision. *fsdp2* and *deepspeed*
(ZeRO-3) have weights, moments and update there. All start from the same weights, take the same batches in
the same order, recompute each layer in backward and clip to norm 1, but for torchao, which cannot. Who is not
installed, cannot run here or fails is named with the reason; the others go on.

Each round runs a block of steps of each, in an order drawn anew. A block takes one step that is not timed,
then those that are; the clock starts and stops with the device idle. Queued host updates are counted as many
in as out: streamer's clock starts with an update just queued and stops with another just queued, so as many
are worked off while it runs as steps are taken. Nothing of a contender runs on into another's block. The
first block of each, which compiles and warms up, is not counted. Ratios are taken within a round.

Device bytes are those of PyTorch's allocator: *at rest* is what building and the first block leave behind,
*step* the most that a block takes above what it found, *peak* their sum; on the CPU only streamer tells its
own. Host bytes: *resident* is what building and the first block add to the process's resident set (inexact,
for libraries are loaded meanwhile and freed memory is used again; without a GPU the "device" is in it too),
*pinned* what they add to PyTorch's own pinned memory, *counted* what streamer holds, exactly.

Losses are of a batch that is not trained on. A contender whose losses are not those of the plain one with its
precision is refused, and the exit code is 1: `verdict` tells how far apart they may be. Contenders that do
not fit into memory side by side are put into ``--groups``, run one after the other, each beside the plain;
``--only`` names one group. ``--seconds`` ends the rounds of each group early. The JSON is written anew after
each group.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from bench.common import RESULTS, load_average, provenance, quartiles, write_json
from bench.markdown import Report, number, spread, table
from bench.no_values import add_option, go_on_without_values
from bench.versus_contenders import (
    EVALUATION,
    PLAIN,
    PLAIN_BF16,
    PLAIN_FP32,
    CannotRun,
    Contender,
    Task,
    contenders,
)

#: what rounding may do to the mean loss of one batch with the same weights
ROUNDING = {"float32": 1e-4, "bfloat16": 5e-3}
#: what it may do to training: a share of what the plain loss fell by
SHARE = {"float32": 0.002, "bfloat16": 0.02}
#: the share where gradients are not clipped, which is another way to train
SHARE_UNCLIPPED = 0.2


@dataclass(frozen=True)
class Losses:
    """Of the batch that is not trained on, before the first step and after the last."""

    before: float
    after: float


@dataclass(frozen=True)
class Result:
    """All that is known of a contender that went through every round."""

    losses: Losses
    #: of a step, by round
    seconds: list[float]
    #: "at_rest" and "step", or None where nobody counts them
    device_bytes: dict[str, int] | None
    #: "resident", "pinned_by_pytorch" and, of streamer, "counted"
    host_bytes: dict[str, int]
    exact: bool = True
    clips: bool = True
    remark: str = ""


def first_line(error: BaseException) -> str:
    """The type of an error and the first line of its message; for `CannotRun` only the message."""
    if isinstance(error, CannotRun):
        return str(error)
    lines = str(error).strip().splitlines()
    return ": ".join((type(error).__name__, *lines[:1]))


def verdict(own: Losses, reference: Losses, *, dtype: str, clips: bool) -> str | None:
    """Why ``own`` are not the losses of a contender that trained as ``reference`` did; None if they are.

    Before the first step weights are the same, and what is left is `ROUNDING`: sums in another order change
    the loss by some 1e-6 of it in fp32, bf16 by some 1e-4 in the mean of 512 tokens and by less in that of
    more. After it precision explains `SHARE` of the fall of the plain loss: in 28 steps of a small model on
    the CPU, streamer, FSDP2 and DeepSpeed in bf16 came to within 0.05 % of the fall of fp32 masters, and in
    fp32 to within 0.002 %; the bounds leave a factor of 40 and more to larger models. Who does not train is
    100 % off; a rate wrong by a tenth was 7 % off, half the layers left out 4 %, no clipping 3 %.
    The losses say something only where the plain one fell by much more than rounding: that is asked first.
    """
    fall = reference.before - reference.after
    if not fall > 20 * ROUNDING[dtype]:
        return (
            f"the plain loss went from {reference.before:.4f} to {reference.after:.4f}, too little to "
            "compare with: take more --rounds or a larger --lr"
        )
    if not abs(own.before - reference.before) <= ROUNDING[dtype]:
        return f"its loss begins at {own.before:.4f}, the plain one at {reference.before:.4f}"
    bound = ROUNDING[dtype] + (SHARE[dtype] if clips else SHARE_UNCLIPPED) * fall
    if not abs(own.after - reference.after) <= bound:
        return f"its loss ends at {own.after:.4f}, the plain one at {reference.after:.4f} (+-{bound:.4f})"
    return None


def reference_of(result: Result, results: Mapping[str, Result]) -> str | None:
    """The name of the plain contender with its precision, or of the other where that one is missing."""
    order = (PLAIN_FP32, PLAIN_BF16) if result.exact else (PLAIN_BF16, PLAIN_FP32)
    return next((name for name in order if name in results), None)


def times_faster(than: Result, result: Result) -> dict[str, float]:
    """Quartiles, over rounds, of the tokens per second against those of ``than`` in the same round."""
    pairs = zip(than.seconds, result.seconds, strict=True)
    return quartiles(theirs / own for theirs, own in pairs)


def row(result: Result, results: Mapping[str, Result], *, dtype: str, tokens_per_step: int) -> dict[str, Any]:
    """The JSON of one contender."""
    reference = reference_of(result, results)
    device = result.device_bytes
    return {
        "rounds": len(result.seconds),
        "seconds_per_step": quartiles(result.seconds),
        "tokens_per_second": quartiles(tokens_per_step / seconds for seconds in result.seconds),
        "times_tokens_per_second_of": {
            name: times_faster(results[name], result) for name in PLAIN if name in results
        },
        "device_bytes": None if device is None else {**device, "peak": sum(device.values())},
        "host_bytes": result.host_bytes,
        "loss": {**asdict(result.losses), "compared_with": reference},
        "refused": None
        if reference is None
        else verdict(result.losses, results[reference].losses, dtype=dtype, clips=result.clips),
        "remark": result.remark,
    }


Builders = Mapping[str, Callable[[], Contender]]


class Entry:
    """A running contender, and its measurements."""

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
        """Release the contender, which is measured or has failed; errors in this are ignored."""
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
    """The results of each contender that finished, and the reasons why others did not.

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
            # so that an interrupted run has printed something
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
    """Free unused memory.

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


def run_group(builders: Builders, task: Task, options: argparse.Namespace) -> dict[str, Any]:
    """A row for each contender, in their order."""
    results, left_out = measure(
        builders, task, rounds=options.rounds, steps=options.steps, seconds=options.seconds
    )
    return {
        name: {"skipped": left_out[name]}
        if name in left_out
        else row(results[name], results, dtype=options.dtype, tokens_per_step=task.tokens_per_step)
        for name in builders
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="CUDA where there is one")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="bfloat16 on CUDA, float32 on the CPU"
    )
    parser.add_argument("--n-layer", type=int, default=4)
    parser.add_argument("--n-head", type=int, default=4)
    parser.add_argument("--n-embd", type=int, default=128)
    parser.add_argument("--vocab-size", type=int, default=512)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--rounds", type=int, default=10, help="two or more (10)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a block (3)")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="after which a group begins no more rounds"
    )
    parser.add_argument("--slots", type=int, help="of the second streamer (as many as there are layers)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these and the plain ones")
    parser.add_argument("--groups", nargs="+", default=[], metavar="NAME,NAME", help="side by side; all")
    parser.add_argument("--json", type=Path, default=RESULTS / "versus.json")
    add_option(parser)
    options = parser.parse_args(arguments)
    if options.rounds < 2 or options.steps < 1:
        parser.error("quartiles need two --rounds, a block one of --steps")
    if options.only and options.groups:
        parser.error("--groups names its contenders, and takes no --only")
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    options.slots = min(options.slots or options.n_layer, options.n_layer)
    return options


def chosen(options: argparse.Namespace, names: Sequence[str]) -> list[list[str]]:
    """The names of each group, the plain ones in all of them; ends the program at a name that is none."""
    asked = [group.split(",") for group in options.groups] or [options.only or list(names)]
    for name in (name for group in asked for name in group):
        if name not in names:
            sys.exit(f"there is no contender '{name}' here: choose among {', '.join(names)}")
    return [[name for name in names if name in PLAIN or name in group] for group in asked]


def start_cuda(device: torch.device) -> None:
    """Let CUDA and cuBLAS allocate their memory, forward and backward, before contenders are measured."""
    layer = torch.nn.Linear(64, 64, device=device)
    layer(torch.ones(64, 64, device=device)).sum().backward()
    torch.cuda.synchronize(device)


GIB = 1 << 30


def report_table(report: Report) -> list[str]:
    lines = [f"{report['parameters']:,} parameters, {report['tokens_per_step']:,} tokens a step."]
    for group in report["groups"]:
        rows = [_contender(name, row) for name, row in group.items()]
        heads = ["", "tokens/s", "x plain-bf16", "x plain-fp32", "peak device GiB", "host GiB", "loss"]
        lines += ["", *table(heads, rows)]
    return lines


def _contender(name: str, row: Report) -> list[str]:
    if "skipped" in row:
        return [name, f"left out: {row['skipped']}", "", "", "", "", ""]
    ratios, device, host = row["times_tokens_per_second_of"], row["device_bytes"], row["host_bytes"]
    return [
        name + (f" (refused: {row['refused']})" if row["refused"] else ""),
        spread(row["tokens_per_second"], ",.0f"),
        spread(ratios.get("plain-bf16"), ".3f"),
        spread(ratios.get("plain-fp32"), ".3f"),
        "" if device is None else f"{device['peak'] / GIB:.2f}",
        f"{(host.get('counted') or host['resident']) / GIB:.2f}",
        f"{number(row['loss']['before'], '.3f')} to {number(row['loss']['after'], '.3f')}",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.no_values:
        go_on_without_values()
    load_before = load_average()
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        start_cuda(device)
    sizes = {name: getattr(options, name) for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
    with contextlib.ExitStack() as exits:
        task = Task(
            device=device,
            dtype=getattr(torch, options.dtype),
            sizes=sizes | {"block_size": options.context},
            batch_size=options.batch_size,
            lr=options.lr,
            exits=exits,
        )
        builders = contenders(task, num_slots=options.slots)
        groups = []
        for names in chosen(options, list(builders)):
            side_by_side = {name: builders[name] for name in names}
            groups.append(run_group(side_by_side, task, options))
            # after each group, for what comes may not end well
            report = {
                **provenance("bench/versus.py", load_before=load_before, device=device),
                "parameters": task.num_parameters,
                "tokens_per_step": task.tokens_per_step,
                "threads_of_pytorch": torch.get_num_threads(),
                "settings": {name: value for name, value in vars(options).items() if name != "json"},
                "groups": groups,
            }
            write_json(options.json, report)
    print("\n".join(report_table(report)))
    refused = any(row.get("refused") for group in groups for row in group.values())
    # without values there are no losses that could be compared
    return int(refused and not options.no_values)


if __name__ == "__main__":
    sys.exit(main())
