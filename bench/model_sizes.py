"""What do models of 1.5 to 70 billion parameters take, in full and with LoRA, on 8, 24 and 80 GB?

    python -m bench.model_sizes    # some minutes, no GPU: plans, as `streamer plan` makes them

Nothing is measured: peaks and sizes of machines are those of data sheets (`streamer.planner.machine`), the
drive is assumed. A step has 32,768 tokens, 16 sequences of 2,048. The table has the fastest plan that fits,
from a short list of options: layer inputs on the device or in host memory, one or two sequences at a time.
State that does not fit in host memory spills to disk. Models are bf16. In full their moments are bf16 too.
Adapters have rank 16 on all linear layers.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from bench.common import RESULTS, load_average, provenance, write_json
from bench.markdown import Report, table
from streamer.backends.base import Lane
from streamer.cli.config import Config, ConfigError, load_config
from streamer.cli.plan.planning import RunPlan, plan_run
from streamer.planner.machine import Machine, named_machine

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


def report_table(report: Report) -> list[str]:
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


def readme_figure(report: Report) -> list[str]:
    """A table of models by machines."""
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


MACHINES = ("laptop-8gb", "rtx-4090", "h100-pcie")
SEQUENCES, CONTEXT = 16, 2048
ACTIVATIONS = ("recompute", "recompute+offload")
MICRO_BATCHES = (1, 2)
#: Of the device's memory, for `wrap(device_memory=)`: the rest is the desktop's, and of other processes.
SHARE = 0.94


def gpt2(width: int, layers: int, heads: int) -> dict[str, Any]:
    """The config.json of a GPT-2."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": CONTEXT,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }


def decoder(kind: str, vocabulary: int, width: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    """The config.json of a Llama or a Qwen2, with untied embeddings."""
    return {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": kind.lower(),
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 4 if width < 4096 else 8,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }


#: The shapes of public models.
MODELS = {
    "GPT-2 1.5B": gpt2(1600, 48, 25),
    "Qwen2.5 7B": decoder("Qwen2", 152064, 3584, 18944, 28, 28),
    "Llama 3 8B": decoder("Llama", 128256, 4096, 14336, 32, 32),
    "GPT-2 10B": gpt2(4096, 50, 32),
    "Qwen2.5 32B": decoder("Qwen2", 152064, 5120, 27648, 64, 40),
    "Llama 3 70B": decoder("Llama", 128256, 8192, 28672, 80, 64),
}

CONFIG = f"""
[train]
max_length = {CONTEXT}
per_device_train_batch_size = {SEQUENCES}
[stream]
dtype = "bfloat16"
"""


def configs(
    folder: Path, machine: Machine, *, rank: int, quantize: str = "none", host_memory: str | None = None
) -> Iterator[Config]:
    """The options that are tried."""
    file = folder / "run.toml"
    file.write_text(CONFIG)
    for activations, micro_batch in product(ACTIVATIONS, MICRO_BATCHES):
        changed = [
            f"model.path={json.dumps(str(folder))}",
            f"stream.activations={json.dumps(activations)}",
            f"stream.micro_batch_size={micro_batch}",
            f'stream.device_memory="{int(SHARE * machine.device_bytes)}B"',
            'stream.disk="/"',
        ]
        changed += [f"lora.r={rank}"] if rank else ['optimizer.state_dtype="bfloat16"']
        changed += [f"model.quantize={quantize}"]
        changed += [f"stream.host_memory={host_memory}"] if host_memory else []
        yield load_config(file, changed)


def best(
    folder: Path, machine: Machine, *, rank: int, quantize: str = "none", host_memory: str | None = None
) -> dict[str, Any]:
    """Figures of the fastest plan that fits, or of the plan that lacks the fewest bytes."""
    plans, refused = [], ""
    for config in configs(folder, machine, rank=rank, quantize=quantize, host_memory=host_memory):
        try:
            plans.append(plan_run(config, machine))
        except ConfigError as error:
            refused = str(error)
    if not plans:
        return {"fits": False, "why": refused, "lacking": {}}
    fitting = [plan for plan in plans if _fits(plan)]
    if fitting:
        return figures(max(fitting, key=lambda plan: plan.tokens_per_second))
    return figures(min(plans, key=lambda plan: sum(plan.lacking.values())))


def _fits(plan: RunPlan) -> bool:
    return plan.fits and plan.beyond_disk is None


def figures(plan: RunPlan) -> dict[str, Any]:
    """Of one plan, in bytes and seconds."""
    stream = plan.config.stream
    return {
        "fits": _fits(plan),
        "why": plan.refused or plan.beyond_disk,
        "lacking": dict(plan.lacking),
        "parameters": plan.parameters,
        "activations": stream.activations,
        "micro_batch_size": stream.micro_batch_size,
        "num_slots": plan.step.num_slots,
        "device_needed": plan.device_needed,
        "host_needed": plan.host_needed,
        "on_disk": plan.on_disk,
        "seconds": plan.step.prediction.seconds,
        "tokens_per_second": plan.tokens_per_second,
        "copied_to_device": plan.step.prediction.moved_bytes[Lane.H2D],
        "binding_lane": plan.step.prediction.binding_lane.value,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=RESULTS / "model_sizes.json")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    arguments = parser.parse_args()
    machines = {name: named_machine(name) for name in MACHINES}
    rows = []
    for name, rank in product(arguments.models, (0, 16)):
        row: dict[str, Any] = {"model": name, "lora_rank": rank, "plans": {}}
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(MODELS[name]))
            for machine, of_machine in machines.items():
                row["plans"][machine] = best(Path(folder), of_machine, rank=rank)
                print(name, rank, machine, row["plans"][machine], flush=True)
        rows.append(row)
    report = {
        **provenance("bench/model_sizes.py", load_before=load_average()),
        "tokens_per_step": SEQUENCES * CONTEXT,
        "machines": {
            name: {"device_bytes": machine.device_bytes, "host_bytes": machine.host_bytes}
            for name, machine in machines.items()
        },
        "models": rows,
    }
    write_json(arguments.json, report)
    print("\n".join(report_table(report)))


if __name__ == "__main__":
    main()
