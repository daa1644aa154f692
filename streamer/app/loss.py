"""The loss of a run's model, from all of its logits only where there is no other way."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import streamer
from streamer.app.data import IGNORED


def count_learnt(targets: torch.Tensor) -> int:
    """How many of them are learnt; 1 where none is, so that it can be divided by."""
    return max(1, int((targets != IGNORED).sum()))


class TokenLoss:
    """Mean cross-entropy in nats per token that is learnt (0 where none is), in fp32, of ``model``'s logits
    for tokens and targets [batch, time].

    They are made a chunk at a time (`streamer.chunked_cross_entropy`) by a model whose ``forward`` takes
    ``loss_of``, which it calls with its last hidden states [batch, time, width] and its head's weight and
    whose result it returns; and by one of transformers if its logits are found to be that product, perhaps
    with ``final_logit_softcapping``. Any other gives all of its logits, or an object that has ``logits``.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        takes = inspect.signature(model.forward).parameters
        self._summed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = self._of_logits
        if "loss_of" in takes:
            self._summed = self._by_model
        elif "logits_to_keep" in takes and (parts := _parts(model)) is not None:
            self._parts = parts
            self._summed = self._first_of_transformers

    def __call__(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self._summed(tokens, targets) / count_learnt(targets)

    def _of_logits(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        result: Any = self._model(tokens)
        logits: torch.Tensor = getattr(result, "logits", result)
        return F.cross_entropy(
            logits.flatten(0, 1).float(),
            targets.flatten().to(logits.device),
            ignore_index=IGNORED,
            reduction="sum",
        )

    def _by_model(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self._model(
            tokens, loss_of=lambda hidden, weight: _chunked(hidden, weight, targets)
        )
        return loss

    def _first_of_transformers(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """See whether there is more between hidden states and logits than their product."""
        hidden, logits = self._parts.run(self._model, tokens)
        if self._parts.are_all(hidden, logits):
            self._summed = self._of_transformers
            return self._parts.loss(hidden, targets)
        print(f"{type(self._model).__name__} does more than multiply by its head: all logits are held")
        self._summed = self._of_logits
        return self._of_logits(tokens, targets)

    def _of_transformers(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden, _ = self._parts.run(self._model, tokens)
        return self._parts.loss(hidden, targets)


@dataclass(frozen=True)
class _Parts:
    """What a causal language model of transformers makes its hidden states and its logits with."""

    base: nn.Module
    head: nn.Linear
    softcap: float | None

    def run(self, model: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states [batch, time, width], and the last token's logits [batch, 1, vocabulary]."""
        results: list[Any] = []
        handle = self.base.register_forward_hook(lambda module, given, result: results.append(result))
        try:
            # the model itself is called, for all that is done around its forward
            logits: torch.Tensor = model(tokens, logits_to_keep=1).logits
        finally:
            handle.remove()
        return results.pop().last_hidden_state, logits

    @torch.no_grad()
    def are_all(self, hidden: torch.Tensor, logits: torch.Tensor) -> bool:
        """Whether they alone make, to the bit, the last token's logits."""
        if hidden.shape[-1] != self.head.in_features:
            return False
        if hidden.is_meta:
            return True  # there are no bits: taken for what most models do
        own = F.linear(hidden[:, -1:], self.head.weight, self.head.bias)
        if self.softcap is not None:
            own = torch.tanh(own / self.softcap) * self.softcap
        return torch.equal(own.to(logits.dtype), logits)

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return _chunked(hidden, self.head.weight, targets, bias=self.head.bias, softcap=self.softcap)


def _parts(model: Any) -> _Parts | None:
    """The parts of ``model``, or None if it has others than these."""
    base = getattr(model, "base_model", model)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if base is model or not isinstance(base, nn.Module) or type(head) is not nn.Linear:
        return None
    softcap = getattr(getattr(model, "config", None), "final_logit_softcapping", None)
    return _Parts(base, head, softcap)


def _chunked(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, **options: Any
) -> torch.Tensor:
    return streamer.chunked_cross_entropy(
        hidden, weight, targets.to(hidden.device), ignore_index=IGNORED, reduction="sum", **options
    )
