"""Training data: two splits of tokens, of which crops are taken. Of a text as it is, a token is a byte."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch

from streamer.app.config import ConfigError
from streamer.app.text_files import find_files, read_bytes

VOCAB_SIZE = 256
#: The target of a token that is not to be learnt, as torch.nn.functional.cross_entropy has it.
IGNORED = -100

Batch = tuple[torch.Tensor, torch.Tensor]
Split = Literal["train", "val"]

K = TypeVar("K", bound=Hashable)


def _decode_bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode("utf-8", errors="replace")


@dataclass(frozen=True, eq=False)
class TokenData:
    """Two splits of a text, ``train`` and ``val``: tensors of tokens [length] on the CPU, neither empty.

    ``targets`` has, where some tokens are not to be learnt, the tokens of a split again with `IGNORED` in
    their place. ``unit`` is what a token is called, ``vocab_size`` how many there are, ``decode`` makes a
    text of some; ``tokenizer`` is the transformers library's, where they are of one.
    """

    train: torch.Tensor
    val: torch.Tensor
    targets: Mapping[Split, torch.Tensor] = field(default_factory=dict)
    unit: str = "byte"
    vocab_size: int = VOCAB_SIZE
    decode: Callable[[Sequence[int]], str] = _decode_bytes
    tokenizer: Any = None
    _found: dict[tuple[Split, int], torch.Tensor] = field(default_factory=dict, init=False, repr=False)

    def batch(self, split: Split, batch_size: int, context: int, generator: torch.Generator) -> Batch:
        """Crops of a split at random places: tokens and, one on, targets, int64 [batch_size, context].

        Raises ConfigError where the split has fewer than context + 1 tokens.
        """
        count, starts = self._starts(split, context)
        chosen = torch.randint(count, (batch_size,), generator=generator)
        return self._crops(split, chosen if starts is None else starts[chosen], context)

    def val_batches(self, count: int, batch_size: int, context: int) -> list[Batch]:
        """``count`` batches as from ``batch``, of crops spaced evenly from the first token of the validation
        split to its last: the same at every call, so that losses on them can be compared.

        Raises ConfigError where the split has fewer than context + 1 tokens.
        """
        places, starts = self._starts("val", context)
        crops = count * batch_size
        chosen = torch.arange(crops) * (places - 1) // max(1, crops - 1)
        chosen = chosen if starts is None else starts[chosen]
        return [self._crops("val", some, context) for some in chosen.split(batch_size)]

    def unigram_entropy(self) -> float:
        """Nats per target of the validation split under the frequencies of the training split's, each token
        counted once more than it occurs: the loss of a model that knows those frequencies alone."""
        train, val = (
            torch.bincount(self._learnt(split), minlength=self.vocab_size).double()
            for split in ("train", "val")
        )
        log_frequency = ((train + 1) / (train + 1).sum()).log()
        return -(val / val.sum() * log_frequency).sum().item()

    def tokens(self, split: Split) -> torch.Tensor:
        return self.train if split == "train" else self.val

    def count_learnt(self, split: Split) -> int:
        """How many tokens of a split are to be learnt."""
        return len(self._learnt(split))

    def _targets(self, split: Split) -> torch.Tensor:
        return self.targets.get(split, self.tokens(split))

    def _learnt(self, split: Split) -> torch.Tensor:
        targets = self._targets(split)
        # those of bytes are unsigned, and all of them are learnt
        return targets[targets != IGNORED] if split in self.targets else targets

    def _starts(self, split: Split, context: int) -> tuple[int, torch.Tensor | None]:
        """In how many places a crop of a split can start, and where if not all have something to learn."""
        size = len(self.tokens(split))
        if size <= context:
            other = "larger" if split == "val" else "smaller"
            raise ConfigError(
                f"the {split} split has {size} {self.unit}s and data.context = {context} needs {context + 1}"
                f": give more text, a {other} data.val_fraction or a smaller context"
            )
        if split not in self.targets:
            return size - context, None
        if (split, context) not in self._found:
            learnt = (self.targets[split] != IGNORED).cumsum(0)
            self._found[split, context] = (learnt[context:] > learnt[:-context]).nonzero().flatten()
        found = self._found[split, context]
        if not len(found):
            raise ConfigError(f"the {split} split has nothing to learn: give more documents")
        return len(found), found

    def _crops(self, split: Split, starts: torch.Tensor, context: int) -> Batch:
        places = starts[:, None] + torch.arange(context)
        return self.tokens(split)[places].long(), self._targets(split)[places + 1].long()


def load_bytes(paths: Sequence[str | os.PathLike[str]] = (), *, val_fraction: float = 0.05) -> TokenData:
    """The text at ``paths`` (see ``find_files``), split into training and validation by file.

    Which file goes where follows from a hash of its path below the folder that holds them all, so it is the
    same on every machine: see `held_out`. A text in a single file is cut instead: its tail is for validation.
    Either way the files of a split follow each other in the order of their paths.

    Raises ConfigError, in one line, as ``find_files`` does, and for a single file of a single byte.
    """
    texts = {path: read_bytes(path) for path in find_files(paths)}
    if len(texts) == 1:
        [(path, text)] = texts.items()
        cut = cut_before_tail(len(text), val_fraction, f"{path}: one byte")
        return TokenData(_tensor([text[:cut]]), _tensor([text[cut:]]))
    root = os.path.commonpath([path.absolute().parent for path in texts])
    held = held_out(
        {path: len(text) for path, text in texts.items()},
        lambda path: os.fsencode(path.absolute().relative_to(root).as_posix()),
        val_fraction,
    )
    return TokenData(
        train=_tensor([text for path, text in texts.items() if path not in held]),
        val=_tensor([text for path, text in texts.items() if path in held]),
    )


def held_out(sizes: Mapping[K, int], name: Callable[[K], bytes], val_fraction: float) -> set[K]:
    """Which of several texts are for validation: in the order of the hashes of their names, passing over
    those that would bring it above ``val_fraction`` of all; where that leaves none, the smallest."""
    # hash() differs from run to run
    by_hash = sorted(sizes, key=lambda key: hashlib.sha256(name(key)).digest())
    room = val_fraction * sum(sizes.values())
    held = set()
    for key in by_hash:
        if sizes[key] <= room:
            held.add(key)
            room -= sizes[key]
    return held or {min(by_hash, key=lambda key: sizes[key])}


def cut_before_tail(size: int, val_fraction: float, what: str) -> int:
    """Where a single text's tail for validation begins. Raises ConfigError where there is nothing to cut."""
    if size < 2:
        raise ConfigError(f"{what} cannot be split into training and validation; give more text")
    return size - min(size - 1, max(1, round(size * val_fraction)))


def _tensor(texts: Sequence[bytes]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)
