"""Ways to let a weight that crosses the bus meet more tokens: what `bench.tokens_per_transfer` compares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import streamer
from bench.versus_contenders import Streamer
from bench.versus_task import Task
from streamer.backends.base import Backend
from streamer.engine.handle import wrapped

#: The variant that nothing is done for.
BASELINE = "whole batch"


@dataclass(frozen=True)
class Variant:
    """How a model is streamed and its loop written; as it stands, two slots and the whole batch at once.

    ``micro_batches``: slices of the batch that each layer takes one after another (``micro_batch_size``).
    ``parts``: parts of the batch that the loop calls backward for, one after another.
    ``kept``: the share of layers, the last ones, with ``activations="keep"``; others have ``activations``.
    ``chunked``: the loss by `streamer.chunked_cross_entropy`.
    """

    num_slots: int = 2
    micro_batches: int = 1
    parts: int = 1
    activations: str = "recompute"
    kept: float = 0.0
    chunked: bool = False

    def options(self, *, batch_size: int, n_layer: int) -> dict[str, Any]:
        """The arguments of `streamer.wrap` that are not its own choice."""
        options: dict[str, Any] = {"num_slots": self.num_slots}
        if self.micro_batches > 1:
            options["micro_batch_size"] = -(-batch_size // self.micro_batches)
        num_kept = round(self.kept * n_layer)
        policies = [self.activations] * (n_layer - num_kept) + ["keep"] * num_kept
        if set(policies) != {"recompute"}:
            options["activations"] = policies
        return options

    def split(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parts of a batch."""
        return tokens.split(-(-len(tokens) // self.parts))


def variants(*, slots: int, parts: int) -> dict[str, Variant]:
    """By name: one thing changed at a time, then all that saves device memory. ``slots`` is what more slots
    are, ``parts`` what a batch is cut into."""
    return {
        BASELINE: Variant(),
        f"{slots} slots": Variant(num_slots=slots),
        "accumulation": Variant(parts=parts),
        "micro-batches": Variant(micro_batches=parts),
        "offload": Variant(activations="recompute+offload"),
        "keep half": Variant(kept=0.5),
        "chunked loss": Variant(chunked=True),
        "all that saves": Variant(micro_batches=parts, activations="recompute+offload", chunked=True),
    }


class Streamed(Streamer):
    """This library in the manner of ``variant``, on ``backend`` or that of the task's device."""

    def __init__(self, task: Task, variant: Variant, *, backend: Backend | None = None) -> None:
        options = variant.options(batch_size=task.batch_size, n_layer=task.sizes["n_layer"])
        super().__init__(task, backend=backend, **options)
        self.variant = variant
        if variant.chunked:
            give_hidden(self.model)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.variant.chunked:
            return chunked_loss(self.model, tokens[:, :-1], tokens[:, 1:])
        return super().loss(tokens)

    def step(self, tokens: torch.Tensor) -> None:
        for part in self.variant.split(tokens):
            (self.loss(part) * (len(part) / len(tokens))).backward()
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        super().close()
        wrapped(self.model).close()


def give_hidden(model: nn.Module) -> None:
    """Let the model return what its head is given: the loss has the head's weight."""
    model.lm_head.forward = lambda hidden: hidden


def chunked_loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The cross entropy of a model of `give_hidden`."""
    loss: torch.Tensor = streamer.chunked_cross_entropy(model(tokens), model.lm_head.weight, targets)
    return loss


def plain_bytes(*, parameters: int, tokens: int, n_layer: int, n_embd: int) -> Mapping[str, int]:
    """What plain PyTorch holds in fp32, its layers checkpointed: weights, gradients and AdamW's moments at
    rest, the inputs of the layers between forward and backward."""
    return {"at_rest": 16 * parameters, "saved_inputs": 4 * n_layer * tokens * n_embd}
