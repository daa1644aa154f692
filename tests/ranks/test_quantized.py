"""Ranks share a quantized base, and its adapters learn what they learn in one process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from importlib.util import find_spec

import numpy as np
import pytest
import torch
import torch.distributed as dist

import streamer
from tests.ranks.common import listening, run_ranks

STEPS, RANKS = 2, 2
KINDS = "torchao int8", "bitsandbytes nf4"
Found = tuple[dict[str, np.ndarray], int]


def train(number: int, place: Mapping[str, str]) -> list[Found]:
    """Of each of `KINDS`, the adapters after some steps, and the bytes of host memory. The first process
    trains alone, the others are ranks."""
    warnings.simplefilter("ignore")
    rank = number - 1 if number else None
    if rank is not None:
        os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(RANKS), **place})
        dist.init_process_group("gloo")
    return [_train(rank, kind) for kind in KINDS]


def _train(rank: int | None, kind: str) -> Found:
    # takes seconds to import
    from tests.quantized import LAYERS, llama

    model = llama(kind)
    group = None if rank is None else dist.group.WORLD
    streamer.wrap(model, layers=LAYERS, device="cpu", process_group=group, grad_dtype=None)
    optimizer = streamer.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(STEPS):
        for index in range(RANKS) if rank is None else [rank]:
            torch.manual_seed(100 * step + index)
            tokens = torch.randint(0, 128, (2, 16))
            loss = model(input_ids=tokens, labels=tokens).loss
            (loss / RANKS if rank is None else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    streamer.synchronize(model)
    adapters = {name: p.detach().numpy().copy() for name, p in model.named_parameters() if p.requires_grad}
    weights = streamer.stats(model).host_bytes["weights"]
    streamer.unwrap(model)
    return adapters, weights


#: What takes seconds to import.
IMPORTS = ("transformers.models.llama.modeling_llama", "torchao.quantization", "bitsandbytes")


# all kinds in one test: they are imported once
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_two_ranks_equal_one_process() -> None:
    _store, place = listening()
    by_process = run_ranks(1 + RANKS, train, place, kind=None, imports=IMPORTS)
    for kind, (alone, weights), *found in zip(KINDS, *by_process, strict=True):
        for adapters, of_rank in found:
            assert of_rank <= weights
            for name, value in alone.items():
                np.testing.assert_array_equal(adapters[name], value, err_msg=f"{kind}: {name}")
