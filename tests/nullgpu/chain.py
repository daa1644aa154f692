"""A model whose numbers are moved by copies alone, so that they are right where kernels compute nothing.

A layer, a `Link`, hands its input on. In forward and in backward it copies its weight to the host, in the
stream of its kernels, as a kernel would read it there; its gradient is copied from the host, as a kernel
would write it. A `Record` holds what was read against what the host held.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

import streamer

WIDTH = 64
#: AdamW halves each weight, to the bit: the gradient's part of the step is lost in rounding.
HALVING = {"lr": 0.5, "weight_decay": 1.0, "eps": 1e30}

_numbers = itertools.count()


class Record:
    """What links have read, and the values that they should have read: of a weight all elements are equal."""

    def __init__(self) -> None:
        self.expected: dict[int, float] = {}
        self.gradients: dict[int, float] = {}
        self.read: list[tuple[int, float, torch.Tensor]] = []

    def look(self, number: int, weight: torch.Tensor) -> None:
        seen = torch.empty(weight.shape, dtype=weight.dtype, pin_memory=True)
        self.read.append((number, self.expected[number], seen.copy_(weight, non_blocking=True)))

    def wrong(self) -> list[tuple[int, float, float, float]]:
        """The link, what it should have read, and the least and the largest element of what it has read."""
        torch.cuda.synchronize()
        found = ((number, value, *seen.float().aminmax()) for number, value, seen in self.read)
        return [
            (number, value, least.item(), most.item())
            for number, value, least, most in found
            if not least == most == value
        ]


#: By the number of a link: operators take no objects.
RECORDS: dict[int, Record] = {}


@torch.library.custom_op("streamer_tests::hand_on", mutates_args=())
def hand_on(x: torch.Tensor, weight: torch.Tensor, number: int) -> torch.Tensor:
    RECORDS[number].look(number, weight)
    return x.clone()


@torch.library.custom_op("streamer_tests::gradient", mutates_args=())
def gradient(weight: torch.Tensor, number: int) -> torch.Tensor:
    record = RECORDS[number]
    record.look(number, weight)
    source = torch.empty(weight.shape, dtype=weight.dtype, pin_memory=True).fill_(record.gradients[number])
    return torch.empty_like(weight).copy_(source, non_blocking=True)


@hand_on.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, number: int) -> torch.Tensor:
    return torch.empty_like(x)


@gradient.register_fake
def _(weight: torch.Tensor, number: int) -> torch.Tensor:
    return torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, weight, ctx.number = inputs
    ctx.save_for_backward(weight)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    return grad.clone(), gradient(ctx.saved_tensors[0], ctx.number), None


hand_on.register_autograd(_backward, setup_context=_keep)


class Link(nn.Module):
    def __init__(self, record: Record, value: float, elements: int) -> None:
        super().__init__()
        self.number = next(_numbers)
        self.weight = nn.Parameter(torch.full((elements,), value))
        RECORDS[self.number] = record
        record.expected[self.number] = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return hand_on(x, self.weight, self.number)


class Chain(nn.Module):
    """Links in a row, the first of which is in no layer; its ``head`` makes a loss."""

    def __init__(self, length: int = 4, elements: int = 1 << 14) -> None:
        super().__init__()
        self.record = Record()
        self.first = Link(self.record, 1.0, elements)
        self.links = nn.ModuleList(Link(self.record, 1.0 + number, elements) for number in range(1, length))
        self.head = nn.Linear(WIDTH, 32, bias=False)

    def __deepcopy__(self, memo: object) -> Chain:
        raise TypeError("a link is known by its number: build another chain")

    def forward(self, x: torch.Tensor, *, is_chunked: bool = False) -> torch.Tensor:
        x = self.first(x)
        for link in self.links:
            x = link(x)
        if is_chunked:
            targets = torch.zeros(x.shape[:-1], dtype=torch.long, device=x.device)
            return streamer.chunked_cross_entropy(x, self.head.weight, targets, chunk_size=4)
        return self.head(x.to(self.head.weight.dtype)).float().mean()

    def all_links(self) -> list[Link]:
        return [self.first, *self.links]

    def halve(self) -> None:
        """Expect the weights that `HALVING` leaves."""
        for number in self.record.expected:
            self.record.expected[number] /= 2
