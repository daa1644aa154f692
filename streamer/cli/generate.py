"""Text from a model: samples of a run, and the command `streamer chat`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import streamer
from streamer.cli.build import refusals
from streamer.cli.config import ConfigError, SampleConfig
from streamer.cli.data import load_tokenizer, token_after_answer
from streamer.engine.handle import wrapped
from streamer.integrations.causal_lm import without_adapters


class Writer:
    """A wrapped model of transformers that continues texts, with the options of ``[sample]``.

    Raises ConfigError for a chat if the tokenizer has no template, or its template refuses the chat.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, options: SampleConfig) -> None:
        self.model, self.tokenizer, self.options = model, tokenizer, options
        self.prompts = [
            (prompt if isinstance(prompt, str) else str(prompt[-1]["content"]), self.tokens_of(prompt))
            for prompt in options.prompts
        ]
        own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        found = {
            *(own if isinstance(own, list) else [own]),
            tokenizer.eos_token_id,
            token_after_answer(tokenizer),
        }
        #: the tokens that end a text
        self.ends = sorted(token for token in found if token is not None)

    def samples(self, *, seed: int) -> Iterator[tuple[str, str]]:
        """Each prompt with the model's text. Training's random numbers stay unchanged."""
        device = next(iter(self.model.parameters())).device
        for prompt, tokens in self.prompts:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(seed)
                yield prompt, self.tokenizer.decode(self.continued(tokens), skip_special_tokens=True)

    @torch.no_grad()
    def continued(self, tokens: Sequence[int], **more: Any) -> list[int]:
        """The tokens that follow ``tokens``, at most ``sample.tokens``."""
        options, model = self.options, self.model
        was_training = model.training
        model.eval()
        drawn: dict[str, Any] = {"do_sample": False}
        if options.temperature:
            drawn = {"do_sample": True, "temperature": options.temperature, "top_k": options.top_k or None}
        device = next(iter(model.parameters())).device
        prompt = torch.tensor([list(tokens)], device=device if device.type == "cuda" else "cpu")
        generate: Any = model.generate
        try:
            found = generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=options.tokens,
                max_length=None,
                eos_token_id=self.ends or None,
                pad_token_id=self.ends[0] if self.ends else None,
                **drawn,
                **more,
            )
        finally:
            model.train(was_training)
        return [token for token in found[0, len(tokens) :].tolist() if token not in self.ends]

    def tokens_of(self, prompt: Any) -> list[int]:
        """The tokens of a text, or of a chat in the tokenizer's template, up to the answer."""
        if isinstance(prompt, str) and self.options.chat:
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        if not self.tokenizer.chat_template:
            raise ConfigError("a chat needs a template, and the tokenizer has none: use texts")
        try:
            text = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template may raise anything
            raise ConfigError(f"the tokenizer's template refuses a chat: {error}") from error
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def chat(place: str, options: SampleConfig, *, device: str | None = None) -> None:
    """A conversation on the terminal with the model of a Hugging Face folder, which may be adapters of peft,
    or of a run. The model is streamed. An empty line or the end of input ends it; "/new" begins another.

    Raises ConfigError if there is no such model.
    """
    from transformers import TextStreamer

    folder = folder_of_run(Path(place))
    model = load(folder, device)
    tokenizer = load_tokenizer(str(folder))
    writer = Writer(model, tokenizer, options)
    printing = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    is_chat = bool(tokenizer.chat_template)
    if not is_chat:
        print("The tokenizer has no chat template: the model continues your text.")
    messages: list[dict[str, str]] = []
    try:
        while line := input("> "):
            if line.strip() == "/new":
                messages = []
                continue
            messages.append({"role": "user", "content": line})
            answer = writer.continued(writer.tokens_of(messages if is_chat else line), streamer=printing)
            text = tokenizer.decode(answer, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text})
    except EOFError:
        print()
    finally:
        wrapped(without_adapters(model)).close()


def folder_of_run(place: Path) -> Path:
    """The folder of weights: that of a run's folder, or the folder itself. Raises ConfigError if there is
    neither."""
    for folder in (place, place / "model", place / "adapters"):
        if (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file():
            return folder
    raise ConfigError(
        f"{place}: neither a Hugging Face folder nor a finished run: streamer export writes one"
    )


def load(folder: Path, device: str | None) -> nn.Module:
    """The model in ``folder``, streamed; adapters are added to their base."""
    with refusals(str(folder)):
        if not (folder / "adapter_config.json").is_file():
            return streamer.from_pretrained(folder, device=device)
        import peft

        base = peft.PeftConfig.from_pretrained(str(folder)).base_model_name_or_path
        model: Any = streamer.from_pretrained(base, device=device)
        return peft.PeftModel.from_pretrained(model, folder)
