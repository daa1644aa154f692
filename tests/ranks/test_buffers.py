"""Ranks begin with the buffers of the first of them, in whatever layout those are."""

from __future__ import annotations

import torch

import streamer
from tests.ranks.common import run_ranks
from tests.ranks.programs import model, wrap_model


def buffers_of(rank: int) -> dict[str, list[float]]:
    """What a rank has in buffers, of which it has made others than the first rank."""
    made, mine = model(), torch.arange(6.0).reshape(2, 3) + 10 * rank
    made.register_buffer("turned", mine.t())
    # the places of its numbers are not in order in memory
    edges = torch.zeros(4, 4)
    edges.view(-1)[rank : rank + 3] = rank + 1.0
    made.register_buffer("edges", edges.to_sparse())
    made.layers[1].register_buffer("edges", made.edges * 2)
    wrapped = wrap_model(made)
    found = {name: buffer.to_dense().tolist() for name, buffer in wrapped.named_buffers()}
    streamer.unwrap(wrapped)
    return found


def test_all_ranks_have_those_of_the_first() -> None:
    first, second = run_ranks(2, buffers_of)
    assert first == second
    assert first["turned"] == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert first["edges"][0] == [1.0, 1.0, 1.0, 0.0] and first["layers.1.edges"][0] == [2.0, 2.0, 2.0, 0.0]
