"""Two splits of tokens, and batches that are crops of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from streamer.app.config import ConfigError

VOCAB_SIZE = 256
#: Tokens that are counted at a time: those of large data do not fit into memory.
PART = 1 << 22
#: The target of a token that is not to be learnt: the default of torch.nn.functional.cross_entropy.
IGNORED = -100

Batch = tuple[torch.Tensor, torch.Tensor]
Split = Literal["train", "val"]


def _decode_bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode("utf-8", errors="replace")


@dataclass(frozen=True, eq=False)
class TokenData:
    """Two splits of a text, ``train`` and ``val``: tensors of tokens [length] on the CPU, neither empty.

    ``targets`` has, by split, its tokens with `IGNORED` in place of those that are not to be learnt; without
    ``targets`` all tokens are learnt. ``unit`` is the word for a token, ``vocab_size`` the number of
    different tokens, and ``decode`` makes text of tokens. ``tokenizer``, if there is one, is of the
    transformers library.
    """

    train: torch.Tensor
    val: torch.Tensor
    targets: Mapping[Split, torch.Tensor] = field(default_factory=dict)
    unit: str = "byte"
    vocab_size: int = VOCAB_SIZE
    decode: Callable[[Sequence[int]], str] = _decode_bytes
    tokenizer: Any = None
    #: what the tokens are of: a line for people
    sources: str = ""
    #: by split, where its documents begin, and after them its end: int64 [documents + 1]
    documents: Mapping[Split, torch.Tensor] = field(default_factory=dict)

    def batch(self, split: Split, batch_size: int, context: int, generator: torch.Generator) -> Batch:
        """Crops of a split at random places: tokens and, one on, targets, int64 [batch_size, context]. Data
        of which a part is learnt comes in `Rows` instead.

        Raises ConfigError where the split has fewer than context + 1 tokens.
        """
        starts = torch.randint(self._count_starts(split, context), (batch_size,), generator=generator)
        return self._crops(split, starts, context)

    def val_batches(self, count: int, batch_size: int, context: int) -> list[Batch]:
        """``count`` batches as from ``batch``, of crops spaced evenly from the first token of the validation
        split to its last: the same at every call, so that losses on them can be compared.

        Raises ConfigError where the split has fewer than context + 1 tokens.
        """
        crops = count * batch_size
        starts = torch.arange(crops) * (self._count_starts("val", context) - 1) // max(1, crops - 1)
        return [self._crops("val", some, context) for some in starts.split(batch_size)]

    def unigram_entropy(self) -> float:
        """Nats per target of the validation split under the frequencies of the training split's, each token
        counted once more than it occurs: the loss of a model that knows those frequencies alone."""
        train, val = (self._frequencies(split).double() for split in ("train", "val"))
        log_frequency = ((train + 1) / (train + 1).sum()).log()
        return -(val / val.sum() * log_frequency).sum().item()

    def tokens(self, split: Split) -> torch.Tensor:
        return self.train if split == "train" else self.val

    def count_learnt(self, split: Split) -> int:
        """How many tokens of a split are to be learnt."""
        return sum(len(part) for part in self._learnt(split))

    def _frequencies(self, split: Split) -> torch.Tensor:
        """How often each token is learnt in a split."""
        total = torch.zeros(self.vocab_size, dtype=torch.int64)
        for part in self._learnt(split):
            found = torch.bincount(part, minlength=self.vocab_size)
            if len(found) > len(total):
                raise ConfigError(
                    f"the data has token {len(found) - 1}, and the tokenizer knows {self.vocab_size}: give "
                    "the model's own tokenizer as data.tokenizer, or tokens that were made with it"
                )
            total += found
        return total

    def _targets(self, split: Split) -> torch.Tensor:
        return self.targets.get(split, self.tokens(split))

    def _learnt(self, split: Split) -> Iterator[torch.Tensor]:
        """What is learnt of a split, some millions of tokens at a time."""
        # bytes are unsigned, so that none must be compared with IGNORED
        for part in self._targets(split).split(PART):
            yield part[part != IGNORED] if split in self.targets else part

    def _count_starts(self, split: Split, context: int) -> int:
        """How many of a split's places, from 0, a crop can start at."""
        size = len(self.tokens(split))
        if size <= context:
            other = "larger" if split == "val" else "smaller"
            raise ConfigError(
                f"the {split} split has {size} {self.unit}s and data.context = {context} needs {context + 1}"
                f": give more text, a {other} data.val_fraction or a smaller context"
            )
        return size - context

    def _crops(self, split: Split, starts: torch.Tensor, context: int) -> Batch:
        places = starts[:, None] + torch.arange(context)
        return self.tokens(split)[places].long(), self._targets(split)[places + 1].long()
