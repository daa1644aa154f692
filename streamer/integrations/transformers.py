"""transformers' Trainer for a wrapped model: AdamW on exact masters, checkpoints that resume to the bit.

    from streamer.integrations.transformers import Trainer

    model = streamer.from_pretrained("DIR")
    trainer = Trainer(model, TrainingArguments("out"), train_dataset=data)
    trainer.train(resume_from_checkpoint=True)

For a trainer class of your own, put `Streamed` before it: ``class Mine(Streamed, DPOTrainer)``.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import torch
import transformers

import streamer
from streamer.engine.handle import wrapped
from streamer.integrations.causal_lm import IGNORED, CausalHead

#: The folder in a checkpoint of the Trainer's that `streamer.save` writes.
STATE = "streamer"
#: Options of `streamer.AdamW` that ``optim_args`` may have.
OPTIONS = ("state_dtype", "skip_nonfinite")


class Streamed:
    """A mixin for transformers' Trainer and classes derived from it; its ``model`` is a wrapped one.

    - ``optim="adamw_torch"`` (the default) and its fused variant are `streamer.AdamW` in the Trainer's
      parameter groups. ``optim_args="state_dtype=int8"`` sets the dtype of the moments. ``"lion_32bit"`` is
      `streamer.Lion`; other optimizers are themselves, on fp32 masters.
    - Gradients are clipped by the norms that streamer has measured already.
    - Checkpoints hold fp32 masters and moments in ``checkpoint-N/streamer``, by `streamer.save`. Resuming
      from one continues to the bit, with any number of ranks. The frozen base of a PeftModel is left out.
    - The loss of a causal language model is computed a chunk at a time (`streamer.chunked_cross_entropy`),
      unless the Trainer wants logits, smooths labels or has a loss of its own.

    Adapters have to be there before the model is wrapped, as by ``streamer.from_pretrained(adapt=...)``:
    raises ValueError for ``peft_config=``.
    """

    #: the class whose ``compute_loss`` is computed a chunk at a time in its place
    _class_of_loss: Any = transformers.Trainer

    # what this mixin uses of the Trainer
    model: Any
    args: Any
    state: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any
    label_smoother: Any
    compute_loss_func: Any
    _head: CausalHead | None

    def __init__(self, *args: Any, **options: Any) -> None:
        if options.get("peft_config") is not None:
            raise ValueError(
                "peft_config= would add adapters to a model that is wrapped: leave it out, and give "
                "streamer.from_pretrained adapt=lambda model: peft.get_peft_model(model, config)"
            )
        super().__init__(*args, **options)
        wrapped(self.model)  # a model that is not wrapped is an error here
        loss = super().compute_loss.__func__  # type: ignore[misc]
        self._head = CausalHead.of(self.model) if loss is self._class_of_loss.compute_loss else None

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
        if args.optim == "lion_32bit":
            usual = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2)}
            return streamer.Lion, usual
        kind, options = transformers.Trainer.get_optimizer_cls_and_kwargs(args, model)
        if kind is not torch.optim.AdamW:
            return kind, options
        options.pop("fused", None)
        return streamer.AdamW, options | _own_options(args.optim_args)

    def _clip_grad_norm(self, model: Any) -> Any:
        return self._clipped(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self._clipped(math.inf) if grad_norm is None else grad_norm

    def _clipped(self, max_norm: float) -> torch.Tensor:
        self.accelerator.unscale_gradients()  # where there is a scaler
        return streamer.clip_grad_norm_(self.model, max_norm)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        is_plain = not (return_outputs or self.label_smoother or self.compute_loss_func)
        if is_plain and self._head is not None and "labels" in inputs:
            rest = {name: value for name, value in inputs.items() if name not in ("labels", "use_cache")}
            labels = inputs["labels"]
            if (found := self._head.run(model, rest)) is not None:
                hidden, output = found
                total = self._head.sum_of_losses(hidden[:, :-1], labels[:, 1:])
                return self._mean(total, output, labels, num_items_in_batch)
            self._head = None  # its logits are more than its head's product: all are computed from here on
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]

    def _mean(self, total: torch.Tensor, output: Any, labels: torch.Tensor, count: Any) -> torch.Tensor:
        """The mean over ``count`` tokens, of all passes and ranks of a step, or over those of ``labels``."""
        if count is None:
            return total / (labels[:, 1:] != IGNORED).sum().clamp(min=1).to(total.device)
        # ranks' gradients are averaged, so that each loss is the sum over its own tokens times their number
        ranks = self.args.world_size if self.args.average_tokens_across_devices else 1
        # a step without answers has a loss of 0
        return total / torch.as_tensor(count, device=total.device).clamp(min=1) * ranks

    # transformers writes weights in the model's dtype and the optimizer's state by pickle

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not _internal_call or self.args.save_only_model:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        elif self.args.should_save:
            Path(str(output_dir)).mkdir(parents=True, exist_ok=True)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate has put one around it
        streamer.save(
            self.model,
            optimizer,
            Path(output_dir, STATE),
            step=self.state.global_step,
            extra={"scheduler": self.lr_scheduler.state_dict()},
            frozen=not hasattr(self.model, "peft_config"),
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not Path(resume_from_checkpoint, STATE).is_dir():
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        # else `_load_optimizer_and_scheduler` reads the weights too

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not Path(checkpoint, STATE).is_dir():
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        loaded = streamer.load(self.model, optimizer, Path(checkpoint, STATE))
        self.lr_scheduler.load_state_dict(loaded.extra["scheduler"])

    def _load_best_model(self) -> None:
        best = Path(str(self.state.best_model_checkpoint), STATE)
        if best.is_dir():
            streamer.load(self.model, None, best)
        else:
            super()._load_best_model()  # type: ignore[misc]


class Trainer(Streamed, transformers.Trainer):
    """transformers' Trainer with `Streamed`."""


def _own_options(text: str | dict[str, Any] | None) -> dict[str, Any]:
    """The options of `streamer.AdamW` in ``optim_args``, "state_dtype=int8,skip_nonfinite=false" or a dict.
    Raises ValueError for others."""
    if isinstance(text, str):
        text = dict(part.partition("=")[::2] for part in text.split(","))
    options = {name.strip(): value for name, value in (text or {}).items()}
    if unknown := [name for name in options if name not in OPTIONS]:
        raise ValueError(f"optim_args has {unknown[0]!r}; streamer.AdamW takes {' and '.join(OPTIONS)} there")
    if isinstance(skip := options.get("skip_nonfinite"), str):
        options["skip_nonfinite"] = skip.strip().lower() in ("true", "1")
    if isinstance(state := options.get("state_dtype"), str):
        options["state_dtype"] = state.strip()
    return options


def last_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The last ``checkpoint-N`` in ``folder`` that was written to its end; None where there is none.

    transformers' ``get_last_checkpoint`` takes the last name, which a killed run may have left incomplete.
    """
    found = [path for path in Path(folder).glob("checkpoint-*") if is_complete(path)]
    return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def is_complete(checkpoint: Path) -> bool:
    """Whether ``trainer_state.json``, which the Trainer writes last, is all there."""
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_text())
        return bool(int(checkpoint.name.rpartition("-")[2]) == state["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
