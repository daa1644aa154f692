"""The loss of a causal language model of transformers without its logits of the whole vocabulary."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from streamer.loss import chunked_cross_entropy

#: The label of a token that has no loss: the default of torch.nn.functional.cross_entropy.
IGNORED = -100


def without_adapters(model: Any) -> Any:
    """The model in a PeftModel, or ``model`` itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@dataclass
class CausalHead:
    """The last linear layer of a causal language model, applied to some tokens at a time.

    A model computes its logits as ``head(base(tokens))``, perhaps with ``final_logit_softcapping``. `of`
    finds both parts; the first call compares their product with the model's own logits of the last token.
    """

    base: nn.Module
    head: nn.Linear
    softcap: float | None
    is_checked: bool = False

    @staticmethod
    def of(model: nn.Module) -> CausalHead | None:
        """The head of ``model``, wrapped or not, perhaps a PeftModel. None for a model without
        ``logits_to_keep``, or whose head is no plain ``nn.Linear``, as with an adapter on it."""
        core = without_adapters(model)
        base = getattr(core, "base_model", core)
        head = getattr(core, "get_output_embeddings", lambda: None)()
        if base is core or not isinstance(base, nn.Module) or type(head) is not nn.Linear:
            return None
        if "logits_to_keep" not in inspect.signature(type(core).forward).parameters:
            return None
        return CausalHead(base, head, getattr(core.config.get_text_config(), "final_logit_softcapping", None))

    def run(self, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, Any] | None:
        """The last hidden states [batch, time, width] of ``model(**inputs)``, and its output. None where the
        model's logits are not those of this head."""
        outputs: list[Any] = []
        hook = self.base.register_forward_hook(lambda module, args, output: outputs.append(output))
        try:
            # the model itself is called, for all that is done around its forward
            output = model(**inputs, logits_to_keep=1, use_cache=False)
        finally:
            hook.remove()
        hidden: torch.Tensor = outputs.pop().last_hidden_state
        if not self.is_checked and not self._computes(hidden, output.logits):
            return None
        self.is_checked = True
        return hidden, output

    def sum_of_losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The sum of the cross-entropies of ``targets`` [batch, time], of which `IGNORED` have none, in nats:
        fp32 []."""
        return chunked_cross_entropy(
            hidden,
            self.head.weight,
            targets.to(hidden.device),
            bias=self.head.bias,
            softcap=self.softcap,
            ignore_index=IGNORED,
            reduction="sum",
        )

    @torch.no_grad()
    def _computes(self, hidden: torch.Tensor, logits: torch.Tensor) -> bool:
        """Whether the head's product is, to the bit, the model's ``logits`` [batch, 1, vocabulary] of the
        last token."""
        if hidden.shape[-1] != self.head.in_features:
            return False
        if hidden.is_meta:
            return True  # a plan has no values to compare
        own = F.linear(hidden[:, -1:], self.head.weight, self.head.bias)
        if self.softcap is not None:
            own = torch.tanh(own / self.softcap) * self.softcap
        return torch.equal(own.to(logits.dtype), logits)
