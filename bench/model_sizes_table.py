"""The table of `bench.model_sizes`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.markdown import Report, table

GIB = 1 << 30

#: What binds, in words.
BINDS = {
    "compute": "compute",
    "h2d": "copies to the GPU",
    "d2h": "copies from the GPU",
    "host": "the update",
    "disk_read": "disk reads",
    "disk_write": "disk writes",
}


def sizes_table(report: Report) -> list[str]:
    """A row for each model, way of training, and machine."""
    heads = ["", "trained", "GPU", "GPU GiB", "host GiB", "disk GiB", "tokens/s", "what binds"]
    rows = []
    for row in report["models"]:
        way = f"LoRA, rank {row['lora_rank']}" if row["lora_rank"] else "in full"
        for name, plan in row["plans"].items():
            size = f"{report['machines'][name]['device_bytes'] / GIB:.0f} GiB ({name})"
            rows.append([row["model"], way, size, *_cells(plan)])
    return table(heads, rows)


def _cells(plan: Mapping[str, Any]) -> list[str]:
    if not plan["fits"]:
        return ["does not fit", "", "", "", ""]
    return [
        f"{plan['device_needed'] / GIB:.1f}",
        f"{plan['host_needed'] / GIB:.1f}",
        f"{plan['on_disk'] / GIB:.0f}" if plan["on_disk"] else "",
        f"{plan['tokens_per_second']:,.0f}",
        BINDS[plan["binding_lane"]],
    ]


def sizes_figure(report: Report) -> list[str]:
    """What the project's README shows: models down, machines across."""
    machines = report["machines"]
    heads = ["", "", *(f"{name}, {sizes['device_bytes'] / GIB:.0f} GiB" for name, sizes in machines.items())]
    rows = []
    for row in report["models"]:
        way = f"LoRA {row['lora_rank']}" if row["lora_rank"] else "full"
        rows.append([row["model"], way, *(_cell(plan) for plan in row["plans"].values())])
    return table(heads, rows)


def _cell(plan: Mapping[str, Any]) -> str:
    if not plan["fits"]:
        return _cells(plan)[0]
    device, host, disk, tokens, binds = _cells(plan)
    return f"**{tokens}** tokens/s ({binds}); GPU {device}, host {host}" + (f", disk {disk}" if disk else "")
