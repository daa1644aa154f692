"""The tables of `bench.report`, in Markdown, one for each script that writes JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bench.architectures_report import architectures_table
from bench.data import data_table
from bench.disk_table import disk_table, step_table
from bench.markdown import Report, number, share, spread, table
from bench.model_sizes_table import sizes_table
from bench.plan_table import plan_table
from bench.plans_table import plans_table
from bench.quantized import quantized_table
from bench.residency_table import residency_table
from bench.tokens_report import tokens_table

GIB = 1 << 30

#: The layouts of `bench.adam` as the README calls them: dtype of the model, of the moments.
LAYOUTS = {
    "fp32": "fp32, fp32",
    "fp16": "fp16, fp32",
    "split": "bf16, fp32",
    "split + bf16": "bf16, bf16",
    "split + int8": "bf16, 8 bits",
}


def median(values: Mapping[str, float] | None) -> str:
    return "" if values is None else f"{values['median']:.2f}"


def config_of(report: Report) -> str:
    """The config that was run, and what was changed of it."""
    file, changed = report["config"]["file"], report["config"]["set"]
    return f"{file} ({', '.join(changed)})" if changed else str(file)


def adam_table(report: Report) -> list[str]:
    """The update against others, medians only."""
    heads = [
        "model, moments",
        "ns per parameter",
        "against `torch.optim.AdamW(fused=True)` in fp32",
        "against widening a bf16 gradient, that step, narrowing the weight",
        "the same around DeepSpeed's CPU Adam",
    ]
    than = ("torch fused fp32", "torch widen, fused, narrow", "widen, DeepSpeed, narrow")
    rows = []
    for name in ("fp32", "split", "split + bf16", "split + int8"):
        row = report["contenders"][name]
        faster = row["times_faster_than"]
        rows.append([LAYOUTS[name], median(row["ns_per_parameter"]), *(median(faster.get(o)) for o in than)])
    return table(heads, rows)


def adam(report: Report) -> list[str]:
    rows = [
        [
            LAYOUTS.get(name, name),
            spread(row["ns_per_parameter"]),
            "; ".join(f"{spread(times)} x {other}" for other, times in row["times_faster_than"].items()),
        ]
        for name, row in report["contenders"].items()
        if "times_faster_than" in row
    ]
    about = f"{report['parameters']:,} parameters, {report['threads']['numba']} threads; above 1 is faster."
    return [about, "", *table(["", "ns per parameter", "speed, in multiples of that of"], rows)]


def hidden_update(report: Report) -> list[str]:
    rows = [
        [
            mode,
            spread(row["seconds_per_step"], ".1f", 1e3),
            spread(row["host_busy_seconds"], ".1f", 1e3),
            spread(row["exposed_seconds"]["host"], ".1f", 1e3),
        ]
        for mode, row in report["modes"].items()
    ]
    return [
        f"{report['parameters']:,} parameters; {report['hidden']:.0%} of what waiting costs was saved "
        f"(round by round {spread(report['hidden_by_rounds'], '.0%')}).",
        "",
        *table(["updates", "step, ms", "update busy, ms", "compute waits for it, ms"], rows),
    ]


def moments(report: Report) -> list[str]:
    rows = [
        [name, f"{row['mean']:.4f}", f"{row['std']:.4f}", f"{row['over_spread']:.2f}"]
        for name, row in report["variants"].items()
    ]
    heads = ["moments", "mean final loss", "standard deviation", "difference over the spread of fp32's seeds"]
    return [f"{report['steps']} steps.", "", *table(heads, rows)]


def overlap(report: Report) -> list[str]:
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
        f"{spread(totals['step_seconds'], '.1f', 1e3)} ms a step, of which compute "
        f"waits for copies {totals['exposed_transfer_of_step']:.1%}; a layer's copies run at "
        f"{', '.join(copies)} of a raw copy's rate.",
        "",
        *table(["lane", "busy, ms", "exposed, ms", "overlap"], rows),
    ]


def depth(report: Report) -> list[str]:
    line = report["step_seconds_over_layers"]
    rows = [
        [
            str(row["n_layer"]),
            spread(row["seconds_per_step"], ".1f", 1e3),
            f"{row['owned_bytes_total'] / 1e6:.2f}",
            f"{row['peak_bytes'] / 1e6:.2f}",
        ]
        for row in report["depths"]
    ]
    equal = "the same at every depth" if report["owned_bytes_are_equal"] else "NOT the same at every depth"
    return [
        f"{line['intercept'] * 1e3:.1f} ms and {line['slope'] * 1e3:.2f} ms per layer, R² "
        f"{number(line['r_squared'], '.4f')}; owned device bytes are {equal}.",
        "",
        *table(["layers", "step, ms", "owned, MB", "peak with saved inputs, MB"], rows),
    ]


def versus(report: Report) -> list[str]:
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


def fits(report: Report) -> list[str]:
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
        f"{report['build_seconds']:.0f} s; at most {device / GIB:.2f} GiB of the device and "
        f"{found['host_bytes_peak'] / GIB:.1f} GiB of host memory; validation loss {number(first, '.3f')} to "
        f"{number(last, '.3f')} "
        f"in {len(found['losses'])} steps."
        + "".join(f" FAILED: {failure}." for failure in report["failures"]),
        "",
        *table(heads, rows),
    ]


def checkpoint(report: Report) -> list[str]:
    rows = [[name, spread(row)] for name, row in report["gb_per_second"].items()]
    return [
        f"{report['bytes']:,} bytes; written at {spread(report['save_of_raw'])} of the rate of a raw write.",
        "",
        *table(["", "GB/s"], rows),
    ]


def soak(report: Report) -> list[str]:
    by_signal = report["kills_by_signal"].items()
    kills = ", ".join(f"{count} by {name}" for name, count in by_signal)
    return [
        f"{report['minutes']:.0f} minutes: {report['kills']} kills ({kills}), {report['resumes']} resumes "
        f"from a checkpoint, {report['lives_that_ended_equal']} lives of {report['steps_per_life']} steps "
        "ended equal to the undisturbed one, to the bit."
    ]


def gpu_figures(reports: Mapping[str, Report]) -> list[str]:
    """What the README says of a GPU: of `bench.fits` and `bench.versus`, or that there is nothing yet."""
    shown = {name: r for name, r in reports.items() if r["script"] in ("bench/fits.py", "bench/versus.py")}
    if not shown:
        return ["No GPU's figures are here yet: `bash bench/gpu.sh` measures them."]
    lines: list[str] = []
    for name, report in shown.items():
        gpu = report["hardware"].get("gpu", "no GPU")
        link = f"[figures](bench/results/{name})"
        lines += ["", f"{gpu}, `{report['script']}` ({link}):", "", *TABLES[report["script"]](report)]
    return lines[1:]


def two_checkouts(report: Report) -> list[str]:
    rows = [
        [
            name,
            spread(row["seconds_per_step"]["now"], ".1f", 1e3),
            spread(row["seconds_per_step"]["before"], ".1f", 1e3),
            spread(row["ratio"], ".3f"),
            " and ".join(f"{row['hidden'][side]['median']:.2f}" for side in ("now", "before")),
        ]
        for name, row in report["tasks"].items()
    ]
    commits = report["commits"]
    return [
        f"Commit {commits['now']} beside {commits['before']}, one thread each; below 1 is faster now.",
        "",
        *table(["", "step now, ms", "before, ms", "ratio", "update hidden now and before"], rows),
    ]


def beside_others(report: Report) -> list[str]:
    names = {"this": "streamed", "against": "streamed, before the kernels' threads slept"}
    kinds = list(report["checkouts"]["this"])
    rows = [
        [names.get(name, name), *(spread(row[kind]["milliseconds_per_step"], ".1f") for kind in kinds)]
        for name, row in report["checkouts"].items()
    ]
    return ["Milliseconds per step of a tiny Llama.", "", *table(["", *kinds], rows)]


def host_cost(report: Report) -> list[str]:
    rows = [
        [
            {"passes": "forward and backward", "step": "with the update"}[name],
            {"wall": "wall clock", "cpu": "CPU of all threads"}[clock],
            *(spread(row[column], ".0f") for column in ("plain", "checkpoint_adds", "streaming_adds")),
            spread(row["ratio"], ".2f"),
        ]
        for name, clocks in report["tasks"].items()
        for clock, row in clocks.items()
    ]
    heads = ["", "", "plain", "checkpoint adds", "streaming adds to that", "ratio of the last two"]
    what = "Microseconds per layer and step, one thread."
    if not report.get("has_values", True):
        short = report.get("short_copies", "0")
        copies = (
            f"and which does copies of up to {short} bytes at once"
            if short != "0"
            else "and which wakes a thread for each copy"
        )
        what += f" Of the host alone: before a stand-in for a GPU, whose kernels compute nothing {copies}."
    return [what, "", *table(heads, rows)]


def ranks(report: Report) -> list[str]:
    names = {
        "one": "streamed by one process",
        "two": "streamed by two",
        "gathered": "streamed by two, `gather_weights=True`",
        "DDP": "DistributedDataParallel, two",
        "FSDP2": "FSDP2 with CPU offload, two",
    }
    rows = [
        [names[way], spread(row["tokens_per_second"], ",.0f"), spread(row["two_ranks_by_it"], ".2f")]
        for way, row in report["tasks"].items()
    ]
    lines = table(["one thread each", "tokens/s", "two streamed ranks by it"], rows)
    lines += [f"\n{names[way]}: left out ({why})" for way, why in report["left_out"].items()]
    planned = [
        [
            f"{row['gpus']} x {row['machine']}, {row['interconnect']}{', gathered' * row['gather_weights']}",
            f"{row['tokens_of_a_gpu']:,}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['of_linear']:.1%}",
            row["binding_lane"],
        ]
        for row in report["on_paper"]
    ]
    heads = [
        "10 billion parameters, on paper",
        "tokens of a GPU",
        "tokens/s",
        "of as many times one",
        "binds",
    ]
    return [*lines, "", *table(heads, planned)]


def clock(report: Report) -> list[str]:
    rows = []
    for name, row in report["tasks"].items():
        exposed = f"{row['exposed']['median']:.1%}", f"{row['planned_exposed']['median']:.1%}"
        rows.append([name, f"{1e3 * row['seconds']['median']:.0f}", spread(row["ratio"], ".3f"), *exposed])
    what = "Kernels and copies take set times, before a stand-in for a GPU: no GPU's figures."
    return [what, "", *table(["what binds", "step ms", "by the plan's", "exposed", "planned"], rows)]


TABLES: dict[str, Callable[[Report], list[str]]] = {
    "bench/adam.py": adam,
    "bench/architectures.py": architectures_table,
    "bench/beside_others.py": beside_others,
    "bench/checkpoint.py": checkpoint,
    "bench/data.py": data_table,
    "bench/disk.py": disk_table,
    "bench/disk_step.py": step_table,
    "bench/clock.py": clock,
    "bench/depth.py": depth,
    "bench/fits.py": fits,
    "bench/hidden_update.py": hidden_update,
    "bench/host_cost.py": host_cost,
    "bench/model_sizes.py": sizes_table,
    "bench/quantized.py": quantized_table,
    "bench/moments.py": moments,
    "bench/overlap.py": overlap,
    "bench/plan_time.py": plan_table,
    "bench/plans.py": plans_table,
    "bench/ranks.py": ranks,
    "bench/residency.py": residency_table,
    "bench/soak.py": soak,
    "bench/tokens_per_transfer.py": tokens_table,
    "bench/two_checkouts.py": two_checkouts,
    "bench/versus.py": versus,
}
