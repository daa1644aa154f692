"""Batches that go through all of the data: whole conversations, several of them packed into a row, or windows
of a text, in an order that is shuffled anew for each epoch.

A row has ``context`` tokens and as many targets. Conversations in one row do not see each other: positions
begin anew with each, by which models of transformers know where one ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from streamer.app.config import ConfigError
from streamer.app.data.splits import IGNORED, Split, TokenData

#: Rows that are filled at the same time, of which a conversation goes into the first that has room.
OPEN_ROWS = 32


class RowBatch(NamedTuple):
    """Tokens and targets int64 [rows, context], and positions of the same shape, which begin anew with each
    conversation; None where each row has one."""

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor | None


#: Parts of a row, each where its tokens begin in their split, and how many they are.
Row = list[tuple[int, int]]


@dataclass
class Rows:
    """The rows of ``data`` in sequences of ``context`` tokens, ``batch_size`` rows to a batch.

    Documents go into rows whole. A text that is longer than a row goes into several; a conversation is cut at
    its end (`cut` says how many are), and one of which nothing is learnt is left out. Without documents that
    are learnt in part a row is a window. With ``packing`` short documents share rows.
    """

    data: TokenData
    context: int
    batch_size: int
    packing: bool
    seed: int
    _packed: dict[tuple[Split, int], list[Row]] = field(default_factory=dict, init=False, repr=False)

    def steps(self, epochs: int) -> int:
        """Batches in so many epochs."""
        return sum(self._batches(epoch) for epoch in range(epochs))

    def epoch_of(self, step: int) -> tuple[int, int]:
        """The epoch of a step, counted from 0, and the step's number in it."""
        epoch = 0
        while step >= (count := self._batches(epoch)):
            step, epoch = step - count, epoch + 1
        return epoch, step

    def batch(self, step: int) -> RowBatch:
        """The batch of a step of training, counted from 0, whatever steps have been made before."""
        epoch, number = self.epoch_of(step)
        rows = self._rows("train", epoch)
        return self._made("train", rows[number * self.batch_size : (number + 1) * self.batch_size])

    def val_batches(self, count: int) -> list[RowBatch]:
        """``count`` batches of rows spaced evenly in the validation split, or all that there are."""
        rows = self._rows("val", 0)
        wanted = min(count * self.batch_size, len(rows))
        chosen = [rows[place * len(rows) // wanted] for place in range(wanted)]
        parts = range(0, wanted, self.batch_size)
        return [self._made("val", chosen[begin : begin + self.batch_size]) for begin in parts]

    @cached_property
    def cut(self) -> int:
        """Conversations to train on that are longer than a row."""
        if not self.has_documents:
            return 0
        bounds = self.data.documents["train"].numpy()
        long = np.flatnonzero(self._lengths("train") > self.context)
        return sum(not self._is_text("train", int(bounds[i]), int(bounds[i + 1])) for i in long)

    @property
    def left_out(self) -> int:
        """Documents to train on of which a row would have nothing that is learnt."""
        if not self.has_documents:
            return 0
        begins = {begin for begin, _ in self._pieces("train")}
        return sum(begin not in begins for begin in self.data.documents["train"][:-1].tolist())

    @property
    def fullness(self) -> float:
        """The share of the first epoch's rows that documents take."""
        rows = self._rows("train", 0)
        return sum(length for row in rows for _, length in row) / (len(rows) * self.context)

    def first(self, count: int) -> Iterator[tuple[int, int, int]]:
        """The first parts of the first epoch: where each begins among the tokens to train on, the targets
        that it has in its row, and those that it has in all."""
        parts = [part for row in self._rows("train", 0) for part in row]
        begins = {begin for begin, _ in parts}
        ends = self.data.documents["train"].numpy() if self.has_documents else None
        for begin, length in parts[:count]:
            whole = length
            # a text may go on in another part
            if ends is not None and begin + length not in begins:
                whole = int(ends[np.searchsorted(ends, begin, side="right")]) - begin - 1
            yield begin, length, whole

    @property
    def has_documents(self) -> bool:
        """Whether rows are of documents, and not windows."""
        return bool(self.data.targets)

    def _batches(self, epoch: int) -> int:
        return -(-len(self._rows("train", epoch)) // self.batch_size)

    def _lengths(self, split: Split) -> np.ndarray:
        """Of each document the targets that it has."""
        return np.diff(self.data.documents[split].numpy()) - 1

    def _rows(self, split: Split, epoch: int) -> list[Row]:
        key = split, epoch
        if key not in self._packed:
            for old in [each for each in self._packed if each[0] == split and each[1] < epoch - 1]:
                del self._packed[old]
            self._packed[key] = self._pack(split, epoch)
            if not self._packed[key]:
                what = f"data.context = {self.context} {self.data.unit}s"
                if self.has_documents:
                    raise ConfigError(
                        f"no conversation of the {split} split has anything to learn within {what}: raise "
                        "it, or give more data"
                    )
                raise ConfigError(
                    f"the {split} split has no row of {what}: give more data or a smaller context"
                )
        return self._packed[key]

    def _pack(self, split: Split, epoch: int) -> list[Row]:
        pieces = self._pieces(split)
        if split == "train":
            order = np.random.default_rng((self.seed, epoch)).permutation(len(pieces))
            pieces = [pieces[number] for number in order]
        if not self.packing or not self.has_documents:
            return [[piece] for piece in pieces]
        rows: list[Row] = []
        opened: list[tuple[int, Row]] = []  # each with the tokens that it has room for
        for begin, length in pieces:
            for place, (room, row) in enumerate(opened):
                if length <= room:
                    row.append((begin, length))
                    opened[place] = room - length, row
                    break
            else:
                row = [(begin, length)]
                rows.append(row)
                opened.append((self.context - length, row))
                if len(opened) > OPEN_ROWS:
                    opened.remove(min(opened, key=lambda each: each[0]))
        return rows

    def _pieces(self, split: Split) -> Row:
        if not self.has_documents:
            size = len(self.data.tokens(split)) - 1
            return [(begin, self.context) for begin in range(0, size - self.context + 1, self.context)]
        bounds = self.data.documents[split].numpy()
        pieces: Row = []
        for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            if end - begin - 1 > self.context and self._is_text(split, begin, end):
                starts = range(begin, end - 1, self.context)
                pieces += [(start, min(self.context, end - 1 - start)) for start in starts]
            elif self._is_learnt(split, begin, length := min(self.context, end - begin - 1)):
                pieces.append((begin, length))
        return pieces

    def _is_text(self, split: Split, begin: int, end: int) -> bool:
        """Whether all of a document is learnt, so that it may be cut anywhere."""
        targets = self.data.targets.get(split)
        return targets is None or bool((targets[begin + 1 : end] != IGNORED).all())

    def _is_learnt(self, split: Split, begin: int, length: int) -> bool:
        targets = self.data.targets.get(split)
        if length < 1:
            return False
        return targets is None or bool((targets[begin + 1 : begin + 1 + length] != IGNORED).any())

    def _made(self, split: Split, rows: Sequence[Row]) -> RowBatch:
        tokens, targets = self.data.tokens(split), self.data.targets.get(split, self.data.tokens(split))
        shape = len(rows), self.context
        x = torch.zeros(shape, dtype=torch.int64)
        y = torch.full(shape, IGNORED, dtype=torch.int64)
        positions = torch.zeros(shape, dtype=torch.int64)
        for number, row in enumerate(rows):
            at = 0
            for begin, length in row:
                place = slice(at, at + length)
                x[number, place] = tokens[begin : begin + length].long()
                y[number, place] = targets[begin + 1 : begin + 1 + length].long()
                positions[number, place] = torch.arange(length)
                at += length
            # what is behind the last one is seen by nothing that is learnt, and belongs to no conversation
            positions[number, at:] = torch.arange(self.context - at)
        are_packed = self.packing and self.has_documents
        return RowBatch(x, y, positions if are_packed else None)
