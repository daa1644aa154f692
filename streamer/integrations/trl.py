"""TRL's SFTTrainer for a wrapped model.

    from streamer.integrations.trl import ROWS, SFTTrainer

    model = streamer.from_pretrained("DIR", micro_batch_size=4, batch_dims=ROWS)
    SFTTrainer(model, SFTConfig("out", packing=True), train_dataset=chats, processing_class=tokenizer).train()

`ROWS` names arguments of layers: leave out those that the model's layers do not take.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import trl

from streamer.integrations.causal_lm import without_adapters
from streamer.integrations.rows import ROWS, Rows, keeps_texts_apart, takes_positions
from streamer.integrations.transformers import Streamed

__all__ = ["ROWS", "PackingError", "Rows", "SFTTrainer"]


class PackingError(ValueError):
    """A model for which texts must not be packed."""


class SFTTrainer(Streamed, trl.SFTTrainer):  # type: ignore[misc, name-defined]
    """TRL's SFTTrainer with `Streamed`, and with batches of rows by `Rows`.

    Raises PackingError for packing with a model that does not keep the texts of a row apart.
    """

    _class_of_loss: Any = trl.SFTTrainer  # type: ignore[attr-defined]
    _total_train_tokens: float

    def __init__(self, model: Any, args: Any = None, data_collator: Any = None, **options: Any) -> None:
        if args is not None and args.packing and data_collator is None and not keeps_texts_apart(model):
            raise PackingError(f"{type(model).__name__} does not keep packed texts apart: set packing=False")
        core = without_adapters(model)
        if hasattr(core.get_output_embeddings(), "base_layer"):
            raise ValueError("an adapter on the head would not be trained: leave it out of target_modules")
        with _own_dtype(core):
            super().__init__(model, args, data_collator=data_collator, **options)
        if data_collator is None:
            self.data_collator = Rows(self._tokenizer.pad_token_id, takes_positions(model))

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self.args.loss_type not in ("nll", "chunked_nll"):  # the same loss
            self._head = None
        if self.aux_loss_enabled and self._head is not None:
            inputs = {**inputs, "output_router_logits": True}
        tokens = self._total_train_tokens + inputs["input_ids"].numel() * self.args.world_size
        found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self.model.training:
            self._total_train_tokens = tokens  # of all rows, padding included
            self._metrics["train"]["num_tokens"] = [tokens]
        return found

    def _mean(self, total: torch.Tensor, output: Any, labels: torch.Tensor, count: Any) -> torch.Tensor:
        loss = super()._mean(total, output, labels, count)
        if not self.aux_loss_enabled:
            return loss
        # each pass has its own mean of the balance of experts: the Trainer leaves the division to the loss
        passes = 1 if count is None else self.current_gradient_accumulation_steps
        mode = "train" if self.model.training else "eval"
        mean = self.accelerator.gather_for_metrics(output.aux_loss.detach()).mean()
        self._metrics[mode]["aux_loss"].append(mean.item())
        # early releases have it in the arguments alone, later ones the model's where these have none
        weight: float = getattr(self, "router_aux_loss_coef", self.args.router_aux_loss_coef)
        balance: torch.Tensor = weight * output.aux_loss.to(loss.device)
        return loss + balance / passes


@contextmanager
def _own_dtype(core: Any) -> Iterator[None]:
    """Inside the block TRL does not cast what is trained on a quantized base to bf16: streamer holds fp32
    masters, and the dtype on the device is the one that the model was wrapped with."""
    before = {name: True for name in ("is_loaded_in_4bit", "is_loaded_in_8bit") if getattr(core, name, False)}
    vars(core).update(dict.fromkeys(before, False))
    try:
        yield
    finally:
        vars(core).update(before)
