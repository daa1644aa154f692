"""How much does the config of ten billion parameters take on every named machine?

    python -m bench.plans    # some minutes, no GPU: the plan of each, as `streamer plan` makes it

Nothing is measured: peaks and sizes are those of data sheets (`streamer.planner.machine`).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.common import RESULTS, load_average, provenance, write_json
from bench.markdown import Report, table
from streamer.cli.config import Config, load_config
from streamer.cli.plan.planning import RunPlan, plan_run
from streamer.cli.plan.variants import find_remedies
from streamer.planner.machine import MACHINES, named_machine

GIB = 1 << 30


def report_table(report: Report) -> list[str]:
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


CONFIG = Path(__file__).parent.parent / "configs" / "gpt2-10b.toml"


def figures(plan: RunPlan) -> dict[str, Any]:
    """Of one plan."""
    return {
        "fits": plan.fits,
        "num_slots": plan.step.num_slots,
        "device_needed": plan.device_needed,
        "device_bytes": plan.machine.device_bytes,
        "host_needed": plan.host_needed,
        "host_bytes": plan.machine.host_bytes,
        "seconds": plan.step.prediction.seconds,
        "tokens_per_second": plan.tokens_per_second,
        "binding_lane": plan.step.prediction.binding_lane.value,
    }


def row(config: Config, name: str) -> dict[str, Any]:
    """A machine's plan and, if it does not fit, the remedy."""
    machine = named_machine(name)
    plan = plan_run(config, machine)
    found = None if plan.fits else find_remedies(plan, lambda changed: plan_run(changed, machine))
    return figures(plan) | {
        "mend": None
        if found is None or not found.plan.fits
        else {"changes": dict(found.changes), **figures(found.plan)}
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=RESULTS / "plans.json")
    arguments = parser.parse_args()
    config = load_config(CONFIG)
    report = {
        **provenance("bench/plans.py", load_before=load_average()),
        "config": CONFIG.name,
        "machines": {name: row(config, name) for name in MACHINES},
    }
    write_json(arguments.json, report)
    print("\n".join(report_table(report)))


if __name__ == "__main__":
    main()
