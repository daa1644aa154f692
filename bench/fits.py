"""Does a config train within its memory, and how fast is it with more tokens a step?

    python -m bench.fits configs/gpt2-demo.toml --host-memory 4GiB --batch-sizes 32 64        # a CPU will do
    python -m bench.fits configs/gpt2-10b.toml --host-memory 120GiB --batch-sizes 16 32 64 \\
        --set train.warmup_steps=2                                                            # a GPU

First the config as it is, on the text that it names, with the GPU held to ``stream.device_memory``: the loss
on validation text before and after ``--steps`` steps, each step's loss, norm and seconds, and the peaks of
GPU memory and of host memory (the process's largest resident set, page-locked memory included). Requests of
the GPU's allocator for memory of the driver are counted from the second step on: there should be none.

Then, the limit lifted, larger batches on the same model: tokens/s, the part of a step that compute waited for
copies, and the rate of copies over that of raw ones, as `bench.overlap` takes them. A batch that is too large
is said to be.

Exits with 1, the JSON written, where the loss did not fall, or more was taken than there was to be.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import streamer
from bench.by_layer import CompleteTrace, RawCopies, place, totals
from bench.common import RESULTS, load_average, provenance, write_json
from bench.markdown import Report, config_of, number, table
from bench.no_values import add_option, go_on_without_values
from streamer.backends.base import Lane
from streamer.backends.ranks import Ranks
from streamer.cli.build import build_model
from streamer.cli.config import Config, ConfigError, load_config, with_keys
from streamer.cli.loop import Loop, load_text
from streamer.engine.executor import Executor
from streamer.engine.handle import wrapped
from streamer.model.options import parse_bytes


def failures(report: Mapping[str, Any]) -> list[str]:
    """The failed checks, in words."""
    found, limits = report["within_limits"], report["limits"]
    failed = []
    first, last = found["validation_loss"]
    # what stands in for a GPU has no losses
    if report.get("has_values", True) and not last < first:
        failed.append(f"the validation loss did not fall: {first:.3f}, then {last:.3f}")
    if limits["host_bytes"] is not None and found["host_bytes_peak"] > limits["host_bytes"]:
        failed.append(
            f"{found['host_bytes_peak']} bytes of host memory were taken, not {limits['host_bytes']}"
        )
    device = found["device_bytes_reserved_peak"] or found["device_bytes_peak"]
    if limits["device_bytes"] is not None and device > limits["device_bytes"]:
        failed.append(f"{device} bytes of the device were taken, not {limits['device_bytes']}")
    if found["device_allocations_after_second_step"]:
        failed.append(f"{found['device_allocations_after_second_step']} allocations after the second step")
    return failed


WARMUP, MEASURED = 1, 2


class Run:
    """A config's model in the loop of `streamer train`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        torch.manual_seed(config.train.seed)
        self.model = build_model(config)
        self.loop = Loop(config, self.model, load_text(config), Ranks())
        self.raw = RawCopies(self.executor.backend)

    @property
    def executor(self) -> Executor:
        return wrapped(self.model).executor

    def step(self, batch_size: int) -> dict[str, float]:
        """One step of so many sequences; its loss and the norm of its gradient."""
        self.loop.config = with_keys(self.config, train={"per_device_train_batch_size": batch_size})
        self.loop.train = self.loop.config.train
        return self.loop.train_step()


def within_limits(run: Run, steps: int) -> dict[str, Any]:
    """The config as it is: losses, seconds, and the most memory taken."""
    first = run.loop.validate()
    print(f"validation loss {first:.3f}", flush=True)
    losses: list[float] = []
    norms: list[float | None] = []
    seconds, asked = [], []
    for _ in range(steps):
        begun = time.perf_counter()
        measured = run.step(run.config.train.batch_size)
        losses.append(measured["loss"])
        norms.append(measured.get("grad_norm"))  # there is none where updates do not wait for it
        seconds.append(time.perf_counter() - begun)
        asked.append(asked_of_driver(run.executor))
        # so that an interrupted run has printed something
        print(f"step {len(losses)}: loss {losses[-1]:.4f}, {seconds[-1]:.2f} s", flush=True)
    last = run.loop.validate()
    stats = streamer.stats(run.model)
    tokens = run.config.train.batch_size * run.config.train.max_length
    return {
        "tokens_per_step": tokens,
        "validation_loss": [first, last],
        "losses": losses,
        "gradient_norms": norms,
        "step_seconds": seconds,
        # the first steps compile and allocate
        "tokens_per_second": tokens / statistics.median(seconds[len(seconds) // 3 :]),
        "device_allocations_after_second_step": None if asked[-1] is None else asked[-1] - asked[1],
        "device_bytes": dict(stats.device_bytes),
        "device_bytes_peak": stats.device_bytes_peak,
        "device_bytes_reserved_peak": reserved_peak(run.executor),
        "host_bytes": dict(stats.host_bytes),
        "host_bytes_peak": resident_peak(),
    }


def with_batch(run: Run, batch_size: int) -> dict[str, Any]:
    """Steps of another batch size, traced."""
    tokens = batch_size * run.config.train.max_length
    found: dict[str, Any] = {"batch_size": batch_size, "tokens_per_step": tokens}
    if run.executor.backend.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(run.executor.backend.device)
    try:
        # after a step, a forward begins with the root's op, which separates steps
        run.step(batch_size)
        streamer.synchronize(run.model)
        run.executor.issuer.trace = trace = CompleteTrace()
        for _ in range(WARMUP + MEASURED + 1):
            run.step(batch_size)
        streamer.synchronize(run.model)
    except (torch.OutOfMemoryError, MemoryError) as error:
        run.model.zero_grad()
        where = "device" if isinstance(error, torch.OutOfMemoryError) else "host"
        return found | {"skipped": f"out of {where} memory"}
    parameters = sum(param.numel() for param in run.model.parameters())
    steps = range(WARMUP, WARMUP + MEASURED)
    placed = place(trace.in_order_of_issue())
    found |= totals(placed, steps, tokens=tokens, parameters=parameters)
    arriving = [one for one in placed if one.step in steps and one.record.op.lane is Lane.H2D]
    largest = max(one.record.op.nbytes for one in arriving)
    copy = statistics.median(one.seconds for one in arriving if one.record.op.nbytes == largest)
    return found | {
        "h2d_bytes_per_second": largest / copy,
        "h2d_of_raw": run.raw.seconds(Lane.H2D, largest) / copy,
        "device_bytes_peak": streamer.stats(run.model).device_bytes_peak,
    }


def asked_of_driver(executor: Executor) -> int | None:
    """The number of PyTorch's requests to the driver for device or page-locked memory; None without a GPU."""
    if executor.backend.device.type != "cuda":
        return None
    device, host = torch.cuda.memory_stats(executor.backend.device), torch.cuda.host_memory_stats()
    return int(device["num_device_alloc"] + host["num_host_alloc"])


def reserved_peak(executor: Executor) -> int | None:
    """The peak of GPU memory of PyTorch's allocator, including unused memory that it keeps."""
    device = executor.backend.device
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None


def resident_peak() -> int:
    """The largest resident set that this process has had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE", dest="overrides")
    parser.add_argument("--steps", type=int, default=16, help="on text, 3 or more (16)")
    parser.add_argument("--host-memory", help='at most, such as "120GiB" (not checked)')
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=[], help="larger ones, in sequences")
    parser.add_argument("--json", type=Path, default=RESULTS / "fits.json")
    add_option(parser)
    options = parser.parse_args(arguments)
    if options.steps < 3:
        parser.error("--steps must be 3 or more")
    return options


def report_table(report: Report) -> list[str]:
    found = report["within_limits"]
    first, last = found["validation_loss"]
    device = found["device_bytes_reserved_peak"] or found["device_bytes_peak"]
    rows = [[f"{found['tokens_per_step']:,}", f"{found['tokens_per_second']:,.0f}", "", "", ""]]
    for row in report["with_batch"]:
        if "skipped" in row:
            rows.append([f"{row['tokens_per_step']:,}", row["skipped"], "", "", ""])
            continue
        rows.append(
            [
                f"{row['tokens_per_step']:,}",
                f"{row['tokens_per_second']:,.0f}",
                f"{row['flops_per_second'] / 1e12:.1f}",
                f"{row['exposed_transfer_of_step']:.1%}",
                f"{row['h2d_of_raw']:.2f}",
            ]
        )
    heads = ["tokens a step", "tokens/s", "TFLOP/s", "waiting for copies", "H2D of a raw copy"]
    return [
        f"{config_of(report)}, {report['parameters']:,} parameters, built in "
        f"{report['build_seconds']:.0f} s; at most {device / (1 << 30):.2f} GiB of the device and "
        f"{found['host_bytes_peak'] / (1 << 30):.1f} GiB of host memory; validation loss "
        f"{number(first, '.3f')} to {number(last, '.3f')} in {len(found['losses'])} steps."
        + "".join(f" FAILED: {failure}." for failure in report["failures"]),
        "",
        *table(heads, rows),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.no_values:
        go_on_without_values()
    load_before = load_average()
    try:
        host_bytes = parse_bytes("--host-memory", options.host_memory)
        config = load_config(options.config, options.overrides)
        begun = time.perf_counter()
        run = Run(config)
    except (ConfigError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    streamer.synchronize(run.model)
    build_seconds = time.perf_counter() - begun
    print(f"built in {build_seconds:.1f} s", flush=True)
    report: dict[str, Any] = {
        **provenance("bench/fits.py", load_before=load_before, device=run.executor.backend.device),
        "config": {"file": str(options.config), "set": options.overrides} | asdict(config),
        "parameters": sum(param.numel() for param in run.model.parameters()),
        "build_seconds": build_seconds,
        "limits": {
            "device_bytes": parse_bytes("stream.device_memory", config.stream.device_memory),
            "host_bytes": host_bytes,
        },
        "within_limits": within_limits(run, options.steps),
        "with_batch": [],
    }
    report["failures"] = failures(report)
    write_json(options.json, report)  # what follows may yet fail
    if run.executor.backend.device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0, run.executor.backend.device)
    try:
        for batch_size in options.batch_sizes:
            report["with_batch"].append(with_batch(run, batch_size))
            write_json(options.json, report)
    except KeyboardInterrupt:  # of a time limit: what has been measured stands
        report["failures"].append(f"interrupted with {batch_size} sequences")
        write_json(options.json, report)
    print("\n".join(report_table(report)))
    wrapped(run.model).close()
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
