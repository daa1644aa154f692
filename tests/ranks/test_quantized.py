"""Ranks share a quantized base, and its adapters learn what they learn in one process."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import streamer
from tests.ranks.common import run_ranks

pytest.importorskip("transformers", reason="transformers is not installed")
from tests.quantized import LAYERS, llama  # noqa: E402

STEPS, RANKS = 3, 2


def train(rank: int | None, kind: str) -> tuple[dict[str, np.ndarray], int]:
    """The adapters after some steps, and the bytes of host memory; of one process for rank None."""
    warnings.simplefilter("ignore")
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


@pytest.mark.parametrize("kind", ["torchao int8", "bitsandbytes nf4"])
@pytest.mark.filterwarnings("ignore")
def test_two_ranks_equal_one_process(kind: str) -> None:
    alone, weights = train(None, kind)
    found: list[Any] = run_ranks(RANKS, train, kind)
    for adapters, of_rank in found:
        assert of_rank <= weights
        for name, value in alone.items():
            np.testing.assert_array_equal(adapters[name], value, err_msg=name)
