"""Text and JSON lines as the tokens of a model's own tokenizer."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from streamer.app.config import ConfigError
from streamer.app.data import IGNORED, Split, TokenData, cut_before_tail, held_out
from streamer.app.text_files import find_files, read_bytes
from streamer.pretrained.architecture import transformers_library

JSON_LINES = (".jsonl", ".ndjson", ".json")
FORMS = '{"text": ...}, {"prompt": ..., "completion": ...} or {"messages": [{"role": ..., "content": ...}]}'

#: Parts of a text [begin, end), in characters.
Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class Document:
    """A text of which the parts ``learnt`` are to be learnt. ``begins`` says whether the tokenizer puts its
    mark of a text's beginning before it; a chat's template has done so."""

    where: str
    text: str
    learnt: Spans
    begins: bool = True


def load_tokenizer(folder: str) -> Any:
    """The tokenizer in a Hugging Face folder. Raises ConfigError where there is none that can be used."""
    if not os.path.exists(folder):
        raise ConfigError(f"{folder}: no such folder, and nothing is downloaded: give a local one")
    if not os.path.isdir(folder):
        folder = os.path.dirname(folder) or "."
    try:
        tokenizer = transformers_library().AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{folder}: no tokenizer to be had from it ({error}); set data.tokenizer"
        ) from error
    if not tokenizer.is_fast:
        raise ConfigError(f"{folder}: its tokenizer does not tell where tokens are; give a tokenizer.json")
    return tokenizer


def load_tokens(paths: Sequence[str | os.PathLike[str]], tokenizer: Any, *, val_fraction: float) -> TokenData:
    """The documents at ``paths`` (see ``find_files``), one after another, each with an end-of-text token.

    A file is one document; each line of a file in JSON lines is one, in one of the `FORMS`: of a prompt with
    a completion only the completion is learnt, of a chat what the assistant says. Which documents are for
    validation follows from a hash of their texts; of a single document the tail is.

    Raises ConfigError, in one line that names file and line, for what is not in one of these forms, and where
    a split has nothing to learn.
    """
    documents = [document for path in find_files(paths) for document in _documents(path, tokenizer)]
    if not documents:
        raise ConfigError(f"{', '.join(map(str, paths))}: no documents in it; give some")
    encoded = [_encode(document, tokenizer) for document in documents]
    if len(encoded) == 1:
        [(tokens, targets)] = encoded
        cut = cut_before_tail(len(tokens), val_fraction, f"{documents[0].where}: one token")
        splits = {"train": [(tokens[:cut], targets[:cut])], "val": [(tokens[cut:], targets[cut:])]}
    else:
        # those that are there twice stay together: in both splits they would flatter the loss
        sizes: Counter[str] = Counter()
        for document, (tokens, _) in zip(documents, encoded, strict=True):
            sizes[document.text] += len(tokens)
        held = held_out(sizes, str.encode, val_fraction)
        pairs = list(zip(documents, encoded, strict=True))
        splits = {
            "train": [both for document, both in pairs if document.text not in held],
            "val": [both for document, both in pairs if document.text in held],
        }
        if not splits["train"]:
            raise ConfigError(f"{documents[0].where}: all documents are the same; give more")
    names: tuple[Split, Split] = ("train", "val")
    joined = {name: [torch.cat(parts) for parts in zip(*splits[name], strict=True)] for name in names}
    for name in names:
        if bool((joined[name][1] == IGNORED).all()):
            raise ConfigError(f"the {name} split has nothing to learn: give more documents")
    return TokenData(
        train=joined["train"][0],
        val=joined["val"][0],
        targets={name: joined[name][1] for name in names},
        unit="token",
        vocab_size=len(tokenizer),
        decode=tokenizer.decode,
        tokenizer=tokenizer,
    )


def _documents(path: Path, tokenizer: Any) -> Iterator[Document]:
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 ({error.reason} at byte {error.start}); convert it") from None
    if path.suffix.lower() not in JSON_LINES:
        yield Document(str(path), text, [(0, len(text))])
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _of_line(f"{path}:{number}", line, tokenizer)


def _of_line(where: str, line: str, tokenizer: Any) -> Document:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not an object in JSON on a line of its own: {error}") from None
    keys = set(given) if isinstance(given, dict) else set()
    if "messages" in keys:
        return _chat(where, given["messages"], given.get("tools"), tokenizer)
    wanted = ("prompt", "completion") if "prompt" in keys else ("text",)
    parts = [given[key] for key in wanted] if keys.issuperset(wanted) else []
    if not parts or not all(isinstance(part, str) for part in parts):
        raise ConfigError(f"{where}: a line must be {FORMS}, with strings")
    text = "".join(parts)
    return Document(where, text, [(len(text) - len(parts[-1]), len(text))])


def _chat(where: str, messages: Any, tools: Any, tokenizer: Any) -> Document:
    """A chat by the tokenizer's template, of which what the assistant says is learnt."""
    if not (
        isinstance(messages, list)
        and messages
        and all(isinstance(m, dict) for m in messages)
        and all(isinstance(message.get(key), str) for message in messages for key in ("role", "content"))
    ):
        raise ConfigError(f"{where}: a line must be {FORMS}, with strings")
    if not tokenizer.chat_template:
        raise ConfigError(f"{where}: the tokenizer has no chat template: give prompt and completion, or text")

    def written(count: int, **options: Any) -> str:
        try:
            text: str = tokenizer.apply_chat_template(
                messages[:count], tools=tools, tokenize=False, **options
            )
        except Exception as error:  # whatever a template raises
            raise ConfigError(f"{where}: the tokenizer's chat template: {error}") from error
        return text

    text = written(len(messages))
    learnt = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = written(index, add_generation_prompt=True), written(index + 1)
            if not after.startswith(before) or not text.startswith(after):
                raise ConfigError(
                    f"{where}: the tokenizer's chat template writes a message otherwise when others follow, "
                    "so that what the assistant says is not known: give prompt and completion, or text"
                )
            learnt.append((len(before), len(after)))
    return Document(where, text, learnt, begins=False)


def _encode(document: Document, tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, int32 and int64 [length]."""
    encoded = tokenizer(
        document.text,
        add_special_tokens=document.begins,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,  # that it is longer than the model's context
    )
    tokens, places = list(encoded["input_ids"]), encoded["offset_mapping"]
    whole = document.learnt == [(0, len(document.text))]

    def is_learnt(place: tuple[int, int]) -> bool:
        # also if it begins with the last space of a prompt and ends in the completion
        return whole or any(begin < place[1] and place[0] < end for begin, end in document.learnt)

    targets = [token if is_learnt(place) else IGNORED for token, place in zip(tokens, places, strict=True)]
    end = tokenizer.eos_token_id
    if end is not None:
        if tokens[-1:] == [end]:  # some tokenizers put it there
            tokens.pop()
            targets.pop()
        tokens.append(end)
        at_end = bool(document.learnt) and document.learnt[-1][1] == len(document.text)
        targets.append(end if at_end else IGNORED)
    return torch.tensor(tokens, dtype=torch.int32), torch.tensor(targets, dtype=torch.int64)
