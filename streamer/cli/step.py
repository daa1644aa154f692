"""One update of a wrapped language model, for `streamer train` and `streamer plan`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import streamer
from streamer.cli.config import Config
from streamer.integrations.causal_lm import CausalHead

#: Tokens [sequences, time], targets of the same shape, and options of the model's forward.
Batch = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def loss_function(model: nn.Module) -> Callable[[nn.Module, Batch], torch.Tensor]:
    """A function that computes the sum of the cross-entropies of a batch, in nats. It never holds all logits
    for a causal language model of transformers, nor for a model with a ``forward`` that takes ``loss_of``, a
    function of the last hidden states [sequences, time, width] and the head's weight. Other models return
    logits."""
    if "loss_of" in inspect.signature(model.forward).parameters:
        return _by_model
    head = CausalHead.of(model)

    def of_head(model: nn.Module, batch: Batch) -> torch.Tensor:
        assert head is not None
        tokens, targets, options = batch
        found = head.run(model, {"input_ids": tokens, **options})
        return _by_logits(model, batch) if found is None else head.sum_of_losses(found[0], targets)

    return _by_logits if head is None else of_head


def _by_model(model: nn.Module, batch: Batch) -> torch.Tensor:
    tokens, targets, _ = batch

    def loss_of(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return streamer.chunked_cross_entropy(hidden, weight, targets.to(hidden.device), reduction="sum")

    total: torch.Tensor = model(tokens, loss_of=loss_of)
    return total


def _by_logits(model: nn.Module, batch: Batch) -> torch.Tensor:
    tokens, targets, options = batch
    logits = logits_of(model(tokens, **options))
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten().to(logits.device), reduction="sum")


def logits_of(output: Any) -> torch.Tensor:
    """The logits from a model's output: the output itself, or its attribute."""
    logits: torch.Tensor = getattr(output, "logits", output)
    return logits


def step_on(
    config: Config,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[nn.Module, Batch], torch.Tensor],
    batches: Sequence[Batch],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One update by the mean loss over all tokens of ``batches``, each a forward and a backward. Returns the
    loss, and the norm of the gradient before clipping, None if layers are updated in backward."""
    count = sum(batch[1].numel() for batch in batches)
    total = torch.zeros(())
    for batch in batches:
        loss = loss_of(model, batch) / count
        loss.backward()
        total = total.to(loss.device) + loss.detach()
    norm = None
    if config.stream.update == "step":
        # 0 means no clipping, but the norm is still logged
        norm = streamer.clip_grad_norm_(model, config.train.max_grad_norm or math.inf)
    optimizer.step()
    optimizer.zero_grad()
    return total, norm
