"""The tables of `bench.disk`."""

from __future__ import annotations

from bench.markdown import Report, spread, table

#: What is timed beside the rings.
PARTS = {
    "in_turn": "one after the other",
    "both_directions": "reads and writes alone, both at once",
    "changes": "changes alone",
}


def disk_table(report: Report) -> list[str]:
    rows = [
        [
            f"{rates['extent_bytes'] / (1 << 20):.0f} MiB",
            {"both": "both at once"}.get(direction, direction),
            *(spread(rates["bytes_per_second"][name][direction], ".2f", 1e-9) for name in ("raw", "scratch")),
            spread(rates["of_raw"]["scratch"][direction]),
            spread(rates["bytes_per_second"]["cached"][direction], ".2f", 1e-9),
            spread(rates["of_raw"]["cached"][direction]),
        ]
        for rates in report["rates"]
        for direction in rates["of_raw"]["scratch"]
    ]
    heads = ["extents of", "GB/s", "raw", "scratch", "of raw", "through the page cache", "of raw"]
    cached = {
        name: max(rates["page_cache_bytes"][name] for rates in report["rates"])
        for name in ("scratch", "cached")
    }
    return [
        f"Files of {report['rates'][0]['bytes'] / (1 << 30):.1f} GiB, blocks of "
        f"{report['block_bytes'] / (1 << 20):.0f} MiB, {report['in_flight']} in flight each way, "
        f"{report['rounds']} rounds. Afterwards {cached['scratch']} bytes of the scratch file are in the "
        f"page cache; of the one that goes through it, {cached['cached'] / (1 << 20):.0f} MiB at most.",
        "",
        *table(heads, rows),
        *(line for ring in report["rings"] for line in ("", *_ring(ring))),
    ]


def _ring(ring: Report) -> list[str]:
    rows = [
        [
            PARTS.get(name, f"{name} buffers"),
            spread(row),
            spread(ring["of_in_turn"].get(name)),
            spread(ring["of_longest"].get(name)),
        ]
        for name, row in ring["seconds"].items()
    ]
    throttle = ring["throttle_bytes_per_second"]
    disk = "the disk as it is" if throttle is None else f"a disk of {throttle / 1e9:.2f} GB/s each way"
    return [
        f"{ring['extents']} extents of {ring['extent_bytes'] / (1 << 20):.0f} MiB read, changed by one "
        f"thread and written, on {disk}, {ring['rounds']} rounds:",
        "",
        *table(["", "seconds", "of one after the other", "of the longer of its parts"], rows),
    ]


def step_table(report: Report) -> list[str]:
    """The table of `bench.disk_step`."""
    rows = [
        [
            row["placement"],
            _rate(row) if "slower" in row else "",
            f"{row['budget'] / 1e6:.0f} MB" if row["budget"] else "none",
            f"{row['state_over_budget']:.1f}" if "slower" in row else "",
            f"{row['bytes_per_parameter']:.1f}" if "moved_bytes" in row else "",
            spread(row["seconds"]),
            spread(row["tokens_per_second"], ".0f"),
            spread(row.get("slower")),
            f"{row['planned']:.2f}" if "planned" in row else "",
            spread(row.get("of_planned")),
            spread(row.get("of_bound")),
        ]
        for row in report["placements"]
    ]
    heads = [
        "",
        "disk, each way",
        "budget",
        "state over it",
        "bytes a parameter",
        "seconds of a step",
        "tokens/s",
        "by host memory",
        "planned",
        "of planned",
        "of the bound",
    ]
    return [
        f"A GPT of {report['parameters'] / 1e6:.1f} million parameters in bf16, {report['layers']} layers of "
        f'width {report["width"]}, update="{report.get("update", "step")}", '
        f"{report['tokens_per_step']} tokens a step, "
        f"{report['rounds']} rounds of {report['steps']} steps; losses are equal to the bit:",
        "",
        *table(heads, rows),
    ]


def _rate(row: Report) -> str:
    rate = row["throttle_bytes_per_second"]
    return "as it is" if rate is None else f"{rate / 1e6:.0f} MB/s"


def disk_figure(report: Report) -> str:
    """What `bench.disk_step` has found, in sentences."""
    slow = [row for row in report["placements"] if row["throttle_bytes_per_second"] is not None]
    told = [
        f"{row['slower']['median']:.2f} times as long with {row['placement']} at {_rate(row)} each way "
        f"(planned: {row['planned']:.2f})"
        for row in slow
    ]
    return (
        f"A step of {report['parameters'] / 1e6:.0f} million parameters in bf16, of "
        f"{report['tokens_per_step']} tokens on {report['hardware']['cores']} cores, takes, beside one in "
        f"host memory, {', '.join(told)}."
    )
