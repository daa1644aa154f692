"""Batches of rows, several packed texts in each."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from streamer.integrations.causal_lm import IGNORED, without_adapters

#: `streamer.wrap`'s ``batch_dims`` for the batches of `Rows`: these arguments of layers have a row for each
#: example.
ROWS = {"attention_mask": 0, "position_ids": 0, "position_embeddings": 0}
#: Tokens of each of the two texts by which `keeps_texts_apart` decides, and how far their logits may differ.
PROBE, TOLERANCE = 6, 0.02


@dataclass(frozen=True)
class Rows:
    """Puts examples into a batch of rows, padded on the right with ``pad``. Packed texts stay in one row.

    TRL's own collator makes one long row of a packed batch: then layers cannot run a part of the batch
    (``micro_batch_size``), and the mask of PyTorch's attention grows with the square of all tokens.
    """

    pad: int
    #: for a model that takes ``position_ids``
    has_positions: bool = True

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """``input_ids``, ``labels`` and, if the model takes them, ``position_ids``, int64 [examples, time].
        Positions begin at 0 with each text of a row, by which models keep texts apart."""
        shape = len(examples), max(len(example["input_ids"]) for example in examples)
        tokens, labels = torch.full(shape, self.pad), torch.full(shape, IGNORED)
        positions = torch.arange(shape[1]).repeat(shape[0], 1)
        for row, example in enumerate(examples):
            size = len(example["input_ids"])
            tokens[row, :size] = torch.as_tensor(example["input_ids"])
            labels[row, :size] = torch.as_tensor(example["labels"])
            begin = 0
            for length in example.get("seq_lengths") or [size]:
                labels[row, begin] = IGNORED  # the text before it does not predict it
                positions[row, begin : begin + length] = torch.arange(length)
                begin += length
        batch = {"input_ids": tokens, "labels": labels}
        return {**batch, "position_ids": positions} if self.has_positions else batch


def takes_positions(model: nn.Module) -> bool:
    """Whether the forward of ``model`` has an argument ``position_ids``."""
    return "position_ids" in inspect.signature(type(without_adapters(model)).forward).parameters


@torch.no_grad()
def keeps_texts_apart(model: nn.Module) -> bool:
    """Whether the logits of a text that follows another one in its row are those of the text alone, when only
    ``position_ids`` say where it begins. Costs two forwards of some tokens."""
    core = without_adapters(model)
    if not takes_positions(model):
        return False
    was_training = model.training
    model.eval()
    try:
        vocabulary = core.get_input_embeddings().num_embeddings
        text = torch.arange(1, PROBE + 1)[None] % max(2, min(vocabulary, 97))
        row, positions = torch.cat([text.flip(1), text], dim=1), torch.arange(PROBE).repeat(2)[None]
        alone = model(text, use_cache=False).logits.float()
        packed = model(row, position_ids=positions, use_cache=False).logits.float()[:, PROBE:]
        # rounding differs; a text that attends to the other one differs in most of its logits by much more
        scale = float(alone.abs().max()) or 1.0
        return bool((packed - alone).abs().max() < TOLERANCE * scale)
    except (TypeError, ValueError, NotImplementedError):
        return False
    finally:
        model.train(was_training)
