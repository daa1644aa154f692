"""Ranks take the host's memory once, and each what it has on its device."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import streamer
from streamer.store.ledger import AVERAGING
from streamer_native import BLOCK
from tests.ranks.common import run_ranks
from tests.ranks.programs import backward, everyone, model

BF16 = {"dtype": torch.bfloat16}


Measured = tuple[dict[str, int], dict[str, int], int]


def shared_bytes() -> int:
    """Of the memory that this process has mapped and shares, what it has been given of it, by its own share
    (proportional set size)."""
    found, counting = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            counting = "/memfd:streamer" in line
        elif counting and line.startswith("Pss:"):
            found += int(line.split()[1]) << 10
    return found


def measure_each(rank: int, size: int, forms: Sequence[int | str | None]) -> list[Measured]:
    return [measure(rank, size, machines) for machines in forms]


def measure(rank: int, size: int, machines: int | str | None = None) -> Measured:
    group = {"process_group": everyone(machines)} if size else {}
    made = streamer.wrap(model(), layers="layers", device="cpu", num_slots=2, **BF16, **group)
    planned: Any = made.__dict__["_streamer"].planned
    assert dict(streamer.stats(made).device_bytes) == dict(planned.device)
    assert dict(streamer.stats(made).host_bytes) == dict(planned.host)
    optimizer = streamer.AdamW(made.parameters())
    for step in range(2):
        backward(made, step, rank, 1, None)
    optimizer.step()
    streamer.synchronize(made)
    if size:
        dist.barrier()
    stats, shared = streamer.stats(made), shared_bytes()
    if size:
        dist.barrier()
    streamer.unwrap(made)
    return dict(stats.host_bytes), dict(stats.device_bytes), shared


def test_host_memory_does_not_grow_with_the_ranks() -> None:
    host, device, _ = measure(0, 0)
    for size, forms in ((2, [None]), (4, ["aabb"])):
        for machines, *found in zip(forms, *run_ranks(size, measure_each, size, forms), strict=True):
            on_each, count = host, machines if isinstance(machines, int) else 1
            if machines == "aabb":
                on_each, count = divided(host), 2
            for of_rank, on_device, _ in found:
                # each tells of all; what gradients pass through is its own
                assert of_rank == on_each
                assert {name: nbytes for name, nbytes in on_device.items() if name != AVERAGING} == device
            shared = sum(nbytes for _, _, nbytes in found)
            private = host["gradient staging"]
            states = count * (sum(on_each.values()) - private)
            # memory comes in pages: of each buffer the last one, of padding, may not have been written
            rounding = count * len(on_each) * mmap.PAGESIZE
            assert states - rounding <= shared <= states + rounding


def divided(host: dict[str, int]) -> dict[str, int]:
    """What each of two machines with two ranks holds of what one machine would hold: of masters and moments
    the parts of its ranks, by the machine that has the most, each from a multiple of 64 bytes on."""
    plain = model()
    found, state = dict(host), {"remainders": 2, "exp_avg": 4, "exp_avg_sq": 4}
    units = [*(list(layer.parameters()) for layer in plain.layers)]
    units.append([plain.embedding.weight, plain.norm.weight, plain.norm.bias])
    for name, itemsize in state.items():
        found[name] = 0
        for params in units:
            most = max(map(sum, zip(*(halves(quarter) for quarter in quarters(params)), strict=True)))
            found[name] += -(-most * itemsize // 64) * 64
    return found


def quarters(params: list[torch.nn.Parameter]) -> list[tuple[int, int, list[int]]]:
    """The shares of two ranks, from where to where, and the places where parts may begin."""
    begins, at = list[int](), 0
    for param in params:
        padded = -(-param.numel() // 32) * 32
        begins += range(at, at + padded, BLOCK)
        at += padded
    middle = max(begin for begin in begins if begin <= at // 2)
    return [(0, middle, begins), (middle, at, begins)]


def halves(share: tuple[int, int, list[int]]) -> tuple[int, int]:
    """Elements of a share that each of two machines has."""
    start, stop, begins = share
    middle = max(begin for begin in begins if begin <= start + (stop - start) // 2)
    return middle - start, stop - middle
