"""What `bench.tokens_per_transfer` has found: tables in Markdown and pictures of tokens/s against batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.markdown import Report, spread, table
from bench.tokens_variants import BASELINE
from bench.versus_contenders import PLAIN_BF16, PLAIN_FP32

MIB, GIB = 1 << 20, 1 << 30

#: The panel of the bytes that a machine's device would have to have.
DEVICE = "device memory (GiB)"

#: How lines are drawn that nothing should be above, and the others.
LIMITS = {PLAIN_FP32: ":", PLAIN_BF16: "-.", "as fast as memory": "--", "ceiling": "--"}
MARKED = {"marker": "o", "markersize": 3}


def tokens_table(report: Report) -> list[str]:
    """The section of one part."""
    return {"plain": plain, "bus": bus, "machines": machines}[report["part"]](report)


def plain(report: Report) -> list[str]:
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


def bus(report: Report) -> list[str]:
    """Tokens per second (and MiB on the device) by variant and batch, a table for each bandwidth."""
    lines = [f"{report['parameters']:,} parameters; tokens/s (peak device MiB) by tokens a step."]
    for rate, groups in by_rate(report).items():
        names = list(dict.fromkeys(name for group in groups for name in group["contenders"]))
        rows = [[name, *(_cell(group["contenders"].get(name)) for group in groups)] for name in names]
        heads = [
            "" if rate is None else f"{rate} GB/s each way",
            *(f"{group['tokens_per_step']:,}" for group in groups),
        ]
        lines += ["", *table(heads, rows)]
    return lines


def by_rate(report: Report) -> dict[float | None, list[Mapping[str, Any]]]:
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


def machines(report: Report) -> list[str]:
    """Tokens per second and the share of the ceiling by variant and batch, for each machine."""
    names = list(report["machines"])
    heads = ["tokens a step", "", "device GiB", "host GiB", *names]
    rows = [
        [
            f"{row['tokens_per_step']:,}",
            row["variant"],
            *(f"{sum(row[where].values()) / GIB:.1f}" for where in ("device_bytes", "host_bytes")),
            *(_on(row["on"][name]) for name in names),
        ]
        for row in report["rows"]
    ]
    best = best_that_fits(report, names[0])
    first = (
        f"{report['config']}: tokens/s (share of the ceiling by its FLOPs), in italics where it does not fit."
    )
    if best is not None:
        on = best["on"][names[0]]
        first += (
            f" Most that fits on the {names[0]}: {best['variant']}, {best['tokens_per_step']:,} tokens, "
            f"{on['tokens_per_second']:,.0f} tokens/s, {on['of_ceiling']:.1%}."
        )
    return [first, "", *table(heads, rows)]


def best_that_fits(report: Report, machine: str) -> Mapping[str, Any] | None:
    """The row with the most tokens per second on ``machine`` of those that fit there."""
    fitting: Iterable[Mapping[str, Any]] = (row for row in report["rows"] if row["on"][machine]["fits"])
    return max(fitting, key=lambda row: row["on"][machine]["tokens_per_second"], default=None)


def _on(on: Mapping[str, Any]) -> str:
    text = f"{on['tokens_per_second']:,.0f} ({on['of_ceiling']:.0%})"
    return text if on["fits"] else f"*{text}*"


def tokens_figure(reports: Mapping[str, Report]) -> str:
    """What the project's README says."""
    lines = []
    if (report := reports.get("tokens_plain.json")) is not None:
        shares = [
            f"{group['contenders']['streamed']['times_tokens_per_second_of'][PLAIN_FP32]['median']:.3f} at "
            f"{group['tokens_per_step']:,}"
            for group in report["groups"]
        ]
        lines.append(
            f"Streamed training of {report['parameters'] / 1e6:.0f} million parameters on "
            f"{report['hardware']['cores']} cores runs at these shares of plain PyTorch's tokens per second: "
            f"{', '.join(shares)} tokens a step."
        )
    if (report := reports.get("tokens_machines.json")) is not None:
        for name in report["machines"]:
            best = best_that_fits(report, name)
            if best is not None:
                on = best["on"][name]
                held = sum(best["device_bytes"].values()) / GIB
                lines.append(
                    f"{name}: {on['of_ceiling']:.1%} of the ceiling that its FLOPs set with "
                    f"{best['tokens_per_step']:,} tokens a step ({best['variant']}, {held:.1f} GiB of the "
                    "device)."
                )
    return " ".join(lines) if lines else "Not yet measured."


def draw(report: Report, picture: Path) -> None:
    """Tokens/s against batch, if matplotlib is there; a panel for each bandwidth or machine, and for machines
    one more with the bytes of the device."""
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
            # lines that lie on one another are all seen
            width = 1.0 if name in LIMITS else 1.0 + 0.9 * (len(lines) - place)
            axes.plot(*zip(*points, strict=True), label=name, linewidth=width, **style)
        axes.set_xscale("log", base=2)
        axes.set(title=title, xlabel="tokens a step", ylim=(0, None))
    if DEVICE in panels:
        _draw_sizes(all_axes[0][-1], report)
    all_axes[0][0].set_ylabel("tokens per second")
    figure.legend(*all_axes[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=90)
    plt.close(figure)
    print(f"written: {picture}")


def _draw_sizes(axes: Any, report: Report) -> None:
    """The machines' device memory, as lines."""
    sizes = sorted({machine["device_bytes"] / GIB for machine in report["machines"].values()})
    for size in sizes:
        axes.axhline(size, color="black", linestyle="--", linewidth=1.0)
        axes.annotate(f"{size:.0f} GiB", (axes.get_xlim()[0], size), fontsize=8, va="bottom")
    axes.set_ylim(0, 1.5 * sizes[-1])


Curves = dict[str, dict[str, list[tuple[int, float]]]]


def curves(report: Report) -> Curves:
    """By panel and by name, tokens a step and tokens per second, or GiB of the device."""
    found: Curves = {}

    def add(panel: str, name: str, tokens: int, rate: float) -> None:
        found.setdefault(panel, {}).setdefault(name, []).append((tokens, rate))

    if report["part"] == "machines":
        for row in report["rows"]:
            for machine, on in row["on"].items():
                if row["variant"] == BASELINE:
                    add(machine, "ceiling", row["tokens_per_step"], on["ceiling"])
                if on["fits"]:
                    add(machine, row["variant"], row["tokens_per_step"], on["tokens_per_second"])
        for row in report["rows"]:
            add(DEVICE, row["variant"], row["tokens_per_step"], sum(row["device_bytes"].values()) / GIB)
        return found
    for group in report["groups"]:
        rate = group.get("gb_per_second")
        title = "" if rate is None else f"{rate} GB/s each way"
        for name, row in group["contenders"].items():
            if "skipped" not in row:
                add(title, name, group["tokens_per_step"], row["tokens_per_second"]["median"])
    # ascending batches, in whatever order they were measured
    return {title: {name: sorted(line) for name, line in lines.items()} for title, lines in found.items()}
