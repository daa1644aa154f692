"""The command `streamer data`: what a run's data is made of, and what of it is learnt, to be looked at."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import numpy as np
import torch

from streamer.app.config import Config
from streamer.app.data.load import load_data
from streamer.app.data.rows import Rows
from streamer.app.data.splits import IGNORED, Split, TokenData

#: What stands around text that is learnt: in a terminal, and elsewhere.
COLOURS, BRACKETS = ("\033[1;32m", "\033[0m"), ("⟦", "⟧")


def show_data(config: Config, count: int) -> None:
    """Print what the data of ``config`` is made of, and the first ``count`` texts of its first epoch, or,
    where batches are crops at random, the first crops, with what is learnt marked. Raises ConfigError for
    data that cannot be used."""
    data = load_data(config)
    marks = COLOURS if sys.stdout.isatty() else BRACKETS
    print(f"data: {data.sources}")
    if not data.targets and not config.run.epochs:
        for line in _of_text(data):
            print(line)
        samples = _crops(data, config, count)
    else:
        given = config.data
        rows = Rows(data, given.context, given.batch_size, given.packing, config.run.seed)
        for line in _of_rows(data, rows) if rows.has_documents else _of_text(data):
            print(line)
        print(f"an epoch is {rows.steps(1):,} steps of {given.batch_size} x {given.context} {data.unit}s")
        samples = _texts(data, rows, count)
    if count:
        print(f"\nWhat is learnt is {'coloured' if marks is COLOURS else 'in ' + ' '.join(marks)}.")
    for number, (tokens, learnt, cut) in enumerate(samples, 1):
        more = f", and {cut:,} more that data.context = {config.data.context} cuts" if cut else ""
        print(f"\n--- {number}: {len(tokens):,} {data.unit}s, {sum(learnt):,} of them learnt{more}")
        print(marked(tokens, learnt, data.decode, marks))


def marked(
    tokens: Sequence[int],
    learnt: Sequence[bool],
    decode: Callable[[Sequence[int]], str],
    marks: Sequence[str],
) -> str:
    """The text of ``tokens``, with ``marks`` around the parts that are learnt."""
    text, shown, at = "", "", 0
    for is_learnt, part in groupby(learnt):
        at += len([*part])
        # a tokenizer may write a token at the beginning otherwise than behind others
        longer = decode(tokens[:at])
        more, text = longer[len(text) :], longer
        shown += f"{marks[0]}{more}{marks[1]}" if is_learnt else more
    return shown


#: Tokens, which of them are learnt, and how many more the document has.
Sample = tuple[list[int], list[bool], int]


def _texts(data: TokenData, rows: Rows, count: int) -> Iterator[Sample]:
    targets = data.targets.get("train", data.train)
    for begin, length, whole in rows.first(count):
        place = slice(begin + 1, begin + 1 + length)
        learnt = [False, *(targets[place].long() != IGNORED).tolist()]
        yield data.train[begin : begin + 1 + length].tolist(), learnt, whole - length


def _crops(data: TokenData, config: Config, count: int) -> Iterator[Sample]:
    draws = torch.Generator().manual_seed(config.run.seed)
    while count > 0:
        tokens, targets = data.batch("train", config.data.batch_size, config.data.context, draws)
        for x, y in zip(tokens[:count], targets[:count], strict=True):
            yield [*x.tolist(), int(y[-1])], [False, *(y != IGNORED).tolist()], 0
        count -= len(tokens)


def _of_text(data: TokenData) -> Iterator[str]:
    yield f"train: {data.train.numel():,} {data.unit}s; val: {data.val.numel():,}; all of them are learnt"


def _of_rows(data: TokenData, rows: Rows) -> Iterator[str]:
    splits: tuple[Split, ...] = ("train", "val")
    for split in splits:
        lengths = np.diff(data.documents[split].numpy())
        median, most_of_them, longest = np.percentile(lengths, [50, 90, 100], method="higher")
        yield (
            f"{split}: {len(lengths):,} conversations of {data.tokens(split).numel():,} tokens, "
            f"{data.count_learnt(split):,} of them learnt; half have up to {median:,} tokens, nine of ten up "
            f"to {most_of_them:,}, the longest {longest:,}"
        )
    if rows.cut:
        yield f"data.context = {rows.context} cuts the ends of {rows.cut:,} conversations to train on"
    if left_out := rows.left_out:
        yield f"{left_out:,} are left out: nothing of them is learnt before they are cut"
    packed = "several to a row, none sees another" if rows.packing else "one to a row"
    yield f"{packed}: rows are full to {100 * rows.fullness:.0f}%"
