"""What a line of JSON means: a text, a prompt with its completion, or a chat; and what of it is learnt."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamer.app.config import ConfigError

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
    """A text of which the parts ``learnt`` are to be learnt. ``begins`` says whether the tokenizer adds its
    special token for the beginning; the template of a chat has written it already. ``ends`` says whether an
    end-of-text token follows, which the template of a chat may have written too."""

    where: str
    text: str
    learnt: Spans
    begins: bool = True
    ends: bool = True

    @property
    def is_whole(self) -> bool:
        """Whether all of it is learnt."""
        return self.learnt == [(0, len(self.text))]


def read_lines(path: Path, words: Words, begin: int = 0) -> Iterator[tuple[list[Document], int]]:
    """The documents of each line of ``path`` from byte ``begin`` on, and the byte at which the next line
    begins. A file that is one JSON array has an item for a line, is read whole and always from its
    beginning: the byte is 0 before its last item.

    Raises ConfigError, in one line that names file and line, for what is not in one of the `FORMS`.
    """
    with path.open("rb") as file:
        head = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
        if head.startswith(b"["):
            file.seek(0)
            yield from _array(path, file.read(), words)
            return
        file.seek(begin)
        # counted again where it goes on in the middle, for messages
        number = _lines_before(path, begin)
        for line in file:
            number += 1
            where = f"{path}:{number}"
            begin += len(line)
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"{path}: not UTF-8 ({error.reason} in line {number}); convert it"
                ) from None
            if text.strip():
                yield of_item(where, _parsed(where, text), words), begin


def _lines_before(path: Path, end: int) -> int:
    if not end:
        return 0
    with path.open("rb") as file:
        count, left = 0, end
        while left and (part := file.read(min(left, 1 << 20))):
            count, left = count + part.count(b"\n"), left - len(part)
    return count


def _array(path: Path, content: bytes, words: Words) -> Iterator[tuple[list[Document], int]]:
    try:
        items = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        # an array on one line of several, perhaps
        first = content.decode("utf-8", errors="replace").split("\n")[0]
        where = f"{path}:1"
        raise ConfigError(
            f"{where}: not JSON, neither the file nor its line {first[:40]!r}: {error}"
        ) from None
    for number, item in enumerate(items, start=1):
        yield of_item(f"{path}, item {number}", item, words), len(content) if number == len(items) else 0


def _parsed(where: str, line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not an object in JSON on a line of its own: {error}") from None


def of_item(where: str, given: Any, words: Words) -> list[Document]:
    """The documents of one object: one, but for a chat whose template writes earlier answers otherwise."""
    documents = _of_item(where, given, words)
    for document in documents:
        try:
            document.text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{where}: half of a character ({document.text[error.start]!a}): correct the text"
            ) from None
    return documents


def _of_item(where: str, given: Any, words: Words) -> list[Document]:
    keys = set(given) if isinstance(given, dict) else set()
    if "messages" in keys:
        return _chat(where, given["messages"], given.get("tools"), words)
    if "conversations" in keys:
        return _chat(where, _of_share_gpt(where, given), given.get("tools"), words)
    if {"instruction", "output"} <= keys:
        return _of_alpaca(where, given, words)
    wanted = ("prompt", "completion") if "prompt" in keys else ("text",)
    parts = [given[key] for key in wanted] if keys.issuperset(wanted) else []
    if not parts or not all(isinstance(part, str) for part in parts):
        raise _of_no_form(where)
    text = "".join(parts)
    return [Document(where, text, [(len(text) - len(parts[-1]), len(text))])]


def _of_no_form(where: str) -> ConfigError:
    return ConfigError(f"{where}: a line must be {FORMS}, with strings")


def _of_share_gpt(where: str, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    turns = given["conversations"]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise _of_no_form(where)
    messages = (
        [{"role": "system", "content": given["system"]}] if isinstance(given.get("system"), str) else []
    )
    for turn in turns:
        role, value = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if role not in SPEAKERS or not isinstance(value, str):
            known = ", ".join(SPEAKERS)
            raise ConfigError(f'{where}: of each turn "from" must be one of {known}, and "value" a string')
        messages.append({"role": SPEAKERS[role], "content": value})
    return messages


def _of_alpaca(where: str, given: Mapping[str, Any], words: Words) -> list[Document]:
    parts = [given["instruction"], given.get("input") or "", given["output"]]
    if not all(isinstance(part, str) for part in parts):
        raise _of_no_form(where)
    instruction, context, output = parts
    if given.get("history"):
        raise ConfigError(f'{where}: "history" is of no form that is known here: give {{"messages": [...]}}')
    if words.has_template:
        asked = f"{instruction}\n\n{context}" if context else instruction
        system = given.get("system")
        before = [{"role": "system", "content": system}] if isinstance(system, str) and system else []
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": output}]
        return _chat(where, [*before, *turns], None, words)
    between = f"### Input:\n{context}\n\n" if context else ""
    prompt = f"### Instruction:\n{instruction}\n\n{between}### Response:\n"
    return [Document(where, prompt + output, [(len(prompt), len(prompt) + len(output))])]


def _messages(where: str, given: Any) -> list[dict[str, Any]]:
    """Messages with strings as their contents: parts of type "text" are put together."""
    if not isinstance(given, list) or not given:
        raise _of_no_form(where)
    messages = []
    for message in given:
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


def _chat(where: str, given: Any, tools: Any, words: Words) -> list[Document]:
    """A chat, written by the tokenizer's template. What the assistant says is learnt, to the end of its turn.

    A template may write an answer otherwise when others follow (without its reasoning, say): then each answer
    is a document of its own, after what comes before it.
    """
    messages = _messages(where, given)
    if not words.has_template:
        raise ConfigError(
            f"{where}: the tokenizer{words.source} has no chat template: give prompt and completion, or "
            "text, or put a chat_template.jinja beside it"
        )

    def written(count: int, **options: Any) -> str:
        try:
            text: str = words.tokenizer.apply_chat_template(
                messages[:count], tools=tools, tokenize=False, **options
            )
        except Exception as error:  # whatever a template raises
            raise ConfigError(f"{where}: the tokenizer's chat template: {error}") from error
        return text

    marks = words.marks
    text = written(len(messages))
    learnt: Spans = []
    answers: list[Document] = []
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
        learnt.append((len(before), end))
        answers.append(_written(where, after, [(len(before), end)], marks))
        is_one = is_one and text.startswith(after[:end])
    return [_written(where, text, learnt, marks)] if is_one else answers


def _is_muted(message: Mapping[str, Any]) -> bool:
    """Whether an answer is marked as not to be learnt: as OpenAI's files do, or axolotl's."""
    return message.get("weight") == 0 or message.get("train") is False


def _written(where: str, text: str, learnt: Spans, marks: Sequence[str]) -> Document:
    has_end = text.rstrip().endswith(tuple(marks))
    return Document(where, text, learnt, begins=False, ends=not has_end)


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
    except Exception:  # whatever a template raises, such as one for other roles: it ends no such turn
        return None
    after = text.rpartition(_ANSWER)[2].lstrip()
    ends = [mark for mark in words.marks if after.startswith(mark)]
    return None if not ends else int(words.tokenizer.convert_tokens_to_ids(max(ends, key=len)))


def _end_of_turn(text: str, marks: Sequence[str]) -> int:
    """Where what the assistant says ends: with the token that ends its turn, if there is one. What the
    template writes after that is not the assistant's."""
    bare = text.rstrip()
    return len(bare) if bare.endswith(tuple(marks)) else len(text)
