"""The plain PyTorch loop around a wrapped model, a step at a time, and what it goes on from."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import streamer
from streamer.app.build import schedule
from streamer.app.config import Config, ConfigError
from streamer.app.data import TokenData
from streamer.app.loss import TokenLoss, count_learnt


def step_on(
    config: Config,
    model: nn.Module,
    optimizer: streamer.AdamW,
    loss_of: TokenLoss,
    tokens: torch.Tensor,
    targets: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """One step on tokens and targets [batch, time]; its loss, and the gradient's norm where there is one to
    be had."""
    loss = loss_of(tokens, targets)
    loss.backward()
    measured = {"loss": loss.detach()}
    if config.stream.update == "step":
        # 0 in the config means no clipping, but the norm is worth a look all the same
        measured["grad_norm"] = streamer.clip_grad_norm_(model, config.optimizer.grad_clip or math.inf)
    optimizer.step()
    optimizer.zero_grad()
    return measured


@dataclass
class Loop:
    """A run's model, optimizer and data, and where in the data it is."""

    config: Config
    model: nn.Module
    optimizer: streamer.AdamW
    data: TokenData
    step: int = 0
    first_val_loss: float = math.nan
    val_loss: float = math.nan
    #: how often the run went back to a checkpoint, which chooses the batches that it draws then
    returns: int = 0
    crops: torch.Generator = field(init=False)
    rates: torch.optim.lr_scheduler.LambdaLR = field(init=False)
    loss: TokenLoss = field(init=False)

    def __post_init__(self) -> None:
        self.model.train()
        self.loss = TokenLoss(self.model)
        self.rates = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, schedule(self.config.optimizer, self.config.run.steps)
        )
        self._draw_anew()

    def _draw_anew(self) -> None:
        self.crops = torch.Generator().manual_seed(self.config.run.seed + self.returns)

    def train_step(self) -> dict[str, float]:
        """One step; its loss, and the gradient's norm where there is one to be had."""
        batch = self.config.data
        tokens, targets = self.data.batch("train", batch.batch_size, batch.context, self.crops)
        measured = step_on(self.config, self.model, self.optimizer, self.loss, tokens, targets)
        self.rates.step()
        self.step += 1
        return {name: value.item() for name, value in measured.items()}

    @torch.no_grad()
    def validate(self) -> float:
        """The loss on the validation batches, in nats per token.

        Raises ConfigError where the model cannot take the data's tokens in sequences of ``data.context``.
        """
        self.model.eval()
        run, batch = self.config.run, self.config.data
        batches = self.data.val_batches(run.eval_batches, batch.batch_size, batch.context)
        try:
            losses = [self.loss(tokens, targets).item() for tokens, targets in batches]
        except (ValueError, IndexError) as error:
            raise ConfigError(
                f"the model cannot run on sequences of data.context = {batch.context} {self.data.unit}s "
                f"(tokens 0 to {self.data.vocab_size - 1}): {error}; mend model.args or data.context"
            ) from error
        self.model.train()
        counts = [count_learnt(targets) for _, targets in batches]  # none has nothing to learn
        self.val_loss = sum(map(operator.mul, losses, counts)) / sum(counts)
        return self.val_loss

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of the loop, beside what `streamer.save` does."""
        return {
            "rates": self.rates.state_dict(),
            "crops": self.crops.get_state(),
            "first_val_loss": self.first_val_loss,
            "val_loss": self.val_loss,
            "returns": self.returns,
        }

    def go_on_from(self, loaded: streamer.Loaded) -> None:
        """Take over the step and the `state` of a checkpoint."""
        self.step = loaded.step
        self.rates.load_state_dict(loaded.extra["rates"])
        self.crops.set_state(loaded.extra["crops"])
        self.first_val_loss, self.val_loss = loaded.extra["first_val_loss"], loaded.extra["val_loss"]
        self.returns = loaded.extra["returns"]

    def draw_other_batches(self) -> None:
        """Draw batches that no earlier try has seen from here on."""
        self.returns += 1
        self._draw_anew()

    @torch.no_grad()
    def sample(self, prompt_tokens: int) -> str:
        """Text that the streamed model writes, token by token, after the first ``prompt_tokens`` of
        validation text."""
        self.model.eval()
        draws = torch.Generator().manual_seed(self.config.run.seed)
        text = self.data.val[:prompt_tokens].long()[None]
        for _ in range(self.config.run.sample_tokens):
            result: Any = self.model(text[:, -self.config.data.context :])
            logits: torch.Tensor = getattr(result, "logits", result)[:, -1].float().cpu()
            text = torch.cat(
                [text, torch.multinomial(torch.softmax(logits / 0.8, -1), 1, generator=draws)], dim=1
            )
        self.model.train()
        return self.data.decode(text[0].tolist())
