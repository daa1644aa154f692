"""Does streamer train what plain PyTorch trains? Unmodified architectures of the transformers library, tiny
and with random weights, five steps each with clipping, both activation policies.

    python -m bench.architectures [--only NAME ...] [--json bench/results/architectures.json]
    python -m bench.architectures --device cuda [--part 0/4] [--json bench/results/gpu/architectures.json]

Both sides start from the same weights, data and random numbers, in fp32, dropout on. The script compares the
first loss and the first gradients (difference over the largest gradient of the model: 0 is to the bit), all
losses, norms and final weights, and the keys of ``state_dict``. AdamW has eps 1e-5 on both sides, so that
gradients that are nothing but rounding (a bias before a softmax) do not move their weights by a whole step.
The plain models run without their key/value cache, as streamed layers do in training. On a GPU both sides
take PyTorch's deterministic algorithms. ``--part 0/4`` runs every fourth architecture, for a separate table.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils._pytree import tree_map_only

import streamer
from bench.architectures_models import (
    DECODERS,
    ENCODERS,
    MIXTURES,
    OTHERS,
    RECURRENT,
    TWO_LISTS,
    VISION,
    Architecture,
    LossOf,
)
from bench.common import load_average, provenance, write_json
from bench.markdown import Report, table
from streamer.engine.handle import wrapped


def report_table(report: Report) -> list[str]:
    """A row for each architecture: the difference of streamed training from plain PyTorch's, under either
    policy."""
    heads = [
        "architecture",
        "kind",
        "layers streamed",
        "first loss and gradients",
        f"losses of {report['steps']} steps",
        "norms",
        "final weights",
    ]
    rows = []
    for name, row in report["rows"].items():
        policies = [row["recompute"], row["keep"]]
        worst = {key: max(policy[key] for policy in policies) for key in ("losses", "norms", "weights")}
        rows.append(
            [
                f"{name} ({row['what']})" if row["what"] else name,
                row["kind"],
                str(policies[0]["layers"]),
                _first_step([policy["first_loss_equal"] for policy in policies], policies, row["order"]),
                *(f"{value:.0e}" for value in worst.values()),
            ]
        )
    equal = sum(map(_is_equal, report["rows"].values()))
    about = (
        f"{equal} of {len(rows)} architectures have the first loss and all first gradients to the bit "
        "(fp32, dropout on, both activation policies). Differences: of gradients, over the model's largest; "
        "of losses and norms, relative; of weights, absolute. `state_dict` has the same keys in order."
    )
    return [about, "", *table(heads, rows)]


def readme_figure(report: Report) -> str:
    """A sentence."""
    rows = report["rows"].values()
    equal = sum(map(_is_equal, rows))
    most = max(row[policy]["gradients"] for row in rows for policy in ("recompute", "keep"))
    return (
        f"Hugging Face models work unmodified. For {equal} of {len(rows)} architectures the first loss and "
        "all first gradients equal plain PyTorch's to the bit. The others differ by at most "
        f"{most:.0e}: sums are added up in another order "
        "([table](bench/results/README.md#architecturesjson))."
    )


def _is_equal(row: Report) -> bool:
    policies = [row["recompute"], row["keep"]]
    return all(policy["first_loss_equal"] and not policy["gradients"] for policy in policies)


def _first_step(losses: list[bool], policies: list[Report], order: str) -> str:
    gradients = max(policy["gradients"] for policy in policies)
    if all(losses) and not gradients:
        return "equal"
    loss = "loss equal" if all(losses) else "loss differs"
    return f"{loss}, gradients {gradients:.0e}" + (f" (sums in another order: {order})" if order else "")


KINDS = {
    "decoder": DECODERS,
    "mixture of experts": MIXTURES,
    "recurrence": RECURRENT,
    "encoder": ENCODERS,
    "encoder and decoder": TWO_LISTS,
    "vision": VISION,
    "other": OTHERS,
}
ALL = {architecture.name: architecture for kind in KINDS.values() for architecture in kind}
POLICIES = ("recompute", "keep")
STEPS = 5


@dataclass
class Run:
    """The results of five steps."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Parity:
    """The difference of a streamed run from the plain one: ``gradients`` is the largest difference in the
    first step over the largest gradient of the model, ``losses`` and ``norms`` the largest relative ones,
    ``weights`` the largest in the end."""

    layers: int
    first_loss_equal: bool
    keys_equal: bool
    gradients: float
    losses: float
    norms: float
    weights: float


def plain_run(architecture: Architecture, device: str = "cpu") -> Run:
    """Trained by PyTorch alone."""
    model = architecture.build().to(device)
    model.register_forward_pre_hook(partial(_inputs_on, device), with_kwargs=True)
    model.config.use_cache = False  # type: ignore[union-attr, assignment]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5, weight_decay=0.1)
    clip = lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # noqa: E731
    return _train(model, architecture.loss, optimizer, clip)


def _inputs_on(device: str, model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    moved: tuple[Any, Any] = tree_map_only(torch.Tensor, lambda value: value.to(device), (args, kwargs))
    return moved


def streamed_run(architecture: Architecture, activations: str, device: str) -> tuple[Run, int]:
    """Trained by streamer, and the number of layers that were streamed."""
    model = architecture.build()
    streamer.wrap(model, layers=architecture.layers, device=device, activations=activations)
    layers = len(wrapped(model).executor.units)
    optimizer = streamer.AdamW(model.parameters(), lr=1e-3, eps=1e-5, weight_decay=0.1)
    run = _train(model, architecture.loss, optimizer, lambda: streamer.clip_grad_norm_(model, 1.0))
    streamer.unwrap(model)
    return run, layers


def _train(
    model: nn.Module, loss_of: LossOf, optimizer: torch.optim.Optimizer, clip: Callable[[], torch.Tensor]
) -> Run:
    run = Run()
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = loss_of(model, step)
        loss.backward()
        if not step:
            named = model.named_parameters()
            run.gradients = {name: p.grad.clone().cpu() for name, p in named if p.grad is not None}
        run.losses.append(loss.item())
        run.norms.append(clip().item())
        optimizer.step()
        optimizer.zero_grad()
    run.weights = {name: value.clone().cpu() for name, value in model.state_dict().items()}
    return run


def compare(architecture: Architecture, activations: str, plain: Run, device: str = "cpu") -> Parity:
    """Train ``architecture`` streamed, and compare it with ``plain``."""
    actual, layers = streamed_run(architecture, activations, device)
    largest = max(float(gradient.abs().max()) for gradient in plain.gradients.values())
    same = list(actual.gradients) == list(plain.gradients) and list(actual.weights) == list(plain.weights)
    return Parity(
        layers=layers,
        first_loss_equal=actual.losses[0] == plain.losses[0],
        keys_equal=same,
        gradients=_difference(actual.gradients, plain.gradients) / largest if same else float("inf"),
        losses=_relative(actual.losses, plain.losses),
        norms=_relative(actual.norms, plain.norms),
        weights=_difference(actual.weights, plain.weights) if same else float("inf"),
    )


def _difference(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    pairs = ((actual[name].double(), value.double()) for name, value in expected.items() if value.numel())
    return max(float((mine - theirs).abs().max()) for mine, theirs in pairs)


def _relative(actual: Iterable[float], expected: Iterable[float]) -> float:
    return max(abs(mine - theirs) / abs(theirs) for mine, theirs in zip(actual, expected, strict=True))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.architectures", description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=ALL, metavar="NAME", default=list(ALL))
    parser.add_argument("--part", type=_part, default=(0, 1), metavar="N/OF", help="every OFth, from N on")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="write the table there")
    options = parser.parse_args(arguments)
    if options.device == "cuda":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True, warn_only=True)
    first, every = options.part
    chosen = {name for name in list(ALL)[first::every] if name in options.only}
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")  # the library's own, on tiny configs
    load_before = load_average()
    rows: dict[str, Any] = {}
    for kind, architectures in KINDS.items():
        for architecture in architectures:
            if architecture.name not in chosen:
                continue
            plain = plain_run(architecture, options.device)
            found = {policy: compare(architecture, policy, plain, options.device) for policy in POLICIES}
            for policy, row in found.items():
                print(f"{architecture.name:22} {policy:10} {row}", flush=True)
            rows[architecture.name] = {
                "kind": kind,
                "class": architecture.model,
                "what": architecture.what,
                "order": architecture.order,
                **{policy: asdict(row) for policy, row in found.items()},
            }
    if options.json:
        report = provenance("bench/architectures.py", load_before=load_before, device=options.device)
        report["versions"]["transformers"] = transformers.__version__
        write_json(options.json, {**report, "steps": STEPS, "rows": rows})
    return 0


def _part(text: str) -> tuple[int, int]:
    number, of = text.split("/")
    return int(number), int(of)


if __name__ == "__main__":
    sys.exit(main())
