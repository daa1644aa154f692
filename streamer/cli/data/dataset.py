"""The data of a Hugging Face folder's run, as datasets of tokens and labels; the command `streamer data`."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np

from streamer.cli.config import Config, ConfigError
from streamer.cli.data.documents import JSON_LINES, Document, Words, of_item, read_items
from streamer.cli.data.files import find_files, read_pieces
from streamer.integrations.causal_lm import IGNORED

#: Files that the datasets library reads.
TABLES = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv"}
#: Characters that are tokenized together, on all cores, and bytes of a text file that are one document.
TOGETHER, PIECE = 1 << 22, 1 << 16
#: What stands around answers: on a terminal, and elsewhere.
COLOURS, BRACKETS = ("\033[1;32m", "\033[0m"), ("⟦", "⟧")


def load_data(config: Config, tokenizer: Any, *, seed: int, answers_only: bool = True) -> tuple[Any, Any]:
    """Datasets to train on and to validate on, with ``input_ids`` and ``labels`` [time] for each document.

    Labels are tokens, or -100 where a token has no loss: with ``answers_only`` those of prompts and of all
    turns that are not the assistant's. Plain text is cut to pieces of ``train.max_length`` tokens; chats stay
    whole. The datasets library keeps the tokens in files, which later runs on the same files read.

    Raises ConfigError, in one line with file and line, for data that cannot be read or is in no known format,
    and where nothing has a loss."""
    datasets = datasets_library()
    data = config.data
    words, context = Words.of(tokenizer), config.train.max_length

    def dataset(paths: Sequence[str]) -> Any:
        files = [] if data.dataset is not None and paths is data.paths else find_files(paths)
        # a hash of the arguments names the cached files: they change with the files and the tokenizer
        state = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        options = {
            "state": state,
            "config": config.data,
            "words": hashlib.sha256(_identity(tokenizer).encode()).hexdigest(),
            "context": context,
            "answers_only": answers_only,
        }
        make = _Examples(files, words, config)
        numbers = datasets.List(datasets.Value("int32"))
        features = datasets.Features({"input_ids": numbers, "labels": numbers})
        name = hashlib.sha256(repr(sorted(options.items())).encode()).hexdigest()[:32]
        try:
            return datasets.Dataset.from_generator(make, features, gen_kwargs=options, fingerprint=name)
        except datasets.exceptions.DatasetGenerationError as error:
            raise error.__cause__ if isinstance(error.__cause__, ConfigError) else error from None

    check_data(config)
    train = dataset(data.paths)
    if data.val_paths:
        validation = dataset(data.val_paths)
    else:
        if len(train) < 2:
            raise ConfigError(
                "data.val_fraction: there is one document only; give data.val_paths, or more data"
            )
        parts = train.train_test_split(test_size=max(1, round(len(train) * data.val_fraction)), seed=seed)
        train, validation = parts["train"], parts["test"]
    for name, found in (("train", train), ("validation", validation)):
        if not any(label != IGNORED for row in found for label in row["labels"][1:]):
            raise ConfigError(
                f"the {name} data has no answer: give chats in which the assistant answers, or prompts with "
                "completions"
            )
    return train, validation


def check_data(config: Config) -> None:
    """Raise ConfigError for files that are not there, before anything is read."""
    data = config.data
    if data.dataset is None and not data.paths:
        raise ConfigError("there is nothing to train on: give files or folders with --data, or data.paths")
    for paths in (data.paths, data.val_paths):
        if paths:
            find_files(paths)


class _Examples:
    """The generator of a dataset; the datasets library calls it in place of reading its cached files."""

    def __init__(self, files: Sequence[Path], words: Words, config: Config) -> None:
        self.files, self.words, self.config = files, words, config

    def __call__(self, context: int, answers_only: bool, **identity: Any) -> Iterator[dict[str, list[int]]]:
        for some in _batches(documents(self.files, self.words, self.config)):
            for document, tokens, labels in encode(some, self.words, answers_only=answers_only):
                step = context if document.is_whole else len(tokens)
                for begin in range(0, len(tokens), step):
                    yield {"input_ids": tokens[begin : begin + step], "labels": labels[begin : begin + step]}


def _batches(found: Iterable[Document]) -> Iterator[list[Document]]:
    some: list[Document] = []
    size = 0
    for document in found:
        some.append(document)
        size += len(document.text)
        if size >= TOGETHER:
            yield some
            some, size = [], 0
    if some:
        yield some


def documents(files: Sequence[Path], words: Words, config: Config) -> Iterator[Document]:
    """The documents of files, or of the dataset of ``[data]`` where there are no files."""
    if not files:
        yield from _of_rows(f"{config.data.dataset}", _hub_dataset(config), config, words)
    for path in files:
        suffix = path.suffix.lower()
        if suffix in JSON_LINES:
            for where, item in read_items(path):
                yield from of_item(where, _renamed(item, config.data.columns), words)
        elif suffix in TABLES:
            rows = datasets_library().load_dataset(
                TABLES[suffix], data_files=str(path), split="train", streaming=True
            )
            yield from _of_rows(str(path), rows, config, words)
        else:
            for number, text in enumerate(read_pieces(path, PIECE)):
                yield Document(str(path), text, [(0, len(text))], begins=number == 0)


def _of_rows(where: str, rows: Iterable[Any], config: Config, words: Words) -> Iterator[Document]:
    for number, row in enumerate(rows, start=1):
        item = {name: value for name, value in row.items() if value is not None}
        yield from of_item(f"{where}, row {number}", _renamed(item, config.data.columns), words)


def _renamed(item: Any, columns: Mapping[str, str]) -> Any:
    return {columns.get(key, key): value for key, value in item.items()} if isinstance(item, dict) else item


def _hub_dataset(config: Config) -> Iterable[Any]:
    data = config.data
    try:
        rows: Iterable[Any] = datasets_library().load_dataset(data.dataset, data.name, split=data.split)
    except Exception as error:  # the library may raise anything for a name, a network or a file
        line = " ".join(str(error).split())
        raise ConfigError(f"data.dataset = {data.dataset!r}: {line}") from error
    return rows


def encode(
    some: Sequence[Document], words: Words, *, answers_only: bool = True
) -> Iterator[tuple[Document, list[int], list[int]]]:
    """The tokens and labels of documents. A token that begins in the prompt and ends in the answer has a
    loss; so has the end-of-text token after an answer."""
    mark = words.tokenizer.bos_token
    for begins in (True, False):
        # a text that has the mark of its beginning already gets no other
        part = [one for one in some if (one.begins and not (mark and one.text.startswith(mark))) is begins]
        if not part:
            continue
        encoded = words.tokenizer(
            [one.text for one in part],
            add_special_tokens=begins,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,  # no warning that a text is longer than the model's context
        )
        for one, tokens, offsets in zip(part, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            yield one, *_labelled(one, list(tokens), offsets, words.tokenizer.eos_token_id, answers_only)


def _labelled(
    document: Document, tokens: list[int], offsets: Any, end: int | None, answers_only: bool
) -> tuple[list[int], list[int]]:
    places = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    has_loss = np.full(len(tokens), not answers_only or document.is_whole)
    for begin, stop in document.answers:
        has_loss |= (begin < places[:, 1]) & (places[:, 0] < stop)
    if document.ends and end is not None:
        if len(tokens) > 1 and tokens[-1] == end and not places[-1][1]:  # some tokenizers end each text
            tokens, has_loss = tokens[:-1], has_loss[:-1]
        at_end = bool(document.answers) and document.answers[-1][1] == len(document.text)
        tokens, has_loss = [*tokens, end], np.append(has_loss, at_end or not answers_only)
    return tokens, np.where(has_loss, tokens, IGNORED).tolist()


def _identity(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend else tokenizer.name_or_path
    return f"{vocabulary}{tokenizer.chat_template}{tokenizer.eos_token}"


def load_tokenizer(folder: str) -> Any:
    """The fast tokenizer of a Hugging Face folder. Raises ConfigError where there is none."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(
            f"{folder} needs the transformers library ({error}): pip install 'layer-streamer[hf]'"
        ) from error
    if not Path(folder).exists():
        raise ConfigError(f"{folder}: no such folder: correct model.path (--model)")
    place = Path(folder) if Path(folder).is_dir() else Path(folder).parent
    if not any(
        (place / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")
    ) and not [*place.glob("*.model")]:
        raise ConfigError(
            f"{place}: there is no tokenizer in it (no tokenizer.json): copy the model's tokenizer there"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=True)
    except Exception as error:  # the library raises nearly anything for files that are damaged
        line = " ".join(str(error).split())
        raise ConfigError(
            f"{place}: its tokenizer cannot be loaded ({line}): put a whole tokenizer.json there"
        ) from error
    if not tokenizer.is_fast:
        raise ConfigError(f"{place}: its tokenizer has no offsets of tokens: put a tokenizer.json there")
    return tokenizer


def datasets_library() -> Any:
    """The datasets library. Raises ConfigError where it is not installed."""
    try:
        import datasets
        import datasets.exceptions
    except ImportError as error:
        raise ConfigError(
            f"data for a Hugging Face folder needs the datasets library ({error}): "
            "pip install 'layer-streamer[hf]'"
        ) from error
    return datasets


# the command


def show_data(config: Config, count: int) -> None:
    """Print what the run's data consists of, and its first ``count`` documents with the answers marked.
    Raises ConfigError for data that cannot be used."""
    if config.model.path is None:
        raise ConfigError(
            "streamer data is for a Hugging Face folder (--model): a model of one's own reads bytes"
        )
    tokenizer = load_tokenizer(config.model.path)
    train, validation = load_data(config, tokenizer, seed=config.train.seed)
    context = config.train.max_length
    for name, found in (("train", train), ("validation", validation)):
        lengths = np.array([len(row["input_ids"]) for row in found])
        losses = sum(label != IGNORED for row in found for label in row["labels"])
        median, ninth, longest = np.percentile(lengths, [50, 90, 100], method="higher")
        print(
            f"{name}: {len(found):,} documents of {lengths.sum():,} tokens, {losses:,} with a loss; half "
            f"have up to {median:,} tokens, nine of ten up to {ninth:,}, the longest {longest:,}"
        )
        if cut := int((lengths > context).sum()):
            print(f"{name}: train.max_length = {context} cuts the ends of {cut:,} documents")
    marks = COLOURS if sys.stdout.isatty() else BRACKETS
    if count:
        print(f"\nTokens with a loss are {'coloured' if marks is COLOURS else 'in ' + ' '.join(marks)}.")
    for number, row in enumerate(islice(train, count), 1):
        tokens, has_loss = row["input_ids"], [label != IGNORED for label in row["labels"]]
        kept = f", of which train.max_length keeps {context:,}" if len(tokens) > context else ""
        print(f"\n--- {number}: {len(tokens):,} tokens{kept}, {sum(has_loss):,} with a loss")
        print(marked(tokens[:context], has_loss[:context], tokenizer.decode, marks))


def marked(
    tokens: Sequence[int],
    has_loss: Sequence[bool],
    decode: Callable[[Sequence[int]], str],
    marks: Sequence[str],
) -> str:
    """The text of ``tokens``, with ``marks`` around the parts that have a loss."""
    text, shown, at = "", "", 0
    for is_answer, part in groupby(has_loss):
        at += len([*part])
        longer = decode(tokens[:at])  # a tokenizer may write the first token differently than later ones
        more, text = longer[len(text) :], longer
        shown += f"{marks[0]}{more}{marks[1]}" if is_answer else more
    return shown
