"""Tensors that are concatenations of others, compared with PyTorch's results for their values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path

import pytest
import torch
from transformers.core_model_loading import Concatenate, Interleave, MergeModulelist, Transpose

from streamer.pretrained.architecture import Joining
from streamer.pretrained.files import Stored

Made = Callable[[Sequence[torch.Tensor]], torch.Tensor]


def by_rules(*operations: object) -> Made:
    """As transformers makes a stack of the gates (the first half of the tensors) and the rest."""

    def made(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        half = len(tensors) // 2
        held: dict[str, object] = {"gate": [*tensors[:half]], "up": [*tensors[half:]]}
        for each in operations:
            held = each.convert(held, source_patterns=["gate", "up"], target_patterns=["both"])  # type: ignore
        (found,) = held.values()
        assert isinstance(found, torch.Tensor)
        return found

    return made


def halves(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.stack([*tensors[:3]]), torch.stack([*tensors[3:]])]


def turned(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    (found,) = Transpose(1, 2).convert({"a": torch.stack([*tensors])}, ["a"], ["b"]).values()
    return found


def written(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    tensors[2].zero_()
    return torch.stack([*tensors])


ROWS_OF_4 = [(2, 4), (2, 4), (2, 4), (6, 4), (6, 4), (6, 4)]
SQUARE = [(4, 4)] * 6
IN_ORDER: dict[str, tuple[Made, list[tuple[int, ...]]]] = {
    "experts": (by_rules(MergeModulelist(dim=0), Concatenate(dim=1)), ROWS_OF_4),
    "stack": (torch.stack, SQUARE),
    "stack of rows": (lambda tensors: torch.stack([*tensors], dim=-2), [(4,)] * 6),
    "cat": (lambda tensors: torch.cat([*tensors]), ROWS_OF_4),
    "one": (lambda tensors: tensors[3], ROWS_OF_4),
    "two stacks": (lambda tensors: torch.cat(halves(tensors)[::-1]), SQUARE),
    "stacks of stacks": (lambda tensors: torch.stack(halves(tensors), dim=1), SQUARE),
}
OTHERWISE: dict[str, tuple[Made, list[tuple[int, ...]]]] = {
    "interleaved": (by_rules(MergeModulelist(dim=0), Concatenate(dim=1), Interleave(dim=1)), ROWS_OF_4),
    "turned": (turned, SQUARE),
    "columns": (lambda tensors: torch.cat([*tensors], dim=-1), SQUARE),
    "rows in turn": (lambda tensors: torch.stack([*tensors], dim=1), SQUARE),
    "by another name": (lambda tensors: torch.stack([*tensors], axis=1), SQUARE),  # type: ignore[call-overload]
    "a part": (lambda tensors: torch.stack([*tensors])[:, 1:], SQUARE),
    "written": (written, SQUARE),
    "with another": (lambda tensors: torch.stack([*tensors, torch.zeros_like(tensors[0])]), SQUARE),
    "nothing": (lambda tensors: torch.cat([*tensors]), [(0, 4)] * 6),
}


@pytest.mark.parametrize("name", [*IN_ORDER, *OTHERWISE])
def test_pieces_are_those_of_the_values(name: str) -> None:
    make, shapes = (IN_ORDER | OTHERWISE)[name]
    stored = [Stored(str(n), Path("file"), torch.float32, shape, 0) for n, shape in enumerate(shapes)]
    joining = Joining()
    with joining:
        made = make([*map(joining.empty, stored)])
    pieces = joining.pieces(made)
    assert bool(pieces) == (name in IN_ORDER)
    values = {it.name: torch.rand(it.shape) for it in stored}
    if pieces:
        whole = make([*values.values()])
        assert made.shape == whole.shape and sum(prod(it.shape) for it in pieces) == whole.numel()
        assert torch.equal(torch.cat([values[it.name].flatten() for it in pieces]), whole.flatten())
