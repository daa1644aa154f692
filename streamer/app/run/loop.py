"""The training loop around a wrapped model: its loss, one step, validation, and the state that a checkpoint
holds. The loss takes all logits at once only where the model offers no other way.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import streamer
from streamer.app.config import FP16_IN_BACKWARD, Config, ConfigError, in_keys
from streamer.app.data.rows import RowBatch, Rows
from streamer.app.data.splits import IGNORED, TokenData
from streamer.app.run.ranks import Batch, RunRanks
from streamer.app.run.samples import Prompt, continue_texts, end_tokens, logits_of, read_prompts
from streamer.app.run.schedule import schedule

#: Without torchrun.
ALONE = RunRanks()


def count_learnt(targets: torch.Tensor) -> int:
    """How many targets are learnt; at least 1, so that a sum can be divided by it."""
    return max(1, int((targets != IGNORED).sum()))


class TokenLoss:
    """Mean cross-entropy in nats per token that is learnt (0 where none is), in fp32, of ``model``'s logits
    for tokens and targets [batch, time].

    The logits are made a chunk at a time (`streamer.chunked_cross_entropy`) for two kinds of models. One has
    a ``forward`` that takes ``loss_of``, calls it with its last hidden states [batch, time, width] and its
    head's weight, and returns the result. The other is of transformers, and its logits are found to be the
    product of the two, perhaps with ``final_logit_softcapping``. Any other model returns all of its logits,
    or an object that has ``logits``.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        takes = inspect.signature(model.forward).parameters
        self._by_model = "loss_of" in takes
        self._parts = _parts(model) if "logits_to_keep" in takes and not self._by_model else None
        self._parts_are_checked = False

    def __call__(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor,
        positions: torch.Tensor | None = None,
        *,
        learnt: int | None = None,
    ) -> torch.Tensor:
        """With ``positions``, which begin anew with each text of a row, no text sees another: see `packs`.
        ``learnt`` is the number of tokens that the mean is over, if they are a part of a batch."""
        return self._sum(tokens, targets, positions) / (count_learnt(targets) if learnt is None else learnt)

    def _sum(
        self, tokens: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor | None
    ) -> torch.Tensor:
        if self._by_model:
            of_model: torch.Tensor = self._model(
                tokens, loss_of=lambda hidden, weight: _chunked(hidden, weight, targets)
            )
            return of_model
        if self._parts is not None:
            hidden, logits = self._parts.run(self._model, tokens, **_packed(positions))
            if self._parts_are_checked or self._parts.are_all(hidden, logits):
                self._parts_are_checked = True
                return self._parts.loss(hidden, targets)
            print(f"{type(self._model).__name__} does more than multiply by its head: all logits are held")
            self._parts = None
        all_logits = logits_of(self._model(tokens, **_packed(positions)))
        return F.cross_entropy(
            all_logits.flatten(0, 1).float(),
            targets.flatten().to(all_logits.device),
            ignore_index=IGNORED,
            reduction="sum",
        )


def _packed(positions: torch.Tensor | None) -> dict[str, Any]:
    """Arguments of a model of transformers for rows of several texts. With a cache of keys and values, which
    is its default, it takes no notice of where texts begin."""
    return {} if positions is None else {"position_ids": positions, "use_cache": False}


@torch.no_grad()
def packs(model: nn.Module, vocabulary: int) -> bool:
    """Whether the model keeps the texts of a row apart by their positions: seen by comparing the logits of a
    text alone with those of the same text behind another. Costs two forwards of some tokens."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    was_training = model.training
    model.eval()
    try:
        tokens = torch.arange(1, PROBE + 1)[None] % max(2, min(vocabulary, 97))
        behind = torch.cat([tokens.flip(1), tokens], dim=1)
        positions = torch.arange(PROBE).repeat(2)[None]
        alone = logits_of(model(tokens, use_cache=False)).float()
        packed = logits_of(model(behind, **_packed(positions))).float()[:, PROBE:]
        # rounding differs; a text that sees the other one differs in most of its logits by much more
        scale = float(alone.abs().max()) or 1.0
        return bool((packed - alone).abs().max() < PROBE_TOLERANCE * scale)
    except (TypeError, ValueError, NotImplementedError):
        return False
    finally:
        model.train(was_training)


#: Tokens of each of the two texts by which `packs` sees that, and how much their logits may differ by.
PROBE, PROBE_TOLERANCE = 6, 0.02


@dataclass(frozen=True)
class _Parts:
    """What a causal language model of transformers makes its hidden states and its logits with."""

    base: nn.Module
    head: nn.Linear
    softcap: float | None

    def run(
        self, model: nn.Module, tokens: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states [batch, time, width], and the last token's logits [batch, 1, vocabulary]."""
        results: list[Any] = []
        handle = self.base.register_forward_hook(lambda module, given, result: results.append(result))
        try:
            # the model itself is called, for all that is done around its forward
            logits: torch.Tensor = model(tokens, logits_to_keep=1, **options).logits
        finally:
            handle.remove()
        return results.pop().last_hidden_state, logits

    @torch.no_grad()
    def are_all(self, hidden: torch.Tensor, logits: torch.Tensor) -> bool:
        """Whether they alone make, to the bit, the last token's logits."""
        if hidden.shape[-1] != self.head.in_features:
            return False
        if hidden.is_meta:
            return True  # no values to compare: most models do
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


def _without_none(batch: RowBatch) -> Batch:
    return tuple(part for part in batch if part is not None)


def step_on(
    config: Config,
    model: nn.Module,
    optimizer: streamer.AdamW,
    loss_of: TokenLoss,
    batch: Batch,
    scaler: torch.amp.GradScaler | None = None,
    ranks: RunRanks = ALONE,
) -> dict[str, torch.Tensor]:
    """One step on a batch, of which each of the ``ranks`` takes its part; this part's loss and, unless layers
    are updated in backward, the norm of the gradient. With a ``scaler`` the loss is scaled for backward, and
    a step that overflows is skipped.

    The loss is the mean over all tokens of the batch that are learnt, however many passes it is taken in and
    however they are spread over these and over the ranks: those of all ranks' parts add up to it.
    """
    learnt = count_learnt(batch[1])
    losses = []
    for part in ranks.parts(batch, config.data.accumulate):
        loss = loss_of(*part, learnt=learnt)
        # the mean of the ranks' gradients is the gradient of the sum of their losses
        whole = loss if ranks.size == 1 else loss * ranks.size
        (whole if scaler is None else scaler.scale(whole)).backward()
        losses.append(loss.detach())
    measured = {"loss": functools.reduce(operator.add, losses)}
    if config.stream.update == "step":
        # 0 in the config means no clipping, but the norm is worth a look all the same
        most, scale = config.optimizer.grad_clip or math.inf, 1.0 if scaler is None else scaler.get_scale()
        measured["grad_norm"] = streamer.clip_grad_norm_(model, most, grad_scale=scale)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
    return measured


@dataclass
class Loop:
    """A run's model, optimizer and data, and where in the data it is."""

    config: Config
    model: nn.Module
    optimizer: streamer.AdamW
    data: TokenData
    #: whole conversations, or windows of a text; None where batches are crops at random
    rows: Rows | None = None
    ranks: RunRanks = ALONE
    step: int = 0
    first_val_loss: float = math.nan
    val_loss: float = math.nan
    #: the lowest validation loss after a step, and that step
    best_val_loss: float = math.inf
    best_step: int = 0
    #: validations since then
    since_best: int = 0
    #: how often the run went back to a checkpoint; seeds the batches drawn from there on
    returns: int = 0
    #: of ``[sample]``
    prompts: list[Prompt] = field(init=False)
    #: scales the loss where weights are in fp16
    scaler: torch.amp.GradScaler | None = field(init=False)
    crops: torch.Generator = field(init=False)
    rates: torch.optim.lr_scheduler.LambdaLR = field(init=False)
    loss: TokenLoss = field(init=False)

    def __post_init__(self) -> None:
        self.model.train()
        self.loss = TokenLoss(self.model)
        self.prompts = read_prompts(self.config.sample, self.data)
        params = list(self.model.parameters())
        in_fp16 = any(param.dtype is torch.float16 for param in params)
        if in_fp16 and self.config.stream.update == "backward":
            raise ConfigError(FP16_IN_BACKWARD)
        self.scaler = torch.amp.GradScaler(params[0].device.type) if in_fp16 else None
        self.rates = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, schedule(self.config.optimizer, self.config.run.steps)
        )
        self._draw_anew()

    def _draw_anew(self) -> None:
        self.crops = torch.Generator().manual_seed(self.config.run.seed + self.returns)

    @property
    def tokens_per_step(self) -> int:
        return self.config.data.batch_size * self.config.data.context

    def train_step(self) -> dict[str, float]:
        """The next step, on a batch of the training split; what `step_on` has measured."""
        scaler = self.scaler
        batch, ranks = self._batch(), self.ranks
        measured = step_on(self.config, self.model, self.optimizer, self.loss, batch, scaler, ranks)
        values = {name: value.item() for name, value in measured.items()}
        values["loss"] = sum(ranks.meet(f"the loss of step {self.step + 1}", values["loss"]))
        if scaler is not None and self.config.run.nonfinite != "skip" and not math.isfinite(values["loss"]):
            # a scaler skips every step that is not finite, of which no scale can make this one finite
            raise streamer.NonFiniteError("the loss is NaN or infinite", ": nothing was updated")
        self.rates.step()
        self.step += 1
        return values

    def _batch(self) -> Batch:
        """The next batch."""
        given = self.config.data
        if self.rows is None:
            return self.data.batch("train", given.batch_size, given.context, self.crops)
        # a run that went back goes on with other batches
        return _without_none(self.rows.batch(self.step + self.returns * self.config.run.steps))

    def _val_batches(self) -> list[Batch]:
        run, given = self.config.run, self.config.data
        if self.rows is not None:
            batches: list[Batch] = [_without_none(one) for one in self.rows.val_batches(run.eval_batches)]
        else:
            batches = [*self.data.val_batches(run.eval_batches, given.batch_size, given.context)]
        parts = given.accumulate * self.ranks.size  # as large as in training
        return [part for batch in batches for part in ALONE.parts(batch, parts)]

    @torch.no_grad()
    def validate(self) -> float:
        """The loss on the validation batches, in nats per token, of which each rank takes its part.

        Raises ConfigError where the model cannot take the data's tokens in sequences of ``data.context``.
        """
        self.model.eval()
        batch = self.config.data
        batches = self._val_batches()
        ranks, losses = self.ranks, [0.0] * len(batches)
        with ranks.checked():
            try:
                mine = [self.loss(*one).item() for one in batches[ranks.rank :: ranks.size]]
            except (ValueError, IndexError) as error:
                raise ConfigError(
                    f"the model cannot run on sequences of data.context = {batch.context} {self.data.unit}s "
                    f"(tokens 0 to {self.data.vocab_size - 1}): {in_keys(str(error))}; correct model.args or "
                    "data.context"
                ) from error
        for rank, theirs in enumerate(ranks.meet("the losses of validation", mine)):
            losses[rank :: ranks.size] = theirs
        self.model.train()
        counts = [count_learnt(one[1]) for one in batches]  # each has something to learn
        self.val_loss = sum(map(operator.mul, losses, counts)) / sum(counts)
        return self.val_loss

    def judge(self) -> bool:
        """Note whether the validation loss is the lowest so far, and return it."""
        if is_best := self.val_loss < self.best_val_loss:
            self.best_val_loss, self.best_step, self.since_best = self.val_loss, self.step, 0
        else:
            self.since_best += 1
        return is_best

    def ends_early(self) -> bool:
        """Whether the loss of validation has not fallen for as long as the config has patience."""
        return 0 < self.config.run.patience <= self.since_best

    def state(self) -> dict[str, Any]:
        """The loop's part of a checkpoint, beside the model and the optimizer that `streamer.save` writes."""
        return {
            "rates": self.rates.state_dict(),
            "crops": self.crops.get_state(),
            "first_val_loss": self.first_val_loss,
            "val_loss": self.val_loss,
            "best_val_loss": self.best_val_loss,
            "best_step": self.best_step,
            "since_best": self.since_best,
            "returns": self.returns,
            "epochs": self.config.run.epochs,
            "steps_of_epochs": self._steps_of_epochs(),
            "tokens": self._tokens(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
        }

    def _tokens(self) -> list[int]:
        """How many there are to train on, and to validate on."""
        return [self.data.train.numel(), self.data.val.numel()]

    def _steps_of_epochs(self) -> int:
        epochs = self.config.run.epochs
        return self.rows.steps(epochs) if self.rows is not None and epochs else 0

    def go_on_from(self, loaded: streamer.Loaded) -> None:
        """Take over the step and the `state` of a checkpoint."""
        self.step = loaded.step
        if (before := loaded.extra.get("tokens", self._tokens())) != self._tokens():
            then, now = (
                " and ".join(f"{count:,}" for count in counts) for counts in (before, self._tokens())
            )
            print(
                f"the data has changed: {now} {self.data.unit}s to train on and to validate on; until step "
                f"{self.step} they were {then}"
            )
        self._set_rates()
        self.crops.set_state(loaded.extra["crops"])
        self.first_val_loss, self.val_loss = loaded.extra["first_val_loss"], loaded.extra["val_loss"]
        self.best_val_loss = loaded.extra.get("best_val_loss", math.inf)
        self.best_step, self.since_best = (loaded.extra.get(key, 0) for key in ("best_step", "since_best"))
        self.returns = loaded.extra["returns"]
        if self.scaler is not None and (scaler := loaded.extra.get("scaler")) is not None:
            self.scaler.load_state_dict(scaler)

    def _set_rates(self) -> None:
        """Let the optimizer go on from `step` with the config's hyperparameters, which may be others than
        those of the checkpoint."""
        given = self.config.optimizer
        rate = given.lr * schedule(given, self.config.run.steps)(self.step)
        for group in self.optimizer.param_groups:
            changed = {key: getattr(given, key) for key in ("betas", "eps", "weight_decay")}
            group.update(changed, initial_lr=given.lr, lr=rate)
        self.rates.last_epoch, self.rates.base_lrs = self.step, [given.lr] * len(self.optimizer.param_groups)
        self.rates._last_lr = [rate] * len(self.optimizer.param_groups)

    def go_back_to(self, loaded: streamer.Loaded) -> None:
        """Take over a checkpoint of this run, and from there draw batches that no earlier try has seen."""
        returns = self.returns + 1
        self.go_on_from(loaded)
        self.returns = returns
        self._draw_anew()

    def sample(self, prompt_tokens: int) -> str:
        """Text that the streamed model writes after the first ``prompt_tokens`` of validation text, to its
        end."""
        text = self.data.val[:prompt_tokens].tolist()
        (more,) = self._continue(
            [text],
            tokens=self.config.run.sample_tokens,
            temperature=0.8,
            ends=end_tokens(self.model, self.data.tokenizer),
        )
        return self.data.decode(text + more)

    def samples(self) -> list[str]:
        """What the model writes after each of the `prompts`."""
        given = self.config.sample
        written = self._continue(
            [prompt.tokens for prompt in self.prompts],
            tokens=given.tokens,
            temperature=given.temperature,
            top_k=given.top_k,
            ends=end_tokens(self.model, self.data.tokenizer),
        )
        return [self.data.decode(tokens) for tokens in written]

    def _continue(self, texts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
        stream, run = self.config.stream, self.config.run
        # no more at a time than a layer runs at a time: such a batch is not cut
        at_once = stream.micro_batch_size if isinstance(stream.micro_batch_size, int) else len(texts)
        written = []
        for first in range(0, len(texts), at_once):
            some = texts[first : first + at_once]
            context = self.config.data.context
            # with torch.compile another length would be compiled again
            written += continue_texts(
                self.model, some, context=context, seed=run.seed, padded=stream.compile, **options
            )
        return written
