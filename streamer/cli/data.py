"""The files of a run, the datasets of tokens for a Hugging Face folder, and the command `streamer data`."""

from __future__ import annotations

import os
import statistics
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from streamer.cli.config import Config, ConfigError, DataConfig
from streamer.integrations.causal_lm import IGNORED

#: Files that the datasets library reads; all others are text.
READERS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
    **{".parquet": "parquet", ".arrow": "arrow", ".csv": "csv"},
}
#: Files of tokens: nanoGPT's (uint16, one after another), and NumPy's arrays.
TOKEN_FILES = (".bin", ".npy")
#: Folders of the standard library that are no sources.
NOT_LIBRARY = ("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data")
FORMS = (
    '{"text": ...}, {"prompt": ..., "completion": ...}, {"messages": [{"role": ..., "content": ...}]}, '
    '{"instruction": ..., "output": ...} or {"conversations": [{"from": ..., "value": ...}]}'
)
#: Roles by ShareGPT's names.
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response"), "tool"),
    "system": "system",
}
#: Bytes of a text file that are one document.
PIECE = 1 << 16
#: Marks around tokens with a loss: on a terminal, and elsewhere.
COLOURS, BRACKETS = ("\033[1;32m", "\033[0m"), ("⟦", "⟧")

# files


def find_files(paths: Sequence[str] = ()) -> list[Path]:
    """The files at ``paths``, sorted, each once; with no paths the sources of the Python standard library.

    Of a folder: all files in it that hold data, at any depth; hidden, empty and binary ones are left out.
    Raises ConfigError, which names the path and the remedy, for one that is missing, empty or binary."""
    if not paths:
        library = Path(sysconfig.get_path("stdlib"))
        return [path for path in _in_folder(library, NOT_LIBRARY) if path.suffix == ".py"]
    found: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise ConfigError(f"{path}: no such file or folder in {os.getcwd()}: correct data.paths")
        files = _in_folder(path) if path.is_dir() else [path] if _has_data(path) else []
        if not files:
            raise ConfigError(f"{path}: empty, or binary (with NUL bytes): use text, JSON lines or Parquet")
        found += files
    return sorted(set(found))


def _in_folder(folder: Path, skip: Collection[str] = ()) -> list[Path]:
    found: list[Path] = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name[0] != "." and name not in skip]
        found += [Path(root, name) for name in names if name[0] != "."]
    return sorted(path for path in found if path.is_file() and _has_data(path))


def _has_data(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(8192)
    is_binary = path.suffix.lower() in (*TOKEN_FILES, ".parquet", ".arrow")
    return bool(head) and (is_binary or b"\0" not in head)


# datasets


def load_data(config: Config, tokenizer: Any, *, seed: int, answers_only: bool = True) -> tuple[Any, Any]:
    """Datasets to train on and to validate on, with ``input_ids`` and ``labels`` [time] for each document.

    Labels are tokens, or -100 where a token has no loss: with ``answers_only`` those of prompts and of all
    messages that are not the assistant's. TRL finds these tokens only if it knows the chat template; here
    they are found in the text of any template. Plain text is cut to pieces of ``train.max_length`` tokens;
    chats stay whole. The datasets library caches the tokens in files.

    Raises ConfigError, in one line, for data that cannot be read or is in no known form, and if nothing has a
    loss."""
    import datasets

    check_data(config)

    def tokens_of(paths: Sequence[str]) -> Any:
        numbers = datasets.List(datasets.Value("int32"))
        parts = []
        for source, rows in _read(config.data, paths):
            encode = partial(
                _encode_rows,
                source=source,
                columns=config.data.columns,
                tokenizer=tokenizer,
                context=config.train.max_length,
                answers_only=answers_only,
            )
            parts.append(
                rows.map(
                    encode,
                    batched=True,
                    with_indices=True,
                    remove_columns=rows.column_names,
                    features=datasets.Features({"input_ids": numbers, "labels": numbers}),
                )
            )
        return datasets.concatenate_datasets(parts)

    train = tokens_of(config.data.paths)
    if config.data.val_paths:
        validation = tokens_of(config.data.val_paths)
    else:
        if len(train) < 2:
            raise ConfigError("data.val_fraction: there is one document only: set data.val_paths")
        size = max(1, round(len(train) * config.data.val_fraction))
        parts = train.train_test_split(test_size=size, seed=seed)
        train, validation = parts["train"], parts["test"]
    for name, found in (("train", train), ("validation", validation)):
        if not any(label != IGNORED for row in found for label in row["labels"][1:]):
            raise ConfigError(f"the {name} data has no answer: add chats with answers of the assistant")
    return train, validation


def check_data(config: Config) -> None:
    """Raise ConfigError for files that are missing, before anything is read."""
    data = config.data
    if data.dataset is None and not data.paths:
        raise ConfigError("there is nothing to train on: name files or folders by --data, or data.paths")
    for paths in (data.paths, data.val_paths):
        if paths:
            find_files(paths)


def _read(data: DataConfig, paths: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The rows of the files at ``paths``, or of ``data.dataset``, as datasets with the name of their
    source."""
    import datasets

    if data.dataset is not None and paths is data.paths:
        try:
            yield data.dataset, datasets.load_dataset(data.dataset, data.name, split=data.split)
        except Exception as error:  # the library may raise anything for a name, a network or a file
            raise ConfigError(f"data.dataset = {data.dataset!r}: {error}") from error
        return
    files = find_files(paths)
    # the cache is found again by the arguments: they must change with a file
    texts = [(str(path), path.stat().st_mtime_ns) for path in files if path.suffix.lower() not in READERS]
    if texts:
        yield texts[0][0], datasets.Dataset.from_generator(_pieces, gen_kwargs={"files": texts})
    for path in files:
        reader = READERS.get(path.suffix.lower())
        if reader is not None:
            try:
                yield str(path), datasets.load_dataset(reader, data_files=str(path), split="train")
            except datasets.exceptions.DatasetGenerationError as error:
                raise ConfigError(f"{path}: it cannot be read as {reader}: {error.__cause__}") from error


def _pieces(files: Sequence[tuple[str, int]]) -> Iterator[dict[str, str]]:
    """Texts in pieces of about `PIECE` bytes, each ending with a line."""
    for path, _ in files:
        try:
            with open(path, encoding="utf-8-sig", newline="") as file:
                while lines := file.readlines(PIECE):
                    yield {"text": "".join(lines)}
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not UTF-8 ({error.reason}): convert it") from None


def _encode_rows(
    rows: Mapping[str, list[Any]],
    numbers: Sequence[int],
    *,
    source: str,
    columns: Mapping[str, str],
    tokenizer: Any,
    context: int,
    answers_only: bool,
) -> dict[str, list[list[int]]]:
    documents = []
    for number, values in zip(numbers, zip(*rows.values(), strict=True), strict=True):
        row = {columns.get(name, name): value for name, value in zip(rows, values, strict=True)}
        row = {name: value for name, value in row.items() if value is not None}
        try:
            documents += documents_of(row, tokenizer)
        except ConfigError as error:
            raise ConfigError(f"{source}, row {number + 1}: {error}") from error
    found: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    for document, tokens, labels in encode(documents, tokenizer, answers_only=answers_only):
        step = context if document.is_whole else len(tokens)
        for begin in range(0, len(tokens), step):
            found["input_ids"].append(tokens[begin : begin + step])
            found["labels"].append(labels[begin : begin + step])
    return found


# documents


@dataclass(frozen=True)
class Document:
    """A text. Its ``answers`` [begin, end) have a loss, all else is prompt. The template of a chat writes the
    special tokens itself, but may leave out the one at the end."""

    text: str
    answers: Sequence[tuple[int, int]]
    is_chat: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether it has no prompt."""
        return self.answers == [(0, len(self.text))]


def documents_of(row: Mapping[str, Any], tokenizer: Any) -> list[Document]:
    """The documents of one row: one, but for a chat whose template writes earlier answers otherwise. Raises
    ConfigError for a row of no known form."""
    try:
        if "messages" in row:
            return _chat(row["messages"], row.get("tools"), tokenizer)
        if "conversations" in row:
            return _chat(_of_share_gpt(row), row.get("tools"), tokenizer)
        if "instruction" in row:
            return _of_alpaca(row, tokenizer)
        prompt, answer = (row["prompt"], row["completion"]) if "prompt" in row else ("", row["text"])
        if not isinstance(prompt, str):
            raise TypeError
        return [Document(prompt + answer, [(len(prompt), len(prompt + answer))])]
    except (KeyError, TypeError, AttributeError):
        raise ConfigError(f"a line must be {FORMS}, with strings") from None


def _of_share_gpt(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    for message in row["conversations"]:
        role, content = message.get("from", message.get("role")), message.get("value", message.get("content"))
        messages.append({"role": ROLES[role], "content": content})
    return messages


def _of_alpaca(row: Mapping[str, Any], tokenizer: Any) -> list[Document]:
    instruction, context, output = row["instruction"], row.get("input") or "", row["output"]
    if tokenizer.chat_template:
        question = f"{instruction}\n\n{context}" if context else instruction
        messages = [{"role": "system", "content": row["system"]}] if row.get("system") else []
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": output}]
        return _chat(messages, None, tokenizer)
    between = f"### Input:\n{context}\n\n" if context else ""
    prompt = f"### Instruction:\n{instruction}\n\n{between}### Response:\n"
    return [Document(prompt + output, [(len(prompt), len(prompt + output))])]


def _with_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with a string as its content: parts of type "text" are put together."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    elif content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise TypeError
    return {**message, "role": message["role"], "content": content}


def _chat(messages: Sequence[Mapping[str, Any]], tools: Any, tokenizer: Any) -> list[Document]:
    """A chat, written by the tokenizer's template; the assistant's messages are the answers.

    Some templates write an answer differently if others follow, as without its reasoning. Then each answer is
    a document of its own, after the messages before it."""
    messages = [_with_text(message) for message in messages]
    if not tokenizer.chat_template:
        raise ConfigError("the tokenizer has no chat template: use prompt and completion, or text")

    def written(count: int, **options: Any) -> str:
        try:
            template = tokenizer.apply_chat_template
            return str(template(messages[:count], tools=tools, tokenize=False, **options))
        except Exception as error:  # a template may raise anything
            raise ConfigError(f"the tokenizer's chat template: {error}") from error

    whole, marks = written(len(messages)), special_tokens(tokenizer)
    parts: list[Document] = []
    for index, message in enumerate(messages):
        # marked as not to be trained on, in OpenAI's format or axolotl's
        if message["role"] != "assistant" or message.get("weight") == 0 or message.get("train") is False:
            continue
        after = written(index + 1)
        before = (
            written(index, add_generation_prompt=True) if index else after.partition(message["content"])[0]
        )
        if not after.startswith(before):
            raise ConfigError(
                "the tokenizer's chat template writes the prompt otherwise if an answer follows: use prompt "
                "and completion, or text"
            )
        # the answer ends with the token that ends its message, if there is one
        bare = after.rstrip()
        end = len(bare) if bare.endswith(marks) else len(after)
        parts.append(Document(after, [(len(before), end)], is_chat=True))
    answers = [span for part in parts for span in part.answers]
    if all(whole.startswith(part.text[: part.answers[0][1]]) for part in parts):
        return [Document(whole, answers, is_chat=True)]
    return parts


def special_tokens(tokenizer: Any) -> tuple[str, ...]:
    """The tokens that stand for no text of their own."""
    return tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)


def encode(
    documents: Sequence[Document], tokenizer: Any, *, answers_only: bool = True
) -> Iterator[tuple[Document, list[int], list[int]]]:
    """The tokens and labels of documents. A token that begins in the prompt and ends in the answer has a
    loss; so has the end-of-text token after an answer."""
    if not documents:
        return
    first, last, marks = tokenizer.bos_token_id, tokenizer.eos_token_id, special_tokens(tokenizer)
    adds_first = first is not None and tokenizer("")["input_ids"][:1] == [first]
    encoded = tokenizer(
        [document.text for document in documents],
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,  # no warning that a text is longer than the model's context
    )
    rows = zip(documents, encoded["input_ids"], encoded["offset_mapping"], strict=True)
    for document, tokens, offsets in rows:
        places = np.array(offsets, dtype=np.int64).reshape(-1, 2)
        has_loss = np.full(len(tokens), not answers_only)
        for begin, end in document.answers:
            has_loss |= (begin < places[:, 1]) & (places[:, 0] < end)
        tokens = list(tokens)
        if adds_first and not document.is_chat and tokens[:1] != [first]:
            tokens, has_loss = [first, *tokens], np.append(document.is_whole or not answers_only, has_loss)
        is_ended = document.text.rstrip().endswith(marks) if document.is_chat else tokens[-1:] == [last]
        if last is not None and not is_ended:
            at_end = bool(document.answers) and document.answers[-1][1] == len(document.text)
            tokens, has_loss = [*tokens, last], np.append(has_loss, at_end or not answers_only)
        yield document, tokens, np.where(has_loss, tokens, IGNORED).tolist()


def token_after_answer(tokenizer: Any) -> int | None:
    """The token that ends an assistant's message in the tokenizer's template; None if there is none."""
    answer = "the answer"
    messages = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": answer}]
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # there is no template, or it is for other roles
        return None
    after = text.rpartition(answer)[2].lstrip()
    ends = [mark for mark in special_tokens(tokenizer) if after.startswith(mark)]
    return int(tokenizer.convert_tokens_to_ids(max(ends, key=len))) if ends else None


def load_tokenizer(folder: str) -> Any:
    """The fast tokenizer of a Hugging Face folder. Raises ConfigError if there is none."""
    import transformers

    if not Path(folder).exists():
        raise ConfigError(f"{folder}: no such folder: correct model.path (--model)")
    place = Path(folder) if Path(folder).is_dir() else Path(folder).parent
    if not any([*place.glob(pattern)] for pattern in ("tokenizer*", "vocab.json", "*.model")):
        raise ConfigError(f"{folder}: there is no tokenizer in it: copy the model's tokenizer.json there")
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(place, local_files_only=True)
    except Exception as error:  # the library raises nearly anything for files that are damaged
        raise ConfigError(
            f"{place}: its tokenizer cannot be loaded ({error}): replace tokenizer.json"
        ) from error
    if not tokenizer.is_fast:
        raise ConfigError(f"{place}: its tokenizer has no offsets of tokens: put a tokenizer.json there")
    return tokenizer


# the command


def show_data(config: Config, count: int) -> None:
    """Print what the run's data consists of, and its first ``count`` documents with the answers marked.
    Raises ConfigError for data that cannot be used."""
    if config.model.path is None:
        raise ConfigError("streamer data is for a Hugging Face folder (--model): your own model reads bytes")
    tokenizer = load_tokenizer(config.model.path)
    train, validation = load_data(config, tokenizer, seed=config.train.seed)
    context = config.train.max_length
    for name, found in (("train", train), ("validation", validation)):
        lengths = [len(row["input_ids"]) for row in found]
        losses = sum(label != IGNORED for row in found for label in row["labels"])
        print(
            f"{name}: {len(found):,} documents of {sum(lengths):,} tokens, {losses:,} with a loss; the "
            f"median has {statistics.median(lengths):,.0f} tokens, the longest {max(lengths):,}"
        )
        if cut := sum(length > context for length in lengths):
            print(f"{name}: train.max_length = {context} cuts the ends of {cut:,} documents")
    before, after = COLOURS if sys.stdout.isatty() else BRACKETS
    for number, row in enumerate(train.select(range(min(count, len(train)))), 1):
        print(f"\n--- {number}: {len(row['input_ids']):,} tokens; those with a loss are marked")
        text, at = "", 0
        for is_answer, part in groupby(row["labels"][:context], lambda label: label != IGNORED):
            at += len([*part])
            longer = tokenizer.decode(row["input_ids"][:at])  # tokens may be written differently at the start
            more, text = longer[len(text) :], longer
            print(f"{before}{more}{after}" if is_answer else more, end="")
        print()
