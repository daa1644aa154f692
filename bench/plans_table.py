"""The table of `bench.plans`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.markdown import Report, table

GIB = 1 << 30


def plans_table(report: Report) -> list[str]:
    heads = ["", "slots", "device GiB", "host GiB", "step s", "tokens/s", "binds", "fits"]
    rows = []
    for name, plan in report["machines"].items():
        rows.append([name, *_cells(plan), "yes" if plan["fits"] else "no"])
        if (remedied := plan["mend"]) is not None:
            changes = ", ".join(f"`{key}` {value}" for key, value in remedied["changes"].items())
            rows.append([f"{name} with {changes}", *_cells(remedied), "yes"])
    return [
        f"`{report['config']}` on machines by name, at the peaks of their data sheets (needed / there).",
        "",
        *table(heads, rows),
    ]


def _cells(plan: Mapping[str, Any]) -> list[str]:
    return [
        str(plan["num_slots"]),
        f"{plan['device_needed'] / GIB:.1f} / {plan['device_bytes'] / GIB:.0f}",
        f"{plan['host_needed'] / GIB:.1f} / {plan['host_bytes'] / GIB:.0f}",
        f"{plan['seconds']:.2f}",
        f"{plan['tokens_per_second']:,.0f}",
        plan["binding_lane"],
    ]
