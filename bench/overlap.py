"""How fast do a layer's weights arrive and its gradients leave, and how much of that does compute wait for?

    python -m bench.overlap configs/gpt2-demo.toml                       # the GPU, or threads without one
    python -m bench.overlap configs/gpt2-demo.toml --backend virtual     # what an H200 should make of it
    python -m bench.overlap configs/gpt2-demo.toml --set model.args.n_embd=1024 \\
        --set model.args.n_head=16 --set train.per_device_train_batch_size=2 \\
        --set train.learning_rate=1e-4 --compute-threads 1

The last command has layers wide enough for visible copies, and leaves one of two cores to them (a minute).

Takes any config that `streamer train` takes, and trains its model in a plain loop on one batch of random
bytes: forward, cross-entropy in fp32, backward, clipping (where ``stream.update`` is "step"), step,
zero_grad. After the warm-up nothing stops the pipeline between steps: the trace keeps every op, and is cut
into steps afterwards, at the root's forward. One step more is taken after those that are measured, so that
the last one ends as the others do.

The JSON has for each layer: its weights on their way in for forward and for backward and its gradient's on
their way out (milliseconds and GB/s of the median copy, and its rate over that of a raw copy of the same
size, see `bench.by_layer`), forward and backward, and what compute waited for before them, by lane. A copy
that did not take place (the weights were in a slot still) counts as none. Medians are over copies or steps;
waiting and busy times are means per step, so that rows add up to totals. The root unit (all that is in no
layer) and the caller, who waits for the last gradients when backward ends, have rows too. Layers are what
is traced on compute: embeddings, head, loss and Python are in what remains of the step, `other_seconds`.

On CUDA every span lies between two CUDA events. On the virtual backend, with meta tensors and the rates of
``--machine``, nothing is clipped, since that needs a value, and only what runs in layers takes compute time.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import streamer
from bench.by_layer import (
    CompleteTrace,
    RawCopies,
    place,
    rows,
    totals,
)
from bench.common import RESULTS, load_average, provenance, write_json
from bench.markdown import Report, config_of, share, spread, table
from bench.no_values import add_option, go_on_without_values
from streamer.backends.base import Backend
from streamer.backends.cuda import CudaBackend
from streamer.backends.thread import ThreadBackend
from streamer.backends.virtual import VirtualBackend
from streamer.cli.build import build_model, build_optimizer
from streamer.cli.config import Config, ConfigError, load_config
from streamer.engine.handle import wrapped
from streamer.planner.machine import A100_PCIE_4, H100_PCIE_5, H200, RTX_4090, RTX_4090_PCIE_3

MACHINES = {machine.name: machine for machine in (H200, RTX_4090, RTX_4090_PCIE_3, A100_PCIE_4, H100_PCIE_5)}


def training_step(config: Config, model: nn.Module) -> Callable[[], None]:
    """A step of the plain loop, always on the same random bytes."""
    optimizer = build_optimizer(config, model)
    device = wrapped(model).executor.backend.device
    shape = (2, config.train.per_device_train_batch_size, config.train.max_length)
    tokens, targets = torch.randint(256, shape).to(device)
    # clipping needs the norm's value, and meta tensors have none
    clips = config.stream.update == "step" and device.type != "meta"

    def step() -> None:
        result: Any = model(tokens)
        logits: torch.Tensor = getattr(result, "logits", result)
        F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()).backward()
        if clips:
            streamer.clip_grad_norm_(model, config.train.max_grad_norm or math.inf)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(config: Config, backend: Backend, *, steps: int, warmup: int, trace: Path) -> dict[str, Any]:
    """Figures of ``steps`` (2 or more) steps after ``warmup`` (1 or more); the Chrome trace of all of them,
    and of one more, goes to ``trace``. Closes ``backend``.

    Raises ConfigError for what cannot be built and RuntimeError for a step whose gradients are not finite.
    """
    torch.manual_seed(config.train.seed)
    model = build_model(config, backend=backend)
    executor = wrapped(model).executor
    try:
        step = training_step(config, model)
        # the wrapped model's own trace keeps 20,000 ops: to take them away in time would disturb the steps
        complete = executor.issuer.trace = CompleteTrace()
        for _ in range(warmup + steps + 1):
            step()
        streamer.synchronize(model)
        stats = streamer.stats(model)
        streamer.save_trace(model, trace)
        placed = place(complete.in_order_of_issue())
        if sum(one.begins_step for one in placed) != warmup + steps + 1:
            raise RuntimeError("a step was skipped: its gradients were not finite; lower train.learning_rate")
        measured = range(warmup, warmup + steps)
        parameters = sum(param.numel() for param in model.parameters())
        tokens = config.train.per_device_train_batch_size * config.train.max_length
        raw = RawCopies(backend)
        found = rows(placed, measured, raw.seconds)
        return {
            "parameters": parameters,
            "tokens_per_step": tokens,
            "steps": steps,
            "warmup": warmup,
            "device_bytes": dict(stats.device_bytes),
            "device_bytes_peak": stats.device_bytes_peak,
            "host_bytes": dict(stats.host_bytes),
            "totals": totals(placed, measured, tokens=tokens, parameters=parameters),
            **found,
            "raw_copies": [{"bytes": nbytes} | seconds for nbytes, seconds in raw.measured.items()],
        }
    finally:
        # not `unwrap`, which would give every parameter its exact value back
        wrapped(model).close()


def make_backend(kind: str | None, config: Config, machine: str) -> Backend:
    """The backend that ``--backend`` names, or the one of the config's device."""
    device = config.stream.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind is None:
        kind = "thread" if device == "cpu" else "cuda"
    if kind == "virtual":
        return VirtualBackend(MACHINES[machine])
    if kind == "thread":
        return ThreadBackend()
    if not torch.cuda.is_available():
        raise SystemExit("--backend cuda: PyTorch finds no CUDA device here; there are thread and virtual")
    return CudaBackend(torch.device(device if device != "cpu" else "cuda"))


def draw_one_step(trace: Path, picture: Path) -> None:
    """The last measured step of ``trace`` as a timeline, if matplotlib is there."""
    try:
        from streamer.cli.plan import timeline
    except ModuleNotFoundError as error:
        print(f"not drawn: {error}; matplotlib comes with the extra [plot]")
        return
    # the last forward is that of the step after it
    begin, end = timeline.forwards(trace)[-2:]
    timeline.draw_between(trace, picture, begin, end)
    print(f"written: {picture}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE", dest="overrides")
    parser.add_argument("--backend", choices=("cuda", "thread", "virtual"), help="(that of stream.device)")
    parser.add_argument("--machine", choices=sorted(MACHINES), default="H200", help="of the virtual backend")
    parser.add_argument("--steps", type=int, default=20, help="that are measured, 2 or more (20)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them, 1 or more (3)")
    parser.add_argument("--compute-threads", type=int, help="of PyTorch (its own choice)")
    parser.add_argument("--json", type=Path, default=RESULTS / "overlap.json")
    parser.add_argument("--png", type=Path, default=RESULTS / "overlap.png")
    parser.add_argument("--trace", type=Path, help="the Chrome trace of all steps (not written)")
    add_option(parser)
    options = parser.parse_args(arguments)
    if options.steps < 2 or options.warmup < 1:
        parser.error("--steps must be 2 or more, and --warmup 1 or more")
    return options


def report_table(report: Report) -> list[str]:
    totals = report["totals"]
    rows = [
        [
            lane,
            f"{totals['busy_seconds'][lane] * 1e3:.1f}",
            f"{totals['exposed_seconds'][lane] * 1e3:.1f}",
            share(totals["overlap"][lane]),
        ]
        for lane in ("h2d", "d2h", "host")
    ]
    copies = [
        f"{layer[purpose]['of_raw']:.2f}"
        for layer in report["layers"][len(report["layers"]) // 2 :][:1]
        for purpose in ("weights_for_forward", "weights_for_backward", "gradient")
        if "of_raw" in layer[purpose]
    ]
    return [
        f"{config_of(report)}, {report['parameters']:,} parameters, "
        f"{report['tokens_per_step']:,} tokens a step on the backend {report['backend']}: "
        f"{spread(totals['step_seconds'], '.1f', 1e3)} ms a step; compute "
        f"waits for copies for {totals['exposed_transfer_of_step']:.1%} of it; a layer's copies run at "
        f"{', '.join(copies)} of a raw copy's rate.",
        "",
        *table(["lane", "busy, ms", "exposed, ms", "overlap"], rows),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.no_values:
        go_on_without_values()
    load_before = load_average()
    if options.compute_threads is not None:
        torch.set_num_threads(options.compute_threads)
    with tempfile.TemporaryDirectory() as folder:
        trace = options.trace or Path(folder) / "trace.json"
        try:
            config = load_config(options.config, options.overrides)
            backend = make_backend(options.backend, config, options.machine)
            found = measure(config, backend, steps=options.steps, warmup=options.warmup, trace=trace)
        except ConfigError as error:
            raise SystemExit(f"error: {error}") from None
        machine = {"machine": asdict(backend.machine)} if isinstance(backend, VirtualBackend) else {}
        report = {
            **provenance("bench/overlap.py", load_before=load_before, device=backend.device),
            "backend": type(backend).__name__.removesuffix("Backend").lower(),
            "compute_threads": torch.get_num_threads(),
            **machine,
            "config": {"file": str(options.config), "set": options.overrides} | asdict(config),
            **found,
        }
        print("\n".join(report_table(report)))
        write_json(options.json, report)
        draw_one_step(trace, options.png)


if __name__ == "__main__":
    main()
