"""How many tokens does each copy of a weight serve, and how does that change tokens per second?

    python -m bench.tokens_per_transfer plain    # against plain PyTorch; ten minutes on two cores
    python -m bench.tokens_per_transfer bus      # a bus of 0.2 and 1 GB/s; eight minutes on two cores
    python -m bench.tokens_per_transfer bus --device cuda --n-layer 3 --n-head 32 --n-embd 4096 \\
        --vocab-size 50257 --context 1024 --batch-sizes 4 16 --lr 1e-4 --rounds 3 --steps 1

Weights cross the bus twice a step, once for forward and once for backward, and gradients once. The more
tokens are in a step, the more arithmetic there is to hide that under; the device's memory limits them.

*plain* trains a GPT of 25 million parameters in fp32 with 16k, 2k and 256 tokens a step, streamed and as
plain PyTorch does with its layers checkpointed and its AdamW fused: what streaming costs where nothing is
gained, copies, threads and Python.

*bus* measures each of `variants` alone, and what saves memory together, for several batches. On
the CPU the copies of the thread backend are slowed to a set bandwidth, and *as fast as memory* is the same
without that: the ceiling. Gradient accumulation, whose weights cross the bus twice for each part of a batch,
is the usual way to a large batch in little memory; micro-batches inside of the layers are ours.

Both take blocks of steps in turn, in an order drawn anew in each round, with the timer, the batches and the
verdict on losses of `bench.versus`, which says how bytes are counted.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import streamer
from bench.common import RESULTS, load_average, provenance, write_json
from bench.markdown import Report, spread, table
from bench.no_values import add_option, go_on_without_values
from bench.slow import SlowBus
from bench.versus import Builders, measure, row, start_cuda
from bench.versus_contenders import PLAIN_BF16, PLAIN_FP32, Contender, Plain, Streamer, Task
from streamer.backends.base import Backend
from streamer.backends.thread import ThreadBackend
from streamer.engine.handle import wrapped

#: The variant that nothing is done for.
BASELINE = "whole batch"


@dataclass(frozen=True)
class Variant:
    """How a model is streamed and its loop written; as it stands, two slots and the whole batch at once.

    ``micro_batches``: slices of the batch that each layer takes one after another (``micro_batch_size``).
    ``parts``: parts of the batch that the loop calls backward for, one after another.
    ``kept``: the share of layers, the last ones, with ``activations="keep"``; others have ``activations``.
    ``chunked``: the loss by `streamer.chunked_cross_entropy`.
    """

    num_slots: int = 2
    micro_batches: int = 1
    parts: int = 1
    activations: str = "recompute"
    kept: float = 0.0
    chunked: bool = False

    def options(self, *, batch_size: int, n_layer: int) -> dict[str, Any]:
        """The arguments of `streamer.wrap` that are not its own choice."""
        options: dict[str, Any] = {"num_slots": self.num_slots}
        if self.micro_batches > 1:
            options["micro_batch_size"] = -(-batch_size // self.micro_batches)
        num_kept = round(self.kept * n_layer)
        policies = [self.activations] * (n_layer - num_kept) + ["keep"] * num_kept
        if set(policies) != {"recompute"}:
            options["activations"] = policies
        return options

    def split(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parts of a batch."""
        return tokens.split(-(-len(tokens) // self.parts))


def variants(*, slots: int, parts: int) -> dict[str, Variant]:
    """By name: one thing changed at a time, then all that saves device memory. ``slots`` is what more slots
    are, ``parts`` what a batch is cut into."""
    return {
        BASELINE: Variant(),
        f"{slots} slots": Variant(num_slots=slots),
        "accumulation": Variant(parts=parts),
        "micro-batches": Variant(micro_batches=parts),
        "offload": Variant(activations="recompute+offload"),
        "keep half": Variant(kept=0.5),
        "chunked loss": Variant(chunked=True),
        "all that saves": Variant(micro_batches=parts, activations="recompute+offload", chunked=True),
    }


class Streamed(Streamer):
    """This library in the manner of ``variant``, on ``backend`` or that of the task's device."""

    def __init__(self, task: Task, variant: Variant, *, backend: Backend | None = None) -> None:
        options = variant.options(batch_size=task.batch_size, n_layer=task.sizes["n_layer"])
        super().__init__(task, backend=backend, **options)
        self.variant = variant
        if variant.chunked:
            give_hidden(self.model)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.variant.chunked:
            return chunked_loss(self.model, tokens[:, :-1], tokens[:, 1:])
        return super().loss(tokens)

    def step(self, tokens: torch.Tensor) -> None:
        for part in self.variant.split(tokens):
            (self.loss(part) * (len(part) / len(tokens))).backward()
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        super().close()
        wrapped(self.model).close()


def give_hidden(model: nn.Module) -> None:
    """Let the model return the input of its head: the loss has the head's weight."""
    model.lm_head.forward = lambda hidden: hidden


def chunked_loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The cross entropy of a model of `give_hidden`."""
    loss: torch.Tensor = streamer.chunked_cross_entropy(model(tokens), model.lm_head.weight, targets)
    return loss


def plain_bytes(*, parameters: int, tokens: int, n_layer: int, n_embd: int) -> Mapping[str, int]:
    """Bytes of plain PyTorch in fp32 with checkpointed layers: weights, gradients and AdamW's moments at
    rest, the inputs of the layers between forward and backward."""
    return {"at_rest": 16 * parameters, "saved_inputs": 4 * n_layer * tokens * n_embd}


STREAMED = "streamed"


#: By tokens a step: rounds, the timed steps of a block, and those before them; the share of the time.
#: A step of 16k tokens takes so long that one before it would take all the time there is.
PLANS = {16384: (5, 1, 0, 0.6), 2048: (10, 1, 1, 0.2), 256: (30, 3, 1, 0.2)}


def add_plain_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, nargs="+", choices=PLANS, default=list(PLANS), help="(all)")
    parser.add_argument("--n-layer", type=int, default=8)
    parser.add_argument("--n-head", type=int, default=8)
    parser.add_argument("--n-embd", type=int, default=512)
    parser.add_argument("--vocab-size", type=int, default=256)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--rounds", type=int, help="two or more (30, 10 and 5)")
    parser.add_argument("--seconds", type=float, default=500.0, help="after which no rounds begin (500)")


def run_plain(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A group of two rows for each number of tokens; yields the groups so far after each of them."""
    groups = []
    sizes = {name: getattr(options, name) for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
    for tokens in options.tokens:
        rounds, steps, untimed, share = PLANS[tokens]
        with contextlib.ExitStack() as exits:
            task = Task(
                torch.device("cpu"),
                torch.float32,
                sizes | {"block_size": options.context},
                batch_size=max(1, tokens // options.context),
                lr=options.lr,
                exits=exits,
            )
            results, left_out = measure(
                {PLAIN_FP32: partial(Plain, task, exact=True), STREAMED: partial(Streamed, task, Variant())},
                task,
                rounds=options.rounds or rounds,
                steps=steps,
                untimed=untimed,
                seconds=share * options.seconds,
            )
        if left_out:
            raise SystemExit(f"left out: {left_out}")
        rows = {
            name: row(result, results, dtype="float32", tokens_per_step=task.tokens_per_step)
            for name, result in results.items()
        }
        groups.append(
            {
                "tokens_per_step": task.tokens_per_step,
                "plain_bytes": plain_bytes(
                    parameters=task.num_parameters,
                    tokens=task.tokens_per_step,
                    n_layer=options.n_layer,
                    n_embd=options.n_embd,
                ),
                "contenders": rows,
            }
        )
        yield {"parameters": task.num_parameters, "groups": groups}


#: The whole batch on a bus as fast as memory: what arithmetic and the host leave.
CEILING = "as fast as memory"


def add_bus_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="(bfloat16 on CUDA, else float32)")
    parser.add_argument(
        "--gb-per-second", type=float, nargs="+", default=[0.2, 1.0], help="of the bus of the CPU (0.2 1)"
    )
    parser.add_argument("--n-layer", type=int, default=6)
    parser.add_argument("--n-head", type=int, default=6)
    parser.add_argument("--n-embd", type=int, default=384)
    parser.add_argument("--vocab-size", type=int, default=256)
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[4, 16, 64], help="(4 16 64)")
    parser.add_argument("--parts", type=int, default=4, help="that a batch is cut into (4)")
    parser.add_argument("--slots", type=int, default=4, help="where there are more than two (4)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these variants (all)")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--rounds", type=int, default=5, help="two or more (5)")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a block (2)")
    parser.add_argument("--seconds", type=float, default=420.0, help="all groups together, about (420)")


def bus(gb_per_second: float | None) -> ThreadBackend:
    """A backend of threads with copies at this rate each way; None copies at the speed of memory."""
    if gb_per_second is None:
        return ThreadBackend()
    return SlowBus(gb_per_second * 1e9)


def builders(task: Task, options: argparse.Namespace, gb_per_second: float | None) -> Builders:
    """The plain ones, the ceiling where the bus is slowed, and the variants."""
    found: dict[str, Callable[[], Contender]] = {PLAIN_FP32: partial(Plain, task, exact=True)}
    if not task.is_fp32:
        found[PLAIN_BF16] = partial(Plain, task, exact=False)
    if gb_per_second is not None:
        found[CEILING] = lambda: Streamed(task, Variant(), backend=bus(None))

    def build(variant: Variant) -> Contender:
        return Streamed(task, variant, backend=None if gb_per_second is None else bus(gb_per_second))

    known = variants(slots=options.slots, parts=options.parts)
    if unknown := set(options.only or known) - set(known):
        raise SystemExit(f"there is no {', '.join(sorted(unknown))} here: choose among {', '.join(known)}")
    return found | {name: partial(build, known[name]) for name in options.only or known}


def run_bus(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A group of rows for each bandwidth and batch; yields the groups so far after each of them."""
    device = torch.device(options.device)
    rates: list[float | None] = [None] if device.type == "cuda" else options.gb_per_second
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        start_cuda(device)
    dtype = options.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    sizes = {name: getattr(options, name) for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
    groups = []
    for rate in rates:
        for batch_size in options.batch_sizes:
            with contextlib.ExitStack() as exits:
                task = Task(
                    device,
                    getattr(torch, dtype),
                    sizes | {"block_size": options.context},
                    batch_size=batch_size,
                    lr=options.lr,
                    exits=exits,
                )
                results, left_out = measure(
                    builders(task, options, rate),
                    task,
                    rounds=options.rounds,
                    steps=options.steps,
                    seconds=options.seconds * batch_size / sum(options.batch_sizes) / len(rates),
                )
            rows: Mapping[str, dict[str, Any]] = {
                name: row(result, results, dtype=dtype, tokens_per_step=task.tokens_per_step)
                for name, result in results.items()
            } | {name: {"skipped": reason} for name, reason in left_out.items()}
            of_bus = "" if rate is None else f", bus of {rate} GB/s each way"
            print(f"{task.tokens_per_step:,} tokens a step{of_bus}")
            groups.append(
                {
                    "gb_per_second": rate,
                    "tokens_per_step": task.tokens_per_step,
                    "contenders": rows,
                }
            )
            yield {"parameters": task.num_parameters, "groups": groups}


MIB = 1 << 20


#: How lines are drawn that nothing should be above, and the others.
LIMITS = {PLAIN_FP32: ":", PLAIN_BF16: "-.", "as fast as memory": "--"}
MARKED = {"marker": "o", "markersize": 3}


def report_table(report: Report) -> list[str]:
    """The section of one part."""
    return {"plain": _plain_table, "bus": _bus_table}[report["part"]](report)


def _plain_table(report: Report) -> list[str]:
    heads = ["tokens a step", "streamed, of plain's tokens/s", "device MiB, plain", "streamed"]
    rows = []
    for group in report["groups"]:
        row = group["contenders"]["streamed"]
        held = group["plain_bytes"]
        own = row["device_bytes"]
        rows.append(
            [
                f"{group['tokens_per_step']:,}",
                spread(row["times_tokens_per_second_of"][PLAIN_FP32], ".3f"),
                f"{held['at_rest'] / MIB:.0f} + {held['saved_inputs'] / MIB:.0f}",
                f"{own['at_rest'] / MIB:.0f} + {own['step'] / MIB:.0f}",
            ]
        )
    return [
        f"{report['parameters']:,} parameters in fp32; at rest + saved inputs of layers.",
        "",
        *table(heads, rows),
    ]


def _bus_table(report: Report) -> list[str]:
    """Tokens per second (and MiB on the device) by variant and batch, a table for each bandwidth."""
    lines = [f"{report['parameters']:,} parameters; tokens/s (peak device MiB) by tokens a step."]
    for rate, groups in _by_rate(report).items():
        names = list(dict.fromkeys(name for group in groups for name in group["contenders"]))
        rows = [[name, *(_cell(group["contenders"].get(name)) for group in groups)] for name in names]
        heads = [
            "" if rate is None else f"{rate} GB/s each way",
            *(f"{group['tokens_per_step']:,}" for group in groups),
        ]
        lines += ["", *table(heads, rows)]
    return lines


def _by_rate(report: Report) -> dict[float | None, list[Mapping[str, Any]]]:
    found: dict[float | None, list[Mapping[str, Any]]] = {}
    for group in report["groups"]:
        found.setdefault(group["gb_per_second"], []).append(group)
    return found


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None or "skipped" in row:
        return "" if row is None else f"left out: {row['skipped']}"
    device = row["device_bytes"]
    held = "" if device is None else f" ({device['peak'] / MIB:,.1f})"
    refused = f", REFUSED: {row['refused']}" if row["refused"] else ""
    return f"{row['tokens_per_second']['median']:,.0f}{held}{refused}"


def readme_figure(report: Report) -> str:
    """The sentence in the project's README."""
    shares = [
        f"{group['contenders']['streamed']['times_tokens_per_second_of'][PLAIN_FP32]['median']:.0%} at "
        f"{group['tokens_per_step']:,}"
        for group in report["groups"]
    ]
    return (
        f"Streamed training of {report['parameters'] / 1e6:.0f} million parameters on "
        f"{report['hardware']['cores']} cores, as a share of the tokens per second of plain PyTorch in fp32: "
        f"{', '.join(shares)} tokens a step."
    )


def draw(report: Report, picture: Path) -> None:
    """Tokens/s against batch, if matplotlib is there; a panel for each bandwidth."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        print(f"not drawn: {error}; matplotlib comes with the extra [plot]")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = curves(report)
    figure, all_axes = plt.subplots(
        1, len(panels), figsize=(4.0 * len(panels) + 2.0, 4.2), layout="constrained", squeeze=False
    )
    for axes, (title, lines) in zip(all_axes[0], panels.items(), strict=True):
        for place, (name, points) in enumerate(lines.items()):
            style = {"color": "black", "linestyle": LIMITS[name]} if name in LIMITS else MARKED
            # lines on top of one another stay visible
            width = 1.0 if name in LIMITS else 1.0 + 0.9 * (len(lines) - place)
            axes.plot(*zip(*points, strict=True), label=name, linewidth=width, **style)
        axes.set_xscale("log", base=2)
        axes.set(title=title, xlabel="tokens a step", ylim=(0, None))
    all_axes[0][0].set_ylabel("tokens per second")
    figure.legend(*all_axes[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=90)
    plt.close(figure)
    print(f"written: {picture}")


def curves(report: Report) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """By panel and by name, tokens a step and tokens per second, by ascending batches."""
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for group in report["groups"]:
        rate = group.get("gb_per_second")
        title = "" if rate is None else f"{rate} GB/s each way"
        for name, found_row in group["contenders"].items():
            if "skipped" not in found_row:
                point = group["tokens_per_step"], found_row["tokens_per_second"]["median"]
                found.setdefault(title, {}).setdefault(name, []).append(point)
    return {title: {name: sorted(line) for name, line in lines.items()} for title, lines in found.items()}


PARTS = {"plain": (add_plain_options, run_plain), "bus": (add_bus_options, run_bus)}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parts = parser.add_subparsers(dest="part", required=True)
    for name, (add_options, _) in PARTS.items():
        part = parts.add_parser(name)
        add_options(part)
        part.add_argument("--json", type=Path, default=RESULTS / f"tokens_{name}.json")
        part.add_argument("--png", type=Path, help="(that of the JSON)")
        add_option(part)
    options = parser.parse_args(arguments)
    if getattr(options, "rounds", None) is not None and options.rounds < 2:
        parser.error("quartiles need two --rounds")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.no_values:
        go_on_without_values()
    load_before = load_average()
    settings = {
        name: value.name if isinstance(value, Path) else value
        for name, value in vars(options).items()
        if name not in ("json", "png", "part")
    }
    report: dict[str, Any] = {}
    for found in PARTS[options.part][1](options):
        report = {
            **provenance(
                "bench/tokens_per_transfer.py",
                load_before=load_before,
                device=getattr(options, "device", "cpu"),
            ),
            "part": options.part,
            "settings": settings,
            **found,
        }
        # each time, for what comes may not end well
        write_json(options.json, report)
    print("\n".join(report_table(report)))
    draw(report, options.png or options.json.with_suffix(".png"))


if __name__ == "__main__":
    sys.exit(main())
