"""Texts from JSON: plain, prompts with completions, instructions or chats, and which parts have a loss."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamer.cli.config import ConfigError

JSON_LINES = (".jsonl", ".ndjson", ".json")
FORMS = (
    '{"text": ...}, {"prompt": ..., "completion": ...}, {"messages": [{"role": ..., "content": ...}]}, '
    '{"instruction": ..., "output": ...} or {"conversations": [{"from": ..., "value": ...}]}'
)
#: Who speaks in ShareGPT's form, by the names that are in use.
SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "function", "observation", "function_response"), "tool"),
}

#: Parts of a text [begin, end), in characters.
Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class Words:
    """A fast tokenizer of transformers, and its ``marks``: the tokens that stand for no text of their own."""

    tokenizer: Any
    marks: tuple[str, ...]

    @staticmethod
    def of(tokenizer: Any) -> Words:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        found = {token.content for token in added.values() if token.special}
        return Words(tokenizer, tuple(sorted(found | set(tokenizer.all_special_tokens))))

    @property
    def source(self) -> str:
        """The folder that it is from, to be put behind "the tokenizer"; empty where that is not known."""
        folder = getattr(self.tokenizer, "name_or_path", "")
        return f" in {folder}" if folder else ""

    @property
    def has_template(self) -> bool:
        """Whether it can write chats."""
        return bool(getattr(self.tokenizer, "chat_template", None))


@dataclass(frozen=True)
class Document:
    """A text, of which the ``answers`` have a loss; all else is prompt. ``begins``: the tokenizer adds its
    token for the beginning, which a chat template writes itself. ``ends``: an end-of-text token follows,
    which a chat template may have written too."""

    where: str
    text: str
    answers: Spans
    begins: bool = True
    ends: bool = True

    @property
    def is_whole(self) -> bool:
        """Whether it has no prompt."""
        return self.answers == [(0, len(self.text))]


def read_items(path: Path) -> Iterator[tuple[str, Any]]:
    """The objects of a file in JSON lines, or of one JSON array, each with where it is, ``"file:line"``.

    Raises ConfigError that names file, line and column for what is not JSON in UTF-8.
    """
    with path.open("rb") as file:
        head = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
        file.seek(0)
        if head.startswith(b"["):
            array = _parsed(str(path), file.read())
            yield from ((f"{path}, item {number}", item) for number, item in enumerate(array, start=1))
            return
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{path}:{number}", _parsed(f"{path}:{number}", line)


def _parsed(where: str, content: bytes) -> Any:
    try:
        return json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not UTF-8 ({error.reason}): convert the file") from None
    except json.JSONDecodeError as error:
        line = "" if error.lineno == 1 else f"{error.lineno}:"
        raise ConfigError(f"{where}:{line}{error.colno}: not JSON: {error.msg}") from None
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply") from None


def of_item(where: str, item: Any, words: Words) -> list[Document]:
    """The documents of one object: one, but for a chat whose template writes earlier answers otherwise."""
    documents = _of_item(where, item, words)
    for document in documents:
        try:
            document.text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{where}: half of a character ({document.text[error.start]!a}): correct the text"
            ) from None
    return documents


def _of_item(where: str, item: Any, words: Words) -> list[Document]:
    keys = set(item) if isinstance(item, dict) else set()
    if "messages" in keys:
        return _chat(where, item["messages"], item.get("tools"), words)
    if "conversations" in keys:
        return _chat(where, _of_share_gpt(where, item), item.get("tools"), words)
    if {"instruction", "output"} <= keys:
        return _of_alpaca(where, item, words)
    wanted = ("prompt", "completion") if "prompt" in keys else ("text",)
    parts = [item[key] for key in wanted] if keys.issuperset(wanted) else []
    if not parts or not all(isinstance(part, str) for part in parts):
        raise _of_no_form(where)
    text = "".join(parts)
    return [Document(where, text, [(len(text) - len(parts[-1]), len(text))])]


def _of_no_form(where: str) -> ConfigError:
    return ConfigError(f"{where}: a line must be {FORMS}, with strings")


def _of_share_gpt(where: str, item: Mapping[str, Any]) -> list[dict[str, Any]]:
    turns = item["conversations"]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise _of_no_form(where)
    messages = [{"role": "system", "content": item["system"]}] if isinstance(item.get("system"), str) else []
    for turn in turns:
        role, value = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if role not in SPEAKERS or not isinstance(value, str):
            known = ", ".join(SPEAKERS)
            raise ConfigError(f'{where}: of each turn "from" must be one of {known}, and "value" a string')
        messages.append({"role": SPEAKERS[role], "content": value})
    return messages


def _of_alpaca(where: str, item: Mapping[str, Any], words: Words) -> list[Document]:
    parts = [item["instruction"], item.get("input") or "", item["output"]]
    if not all(isinstance(part, str) for part in parts):
        raise _of_no_form(where)
    instruction, context, output = parts
    if item.get("history"):
        raise ConfigError(f'{where}: "history" is of no form that is known here: give {{"messages": [...]}}')
    if words.has_template:
        question = f"{instruction}\n\n{context}" if context else instruction
        system = item.get("system")
        before = [{"role": "system", "content": system}] if isinstance(system, str) and system else []
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": output}]
        return _chat(where, [*before, *turns], None, words)
    between = f"### Input:\n{context}\n\n" if context else ""
    prompt = f"### Instruction:\n{instruction}\n\n{between}### Response:\n"
    return [Document(where, prompt + output, [(len(prompt), len(prompt) + len(output))])]


def _messages(where: str, item: Any) -> list[dict[str, Any]]:
    """Messages with strings as their contents: parts of type "text" are put together."""
    if not isinstance(item, list) or not item:
        raise _of_no_form(where)
    messages = []
    for message in item:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _of_no_form(where)
        content = message.get("content")
        if content is None and message["role"] == "assistant" and message.get("tool_calls"):
            content = ""
        if isinstance(content, list) and all(isinstance(part, dict) for part in content):
            others = {str(part.get("type")) for part in content} - {"text"}
            if others:
                raise ConfigError(
                    f"{where}: content of type {sorted(others)[0]!r}: only text is trained on; leave it out"
                )
            content = "".join(str(part.get("text", "")) for part in content)
        if not isinstance(content, str):
            raise _of_no_form(where)
        messages.append({**message, "content": content})
        if calls := message.get("tool_calls"):
            messages[-1]["tool_calls"] = [_with_arguments(call) for call in calls]
    return messages


def _with_arguments(call: Any) -> Any:
    """A call of a tool with its arguments as an object, as templates take them; OpenAI's are JSON in a
    string."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except ValueError:
        return call


def _chat(where: str, item: Any, tools: Any, words: Words) -> list[Document]:
    """A chat, written by the tokenizer's template; the assistant's turns are the answers.

    Some templates write an answer differently when others follow, as without its reasoning. Then each answer
    is a document of its own, after the turns before it."""
    messages = _messages(where, item)
    if not words.has_template:
        raise ConfigError(
            f"{where}: the tokenizer{words.source} has no chat template: give prompt and completion, or "
            "text, or put a chat_template.jinja next to it"
        )

    def written(count: int, **options: Any) -> str:
        try:
            text: str = words.tokenizer.apply_chat_template(
                messages[:count], tools=tools, tokenize=False, **options
            )
        except Exception as error:  # a template may raise anything
            raise ConfigError(f"{where}: the tokenizer's chat template: {error}") from error
        return text

    marks = words.marks
    text = written(len(messages))
    spans: Spans = []
    parts: list[Document] = []
    is_one = True
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or _is_muted(message):
            continue
        after = text if index + 1 == len(messages) else written(index + 1)
        if index:
            before = written(index, add_generation_prompt=True)
        else:  # a template has nothing to ask with
            before = after.partition(message["content"])[0]
        if not after.startswith(before):
            raise ConfigError(
                f"{where}: the tokenizer's chat template writes what comes before an answer otherwise when "
                "the answer follows, so that what the assistant says is not known: give prompt and "
                "completion, or text"
            )
        end = _end_of_turn(after, marks)
        spans.append((len(before), end))
        parts.append(_written(where, after, [(len(before), end)], marks))
        is_one = is_one and text.startswith(after[:end])
    return [_written(where, text, spans, marks)] if is_one else parts


def _is_muted(message: Mapping[str, Any]) -> bool:
    """Whether an answer is marked to have no loss, as in OpenAI's format or axolotl's."""
    return message.get("weight") == 0 or message.get("train") is False


def _written(where: str, text: str, answers: Spans, marks: Sequence[str]) -> Document:
    has_end = text.rstrip().endswith(tuple(marks))
    return Document(where, text, answers, begins=False, ends=not has_end)


#: What stands for an answer where only what follows it matters.
_ANSWER = "the answer"


def token_after_answer(words: Words) -> int | None:
    """The token that ends an assistant's turn in the tokenizer's template for chats; None where that has no
    template, or ends turns by text."""
    if not words.has_template:
        return None
    turns = [("user", "a question"), ("assistant", _ANSWER), ("user", "another question")]
    messages = [{"role": role, "content": content} for role, content in turns]
    try:
        text: str = words.tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # a template may raise anything, such as one for other roles: it ends no such turn
        return None
    after = text.rpartition(_ANSWER)[2].lstrip()
    ends = [mark for mark in words.marks if after.startswith(mark)]
    return None if not ends else int(words.tokenizer.convert_tokens_to_ids(max(ends, key=len)))


def _end_of_turn(text: str, marks: Sequence[str]) -> int:
    """Where what the assistant says ends: with the token that ends its turn, if there is one. What the
    template writes after that is not the assistant's."""
    bare = text.rstrip()
    return len(bare) if bare.endswith(tuple(marks)) else len(text)
