"""Text that a model in training writes: prompts of ``[sample]``, and tokens drawn one after another."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from streamer.app.config import ConfigError, SampleConfig
from streamer.app.data.documents import Words, token_after_answer
from streamer.app.data.splits import TokenData


def logits_of(result: Any) -> torch.Tensor:
    """The logits of a model that returns them, or an object that has them."""
    logits: torch.Tensor = getattr(result, "logits", result)
    return logits


@dataclass(frozen=True)
class Prompt:
    """What a text begins with: ``text`` for people, ``tokens`` for the model."""

    text: str
    tokens: tuple[int, ...]


def read_prompts(config: SampleConfig, data: TokenData) -> list[Prompt]:
    """The prompts of ``[sample]`` in the tokens of ``data``. Raises ConfigError for a chat where no tokenizer
    has a template for chats, or where that refuses it."""
    return [_prompt(given, config, data) for given in config.prompts]


def _prompt(given: Any, config: SampleConfig, data: TokenData) -> Prompt:
    tokenizer = data.tokenizer
    if isinstance(given, str) and not config.chat:
        tokens = given.encode() if tokenizer is None else tokenizer(given)["input_ids"]
        return Prompt(given, tuple(tokens))
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else [*given]
    if tokenizer is None:
        raise ConfigError(
            "sample.prompts has a chat, and the data is read without a tokenizer: set data.tokenizer to the "
            "folder of one with a template for chats, or give texts, and no sample.chat"
        )
    if not (words := Words.of(tokenizer)).has_template:
        raise ConfigError(
            f"sample.prompts has a chat, and the tokenizer{words.source} has no template for chats: give "
            "texts, and no sample.chat"
        )
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # whatever a template raises
        line = " ".join(str(error).split())
        raise ConfigError(f"sample.prompts: the tokenizer's template refuses a chat: {line}") from error
    # the template has written the special tokens already
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    return Prompt(messages[-1]["content"], tuple(tokens))


def end_tokens(model: nn.Module, tokenizer: Any) -> set[int]:
    """The tokens after which a text is over, as the model's generation config, the tokenizer and its template
    for chats say."""
    of_model = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    of_model = of_model if isinstance(of_model, list) else [of_model]
    found = {*of_model, getattr(tokenizer, "eos_token_id", None)}
    if tokenizer is not None:
        found.add(token_after_answer(Words.of(tokenizer)))
    return {token for token in found if token is not None}


@torch.no_grad()
def continue_texts(
    model: nn.Module,
    texts: Sequence[Sequence[int]],
    *,
    tokens: int,
    context: int,
    temperature: float,
    top_k: int = 0,
    seed: int = 0,
    ends: Collection[int] = (),
    padded: bool = False,
) -> list[list[int]]:
    """What ``model`` writes after each of ``texts``: ``tokens`` tokens, fewer where one of ``ends``, which is
    left out, comes before.

    All texts are in one batch, padded on the right, which a causal model does not see: a forward costs all
    weights' way to the device, however many texts there are. It sees the last ``context`` tokens; with
    ``padded`` all batches are that long. A token is drawn from the ``top_k`` most likely ones (0: from all),
    whose logits are divided by ``temperature`` (0: the most likely one). Each text has a generator of random
    numbers of its own: those of training stay as they are.
    """
    draws = [torch.Generator().manual_seed(seed) for _ in texts]
    written: list[list[int]] = [[] for _ in texts]
    going = [*range(len(texts))]
    was_training = model.training
    model.eval()
    while going and tokens:
        rows = [[*texts[text], *written[text]][-context:] for text in going]
        for text, logits in zip([*going], _next_logits(model, rows, context if padded else 0), strict=True):
            token = _draw(logits, temperature, top_k, draws[text])
            if token in ends:
                going.remove(text)
            else:
                written[text].append(token)
        tokens -= 1
    model.train(was_training)
    return written


def _next_logits(model: nn.Module, rows: Sequence[Sequence[int]], least: int) -> torch.Tensor:
    """The logits [texts, vocabulary] that follow each of ``rows``, in fp32 on the CPU."""
    lasts = [len(row) - 1 for row in rows]
    batch = torch.zeros(len(rows), max(least, *map(len, rows), 1), dtype=torch.long)
    for row, into in zip(rows, batch, strict=True):
        into[: len(row)] = torch.tensor(row)
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        kept = sorted({*lasts})
        logits = logits_of(model(batch, logits_to_keep=torch.tensor(kept)))
        lasts = [kept.index(last) for last in lasts]
    else:
        logits = logits_of(model(batch))
    return logits[torch.arange(len(rows)), torch.tensor(lasts)].float().cpu()


def _draw(logits: torch.Tensor, temperature: float, top_k: int, draws: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        logits = logits.where(logits >= logits.topk(top_k).values[-1], -torch.inf)
    return int(torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=draws))
