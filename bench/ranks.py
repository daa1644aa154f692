"""How much faster are two ranks with a core each than one, and than DDP and FSDP2?

    python -m bench.ranks                          # forty seconds on two cores, no GPU

Two processes, each with one core of its own and one PyTorch thread, train the same model in several ways,
interleaved: a round has some steps of each way, in a new random order, and all processes begin a way
together. The threads of a process share its core, those that copy and update too. The ways:

- *one*: streamed by one process alone, on its part of the batch; the other process waits;
- *apart*: the same by both at once. They share memory and caches, not data: what two ranks could reach;
- *two*: streamed by both, each on its part (`wrap(process_group=)`, gloo);
- *gathered*: the same with `gather_weights=True`. Between processes of one CPU that copies more, not less;
- *DDP*: PyTorch's DistributedDataParallel with its AdamW: each has a whole model and a whole optimizer;
- *FSDP2*: `fully_shard` of each layer with `CPUOffloadPolicy`, and PyTorch's AdamW. Device and host are one
  here, so that it copies nothing that it would copy with a GPU; left out, and said, where this PyTorch
  cannot run it without one.

Ratios are of one round's tokens per second: of two ranks by one, and by those of the others.

And on paper, from `streamer plan`: tokens per second of 1, 2, 4 and 8 GPUs of three kinds in one server. They
send gradients by way of the host's memory, over PCIe, or over NVLink. Each GPU has the batch of the config,
or an eighth of it, which hides less. GPUs with NVLink also gather weights over it.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import random
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import multiprocessing

import streamer
from bench.common import RESULTS, load_average, provenance, quartiles, write_json
from bench.markdown import Report, spread, table
from models.gpt2 import GPT
from streamer.backends.base import Lane
from streamer.cli.config import load_config, with_keys
from streamer.cli.plan.planning import plan_run
from streamer.cli.plan.variants import with_batch
from streamer.planner.machine import NVLINK, named_machine

RANKS = 2
#: By what the gradients go from GPU to GPU over: the host's memory, PCIe, NVLink.
CARDS, GPUS = ("rtx-4090", "a100-80gb", "h100-sxm"), (1, 2, 4, 8)
LAYERS, WIDTH, TIME, SAMPLES = 6, 256, 64, 8

Step = Callable[[], None]


def step_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> Step:
    def step() -> None:
        F.cross_entropy(model(tokens[0]).flatten(0, 1), tokens[1].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ways(rank: int) -> tuple[dict[str, Step], dict[str, str]]:
    """A step of each way, and why others are left out."""
    torch.manual_seed(0)
    original = GPT(vocab_size=256, block_size=TIME, tied=False, n_layer=LAYERS, n_head=4, n_embd=WIDTH)
    tokens = torch.randint(256, (2, SAMPLES, TIME), generator=torch.Generator().manual_seed(rank))
    found: dict[str, Step] = {}
    missing: dict[str, str] = {}
    together = {"process_group": dist.group.WORLD}
    streamed: dict[str, dict[str, Any]] = {
        "one": {},
        "apart": {},
        "two": together,
        "gathered": {**together, "gather_weights": True},
    }
    for way, options in streamed.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that each of the ranks trains alone
            model = streamer.wrap(
                copy.deepcopy(original), layers="transformer.h", device="cpu", host_threads=1, **options
            )
        found[way] = step_of(model, streamer.AdamW(model.parameters(), lr=1e-4), tokens)
    replicated = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(original))
    found["DDP"] = step_of(replicated, torch.optim.AdamW(replicated.parameters(), lr=1e-4), tokens)
    try:
        found["FSDP2"] = sharded(copy.deepcopy(original), tokens)
    except Exception as error:  # noqa: BLE001 - whatever it needs that is not here
        missing["FSDP2"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return found, missing


def sharded(model: torch.nn.Module, tokens: torch.Tensor) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))
    policy = CPUOffloadPolicy(pin_memory=False)
    for layer in model.transformer.h:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    step = step_of(model, torch.optim.AdamW(model.parameters(), lr=1e-4), tokens)
    step()
    return step


def on_paper() -> list[dict[str, Any]]:
    config = load_config("configs/gpt2-10b.toml")
    rows = []
    for name, share in itertools.product(CARDS, (1, 8)):
        batch = config.train.per_device_train_batch_size // share
        server = named_machine(name).of_ranks(GPUS[-1])
        alone = None
        ways = [(gpus, False) for gpus in GPUS]
        if server.interconnect == NVLINK:
            ways += [(gpus, True) for gpus in GPUS[1:]]
        for gpus, gathers in ways:
            machine = replace(server, ranks=gpus)
            of_all = with_keys(with_batch(config, batch), stream={"gather_weights": gathers})
            plan = plan_run(of_all, machine)
            alone = alone or plan.tokens_per_second
            busy = {lane.value: plan.step.prediction.busy_seconds[lane] for lane in Lane}
            rows.append(
                {
                    "machine": machine.name,
                    "interconnect": machine.interconnect,
                    "gpus": gpus,
                    "gather_weights": gathers,
                    "tokens_of_a_gpu": batch * config.train.max_length,
                    "tokens_per_second": plan.tokens_per_second,
                    "of_linear": plan.tokens_per_second / (gpus * alone),
                    "binding_lane": plan.step.prediction.binding_lane.value,
                    "busy_seconds": {lane: seconds for lane, seconds in busy.items() if seconds},
                    "host_bytes": sum(plan.host_bytes.values()),
                }
            )
            print(
                f"on paper: {gpus} x {machine.name}{', gathered' * gathers}, batch {batch}: "
                f"{plan.tokens_per_second:,.0f} tokens/s, "
                f"{rows[-1]['of_linear']:.1%} of as many times one"
            )
    return rows


def run(rank: int, store: str, rounds: int, steps: int, answers: Any) -> None:
    """One rank's part; the first one tells the tokens per second of each way, by round."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    found, missing = ways(rank)
    order = random.Random(0)
    rates: dict[str, list[float]] = {way: [] for way in found}
    for number in range(rounds + 1):
        for way in order.sample(sorted(found), len(found)):
            dist.barrier()
            began = time.perf_counter()
            for _ in range(steps if way != "one" or not rank else 0):
                found[way]()
            dist.barrier()
            ranks = 1 if way == "one" else RANKS
            if number:  # the first round compiles and warms up
                rates[way].append(ranks * steps * SAMPLES * TIME / (time.perf_counter() - began))
    if not rank:
        answers.put((rates, missing))
    dist.barrier()
    dist.destroy_process_group()


def report_table(report: Report) -> list[str]:
    names = {
        "one": "streamed by one process",
        "apart": "streamed by two, each for itself",
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


def readme_figure(report: Report) -> str:
    """The sentence of the project's pages."""
    tasks = report["tasks"]
    ways = ("one", "apart", "FSDP2", "DDP")
    one, apart, fsdp, ddp = (tasks[way]["two_ranks_by_it"]["median"] for way in ways)
    return (
        f"Two ranks with one CPU core each reach {one:.2f} times the tokens/s of one, {apart:.2f} times "
        f"those of two processes that exchange nothing, {fsdp:.2f} times those of FSDP2 with CPU offload, "
        f"and {ddp:.2f} times those of `DistributedDataParallel`, which copies no layers (medians of "
        f"{report['rounds']} rounds)."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path, help="bench/results/ranks.json")
    options = parser.parse_args()
    if (cores := len(os.sched_getaffinity(0))) < RANKS:
        parser.error(f"each of {RANKS} ranks needs a core of its own, and this process may use {cores}")

    load_before = load_average()
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        given = (f"{folder}/store", options.rounds, options.steps, answers)
        processes = multiprocessing.spawn(run, given, nprocs=RANKS, join=False)
        rates, missing = answers.get()
        while not processes.join():
            pass
    by_two = {
        way: [two / other for two, other in zip(rates["two"], rates[way], strict=True)] for way in rates
    }
    tasks = {
        way: {"tokens_per_second": quartiles(rates[way]), "two_ranks_by_it": quartiles(by_two[way])}
        for way in rates
    }
    for way, row in tasks.items():
        rate, ratio = row["tokens_per_second"], row["two_ranks_by_it"]
        print(
            f"{way:6} {rate['median']:8.0f} tokens/s ({rate['lower_quartile']:.0f} to "
            f"{rate['upper_quartile']:.0f}); two streamed ranks are {ratio['median']:.2f} of it "
            f"({ratio['lower_quartile']:.2f} to {ratio['upper_quartile']:.2f})"
        )
    for way, why in missing.items():
        print(f"{way:6} left out: {why}")
    report = provenance("bench/ranks.py", load_before=load_before)
    shape = {"layers": LAYERS, "width": WIDTH, "tokens_of_a_rank": SAMPLES * TIME}
    report |= {**shape, "rounds": options.rounds, "steps": options.steps, "tasks": tasks, "left_out": missing}
    report |= {"on_paper": on_paper()}
    write_json(options.json or RESULTS / "ranks.json", report)


if __name__ == "__main__":
    main()
