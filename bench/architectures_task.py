"""An architecture of the transformers library, tiny and with random weights, and what it is trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn

VOCAB = 64

#: (model, step) -> loss
LossOf = Callable[[nn.Module, int], torch.Tensor]

TOKENS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

#: Sizes by the names that most configs have.
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
TEXT = {**TOKENS, **SIZES, "max_position_embeddings": 64}
GROUPED = {**TEXT, "num_key_value_heads": 2}
GPT = {**TOKENS, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 4}
IMAGE = {**SIZES, "image_size": 16, "patch_size": 4, "num_labels": 3}
TWO_STACKS = {
    **TOKENS,
    "decoder_start_token_id": 2,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "dropout": 0.1,
}


@dataclass(frozen=True)
class Architecture:
    """``model`` names a class of the transformers library, ``settings`` are its config's.

    ``layers`` is the argument of `streamer.wrap`. ``order`` says why gradients are not equal to the bit,
    where sums are added up in another order than by plain PyTorch.
    """

    name: str
    model: str
    loss: LossOf
    settings: dict[str, Any]
    layers: str | Sequence[str] | None = None
    order: str = ""
    what: str = field(default="", kw_only=True)

    def build(self) -> nn.Module:
        """The model in training mode, with the weights of seed 0."""
        torch.manual_seed(0)
        kind = getattr(transformers, self.model)
        model: nn.Module = kind(kind.config_class(**self.settings))
        return model.train()


def random_tokens(step: int, size: int = 4, time: int = 12) -> torch.Tensor:
    """int64 [size, time], without special tokens."""
    return torch.randint(4, VOCAB, (size, time), generator=_generator(step))


def normal(step: int, *shape: int) -> torch.Tensor:
    """fp32 [shape] from a standard normal distribution."""
    return torch.randn(shape, generator=_generator(step))


def _generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + step)


def text(model: nn.Module, step: int) -> torch.Tensor:
    """The loss of a language model, on its own inputs."""
    tokens = random_tokens(step)
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def padded_text(model: nn.Module, step: int) -> torch.Tensor:
    """The same where a sequence is padded on the left."""
    tokens = random_tokens(step)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    loss: torch.Tensor = model(input_ids=tokens, attention_mask=mask, labels=tokens).loss
    return loss


def translation(model: nn.Module, step: int) -> torch.Tensor:
    """The loss of one sequence from another."""
    targets = random_tokens(step + 500, time=10)
    loss: torch.Tensor = model(input_ids=random_tokens(step), labels=targets).loss
    return loss


def images(size: int) -> LossOf:
    """The loss of two classes of square images."""

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        pixels = normal(step, 2, 3, size, size)
        loss: torch.Tensor = model(pixel_values=pixels, labels=torch.tensor([0, 1])).loss
        return loss

    return loss_of


def sound(model: nn.Module, step: int) -> torch.Tensor:
    """The loss of two classes of sounds."""
    loss: torch.Tensor = model(normal(step, 2, 800), labels=torch.tensor([0, 1])).loss
    return loss


def speech(model: nn.Module, step: int) -> torch.Tensor:
    """The loss of a text from a spectrogram."""
    tokens = random_tokens(step, size=2, time=8)
    loss: torch.Tensor = model(input_features=normal(step, 2, 8, 40), labels=tokens).loss
    return loss


def captions(model: nn.Module, step: int) -> torch.Tensor:
    """The contrastive loss of texts and images."""
    tokens, pixels = random_tokens(step, size=2), normal(step, 2, 3, 16, 16)
    loss: torch.Tensor = model(input_ids=tokens, pixel_values=pixels, return_loss=True).loss
    return loss


def image_text(model: nn.Module, step: int) -> torch.Tensor:
    """The loss of a text that begins with an image of 16 patches (token 3)."""
    tokens = torch.cat([torch.full((2, 16), 3), random_tokens(step, size=2)], dim=1)
    pixels = normal(step, 2, 3, 16, 16)
    loss: torch.Tensor = model(input_ids=tokens, pixel_values=pixels, labels=tokens).loss
    return loss


def reconstruction(model: nn.Module, step: int) -> torch.Tensor:
    """The loss of an image from some of its patches."""
    loss: torch.Tensor = model(pixel_values=normal(step, 2, 3, 16, 16)).loss
    return loss


def forecast(model: nn.Module, step: int) -> torch.Tensor:
    """The loss of the rest of a series of two channels."""
    past, future = normal(step, 2, 32, 2), normal(step + 500, 2, 8, 2)
    loss: torch.Tensor = model(past_values=past, future_values=future).loss
    return loss
