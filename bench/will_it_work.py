"""Which models fit on which machine? The rows of the README's first table that no other script plans.

    python -m bench.will_it_work    # some minutes, no GPU: plans, as `streamer plan` makes them

Nothing is measured. The step, the machines and the options that are tried are those of `bench.model_sizes`.
Rows here have a base in 4 bits (QLoRA), or a limit on host memory for a machine with 64 GB. Existing rows are
kept; ``--again`` plans them anew.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.common import RESULTS, load_average, provenance, write_json
from bench.markdown import Report, table
from bench.model_sizes import BINDS, CONTEXT, GIB, MODELS, SEQUENCES, SHARE, best
from streamer.planner.machine import named_machine

RANK = 16
#: For a machine with 64 GiB of memory: the system needs some of it.
OF_64_GB, OF_64_GB_BYTES = "60GiB", 64 * GIB
#: The share of memory that a run should leave to the system.
LEFT_FREE = 0.1
SMALL, MIDDLE, LARGE = "Llama 3 8B", "Qwen2.5 32B", "Llama 3 70B"
#: (model, way of training, machine, limit on host memory)
ROWS: tuple[tuple[str, str, str, str | None], ...] = (
    (SMALL, "QLoRA", "laptop-8gb", None),
    (SMALL, "QLoRA", "rtx-4090", None),
    (SMALL, "QLoRA", "h100-pcie", None),
    (LARGE, "QLoRA", "rtx-4090", OF_64_GB),
    (SMALL, "full", "rtx-4090", OF_64_GB),
    (MIDDLE, "QLoRA", "rtx-4090", None),
    (LARGE, "QLoRA", "h100-pcie", None),
    (MIDDLE, "LoRA", "rtx-4090", OF_64_GB),
)


def report_table(report: Report) -> list[str]:
    """A row for each plan."""
    heads = ["model", "trained", "machine", "limit on RAM", "GPU GiB", "RAM GiB", "NVMe GiB", "tokens/s"]
    heads += ["bottleneck"]
    return table(heads, [[*_names(row), *_cells(row["plan"])] for row in report["rows"]])


def _names(row: Mapping[str, Any]) -> list[str]:
    return [row["model"], row["way"], row["machine"], row["host_memory"] or ""]


def _cells(plan: Mapping[str, Any]) -> list[str]:
    if not plan["fits"]:
        return ["does not fit", "", "", "", ""]
    return [
        f"{plan['device_needed'] / GIB:.1f}",
        f"{plan['host_needed'] / GIB:.1f}",
        f"{plan['on_disk'] / GIB:.0f}" if plan["on_disk"] else "0",
        f"{plan['tokens_per_second']:,.0f}",
        BINDS[plan["binding_lane"]],
    ]


#: The rows of the README: those of ROWS and of `bench.model_sizes`.
SHOWN: tuple[tuple[str, str, str, str | None], ...] = (
    (SMALL, "LoRA", "laptop-8gb", None),
    (SMALL, "QLoRA", "laptop-8gb", None),
    (SMALL, "LoRA", "rtx-4090", None),
    (SMALL, "full", "rtx-4090", None),
    (SMALL, "full", "rtx-4090", OF_64_GB),
    (SMALL, "full", "h100-pcie", None),
    (MIDDLE, "LoRA", "rtx-4090", OF_64_GB),
    (MIDDLE, "QLoRA", "rtx-4090", None),
    (MIDDLE, "full", "h100-pcie", None),
    (LARGE, "LoRA", "rtx-4090", None),
    (LARGE, "QLoRA", "rtx-4090", OF_64_GB),
    (LARGE, "QLoRA", "h100-pcie", None),
    (LARGE, "full", "h100-pcie", None),
)


def rows_shown(report: Report, sizes: Report) -> Iterator[tuple[list[str], Any]]:
    """Model, way, machine and limit of each row of the README, and its plan."""
    plans = {tuple(_names(row)): row["plan"] for row in report["rows"]}
    for row in sizes["models"]:
        way = "LoRA" if row["lora_rank"] else "full"
        plans |= {(row["model"], way, machine, ""): plan for machine, plan in row["plans"].items()}
    for *names, limit in SHOWN:
        yield [*names, limit or ""], plans[*names, limit or ""]


def readme_rows(report: Report, sizes: Report) -> list[str]:
    """The README's table. Its last column is the end of the command in docs/benchmarks.md."""
    heads = [
        "model",
        "trained",
        "GPU GiB",
        "RAM GiB",
        "NVMe GiB",
        "tokens/s, planned",
        "`--machine` ...",
    ]
    rows = []
    for (model, way, machine, limit), plan in rows_shown(report, sizes):
        options = options_of(way, machine, limit, plan)
        of_machine = sizes["machines"][machine]["device_bytes"] / GIB
        gpu, *others, binds = _cells(plan)
        ram = OF_64_GB_BYTES if limit else sizes["machines"][machine]["host_bytes"]
        others[0] += " (tight)" if plan["host_needed"] > (1 - LEFT_FREE) * ram else ""
        others[-1] += "" if binds == "compute" else f" ({binds})"
        rows.append([model, way, f"{gpu} of {of_machine:.0f}", *others, f"`{options}`"])
    return table(heads, rows)


def options_of(way: str, machine: str, limit: str, plan: Mapping[str, Any]) -> str:
    """Options of ``streamer plan`` for the row."""
    words = [machine]
    words += [] if way == "full" else [f"--lora-rank {RANK}"]
    words += ["--set model.quantize=nf4"] if way == "QLoRA" else []
    words += [f"--host-memory {limit}"] if limit else []
    words += ["--set optimizer.state_dtype=bfloat16"] if way == "full" else []
    words += [f"--set stream.activations={plan['activations']}"]
    return " ".join(words)


def command_of(folder: str, options: str, plan: Mapping[str, Any], device_bytes: int) -> list[str]:
    """The words of a row's complete command."""
    changed = {
        "train.max_length": CONTEXT,
        "train.per_device_train_batch_size": SEQUENCES,
        "stream.micro_batch_size": plan["micro_batch_size"],
        "stream.dtype": "bfloat16",
        "stream.disk": "/",
        "stream.device_memory": f"{int(SHARE * device_bytes)}B",
    }
    sets = [word for key, value in changed.items() for word in ("--set", f"{key}={value}")]
    return ["plan", folder, *sets, "--machine", *options.split()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=RESULTS / "will_it_work.json")
    parser.add_argument("--again", action="store_true", help="plan rows anew that are in the JSON")
    arguments = parser.parse_args()
    kept: dict[tuple[str, ...], Any] = {}
    if arguments.json.exists() and not arguments.again:
        kept = {tuple(_names(row)): row for row in json.loads(arguments.json.read_text())["rows"]}
    rows: list[Any] = []
    for model, way, name, limit in ROWS:
        row: dict[str, Any] = {"model": model, "way": way, "machine": name, "host_memory": limit}
        found = kept.get(tuple(_names(row)))
        if found is None:
            quantize = "nf4" if way == "QLoRA" else "none"
            rank = 0 if way == "full" else RANK
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "config.json").write_text(json.dumps(MODELS[model]))
                machine = named_machine(name)
                found = row | {
                    "plan": best(Path(folder), machine, rank=rank, quantize=quantize, host_memory=limit)
                }
            print(found, flush=True)
        rows.append(found)
        report = {
            **provenance("bench/will_it_work.py", load_before=load_average()),
            "tokens_per_step": SEQUENCES * CONTEXT,
            "lora_rank": RANK,
            "rows": rows,
        }
        write_json(arguments.json, report)


if __name__ == "__main__":
    main()
