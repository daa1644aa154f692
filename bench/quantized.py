"""How much does a base of 70 billion parameters take in bf16, int8 and 4 bits, with adapters in training?

    python -m bench.quantized    # a minute or two, no GPU: plans, as `streamer plan` makes them

Nothing is measured. The step, the machine and the options that are tried are those of `bench.model_sizes`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.common import RESULTS, load_average, provenance, write_json
from bench.markdown import Report, table
from bench.model_sizes import BINDS, CONTEXT, GIB, MODELS, SEQUENCES, best
from streamer.planner.machine import named_machine

MODEL, MACHINE, RANK = "Llama 3 70B", "rtx-4090", 16
KINDS = {"none": "bf16", "int8": "int8", "nf4": "nf4"}


def report_table(report: Report) -> list[str]:
    """A row for each kind of base."""
    heads = ["base", "GPU GiB", "host GiB", "disk GiB", "to the GPU a step, GiB", "tokens/s", "what binds"]
    return table(heads, [_cells(kind, plan) for kind, plan in report["plans"].items()])


#: The project's README has the whole table.
readme_figure = report_table


def _cells(kind: str, plan: Mapping[str, Any]) -> list[str]:
    if not plan["fits"]:
        return [KINDS[kind], "does not fit", "", "", "", "", ""]
    return [
        KINDS[kind],
        f"{plan['device_needed'] / GIB:.1f}",
        f"{plan['host_needed'] / GIB:.1f}",
        f"{plan['on_disk'] / GIB:.0f}" if plan["on_disk"] else "",
        f"{plan['copied_to_device'] / GIB:.1f}",
        f"{plan['tokens_per_second']:,.0f}",
        BINDS[plan["binding_lane"]],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=RESULTS / "quantized.json")
    arguments = parser.parse_args()
    machine = named_machine(MACHINE)
    plans = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[MODEL]))
        for kind in KINDS:
            plans[kind] = best(Path(folder), machine, rank=RANK, quantize=kind)
            print(kind, plans[kind], flush=True)
    report = {
        **provenance("bench/quantized.py", load_before=load_average()),
        "model": MODEL,
        "machine": MACHINE,
        "lora_rank": RANK,
        "tokens_per_step": SEQUENCES * CONTEXT,
        "plans": plans,
    }
    write_json(arguments.json, report)
    print("\n".join(report_table(report)))


if __name__ == "__main__":
    main()
