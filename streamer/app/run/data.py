"""Training data: files become tokens, tokens are split in two, and batches are crops of a split.

Without a tokenizer a token is a byte (`load_bytes`). With one, text and JSON lines become its tokens
(`load_tokens`). `TokenData` has the splits and makes the batches.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch

from streamer.app.config import ConfigError
from streamer.pretrained.architecture import transformers_library

HEAD_BYTES = 8 * 1024

#: Folders in the standard library's tree that are not read: what was installed into it, the tests (more
#: than half of its bytes), and what is generated (tables, help texts, bytecode): what is left is code.
NOT_LIBRARY = (
    "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__",
)  # fmt: skip


def find_files(paths: Sequence[str | os.PathLike[str]] = ()) -> list[Path]:
    """The text files at ``paths``, sorted, each once; with no paths, the Python standard library's sources.

    A directory is searched to its depths, without following links to directories; hidden, empty and binary
    files in it (a NUL byte in the first 8 KiB) are passed over. Raises ConfigError, in one line that names
    the path and the remedy, for one that is missing or unreadable, for a file given that is empty or binary,
    and for a directory without text files.
    """
    if not paths:
        library = Path(sysconfig.get_path("stdlib"))
        sources = sorted(path for path in _texts_in(library, NOT_LIBRARY) if path.suffix == ".py")
        if not sources:
            raise ConfigError(f"{library}: this Python came without the library's sources; set data.paths")
        return sources
    found: dict[Path, Path] = {}  # by the file a link leads to: text in both splits would flatter the loss
    for path in map(Path, paths):
        if os.path.isdir(path):  # unlike Path.is_dir, false where it may not look
            files = _texts_in(path)
            if not files:
                raise ConfigError(f"{path}: no text files in this folder; give text files or folders of them")
        elif os.path.isfile(path):
            files = [path]
            if not _is_text(path):
                raise ConfigError(f"{path}: empty, or binary (it has a NUL byte); give a text file")
        elif os.path.lexists(path):
            raise ConfigError(f"{path}: neither a file nor a folder; give text files or folders of them")
        else:
            raise ConfigError(f"{path}: no such file or folder in {os.getcwd()}; correct data.paths")
        found.update((file.resolve(), file) for file in files)
    return sorted(found.values())


def _texts_in(folder: Path, skip: Collection[str] = ()) -> list[Path]:
    """The text files below ``folder``, without hidden ones and the folders named in ``skip``."""
    paths: list[Path] = []
    for root, folders, names in os.walk(folder, onerror=_unreadable):
        folders[:] = [name for name in folders if name[0] != "." and name not in skip]
        paths += [Path(root, name) for name in names if name[0] != "."]
    return [path for path in paths if os.path.isfile(path) and _is_text(path)]


def _is_text(path: Path) -> bool:
    head = read_bytes(path, HEAD_BYTES)
    return bool(head) and b"\0" not in head


def read_bytes(path: Path, size: int = -1) -> bytes:
    """The first ``size`` bytes of a file, or all. Raises ConfigError where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError as error:
        error.filename = path  # a read that fails, unlike an open, does not say where
        _unreadable(error)


def _unreadable(error: OSError) -> NoReturn:
    raise ConfigError(f"{error.filename}: {error.strerror}; make it readable or leave it out") from None


VOCAB_SIZE = 256
#: The target of a token that is not to be learnt: the default of torch.nn.functional.cross_entropy.
IGNORED = -100

Batch = tuple[torch.Tensor, torch.Tensor]
Split = Literal["train", "val"]


def _decode_bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode("utf-8", errors="replace")


@dataclass(frozen=True, eq=False)
class TokenData:
    """Two splits of a text, ``train`` and ``val``: tensors of tokens [length] on the CPU, neither empty.

    ``targets`` has, by split, its tokens with `IGNORED` in place of those that are not to be learnt; without
    ``targets`` all tokens are learnt. ``unit`` is the word for a token, ``vocab_size`` the number of
    different tokens, and ``decode`` makes text of tokens. ``tokenizer``, if there is one, is of the
    transformers library.
    """

    train: torch.Tensor
    val: torch.Tensor
    targets: Mapping[Split, torch.Tensor] = field(default_factory=dict)
    unit: str = "byte"
    vocab_size: int = VOCAB_SIZE
    decode: Callable[[Sequence[int]], str] = _decode_bytes
    tokenizer: Any = None
    _start_cache: dict[tuple[Split, int], torch.Tensor] = field(default_factory=dict, init=False, repr=False)

    def batch(self, split: Split, batch_size: int, context: int, generator: torch.Generator) -> Batch:
        """Crops of a split at random places: tokens and, one on, targets, int64 [batch_size, context].

        Raises ConfigError where the split has fewer than context + 1 tokens.
        """
        count, starts = self._starts(split, context)
        chosen = torch.randint(count, (batch_size,), generator=generator)
        return self._crops(split, chosen if starts is None else starts[chosen], context)

    def val_batches(self, count: int, batch_size: int, context: int) -> list[Batch]:
        """``count`` batches as from ``batch``, of crops spaced evenly from the first token of the validation
        split to its last: the same at every call, so that losses on them can be compared.

        Raises ConfigError where the split has fewer than context + 1 tokens.
        """
        places, starts = self._starts("val", context)
        crops = count * batch_size
        chosen = torch.arange(crops) * (places - 1) // max(1, crops - 1)
        chosen = chosen if starts is None else starts[chosen]
        return [self._crops("val", some, context) for some in chosen.split(batch_size)]

    def unigram_entropy(self) -> float:
        """Nats per target of the validation split under the frequencies of the training split's, each token
        counted once more than it occurs: the loss of a model that knows those frequencies alone."""
        train, val = (
            torch.bincount(self._learnt(split), minlength=self.vocab_size).double()
            for split in ("train", "val")
        )
        log_frequency = ((train + 1) / (train + 1).sum()).log()
        return -(val / val.sum() * log_frequency).sum().item()

    def tokens(self, split: Split) -> torch.Tensor:
        return self.train if split == "train" else self.val

    def count_learnt(self, split: Split) -> int:
        """How many tokens of a split are to be learnt."""
        return len(self._learnt(split))

    def _targets(self, split: Split) -> torch.Tensor:
        return self.targets.get(split, self.tokens(split))

    def _learnt(self, split: Split) -> torch.Tensor:
        targets = self._targets(split)
        # bytes are unsigned, so that none must be compared with IGNORED
        return targets[targets != IGNORED] if split in self.targets else targets

    def _starts(self, split: Split, context: int) -> tuple[int, torch.Tensor | None]:
        """The number of places where a crop of a split can start, and the places, or None for all from 0.

        A crop starts only where it has something to learn.
        """
        size = len(self.tokens(split))
        if size <= context:
            other = "larger" if split == "val" else "smaller"
            raise ConfigError(
                f"the {split} split has {size} {self.unit}s and data.context = {context} needs {context + 1}"
                f": give more text, a {other} data.val_fraction or a smaller context"
            )
        if split not in self.targets:
            return size - context, None
        if (split, context) not in self._start_cache:
            learnt = (self.targets[split] != IGNORED).cumsum(0)
            self._start_cache[split, context] = (learnt[context:] > learnt[:-context]).nonzero().flatten()
        found = self._start_cache[split, context]
        if not len(found):
            raise ConfigError(f"the {split} split has nothing to learn: give more documents")
        return len(found), found

    def _crops(self, split: Split, starts: torch.Tensor, context: int) -> Batch:
        places = starts[:, None] + torch.arange(context)
        return self.tokens(split)[places].long(), self._targets(split)[places + 1].long()


#: A text's name, and one or two tensors [length]: its tokens and, of documents, their targets.
_Text = tuple[bytes, tuple[torch.Tensor, ...]]


def load_bytes(paths: Sequence[str | os.PathLike[str]] = (), *, val_fraction: float = 0.05) -> TokenData:
    """The text at ``paths`` (see ``find_files``) as bytes, split into training and validation by file.

    Where a file goes follows from a hash of its path below the folder that holds them all, so it is the same
    on every machine: see `_split`.

    Raises ConfigError, in one line, as ``find_files`` does, and for a single file of a single byte.
    """
    files = find_files(paths)
    root = os.path.commonpath([path.absolute().parent for path in files])
    texts: list[_Text] = []
    for path in files:
        name = os.fsencode(path.absolute().relative_to(root).as_posix())
        texts.append((name, (torch.frombuffer(bytearray(read_bytes(path)), dtype=torch.uint8),)))
    (train,), (val,) = _split(texts, val_fraction, f"{files[0]}: one byte")
    return TokenData(train, val)


def _split(
    texts: Sequence[_Text], val_fraction: float, single: str
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """The tensors for training and those for validation, each in the order of ``texts``.

    In the order of the hashes of their names, texts are for validation unless they would bring it above
    ``val_fraction`` of all; where that leaves none, the smallest is. Texts of one name stay together. Of a
    single text the tail is for validation.

    Raises ConfigError, which begins with ``single``, for a single text of one token.
    """
    if len(texts) == 1:
        [(_, columns)] = texts
        size = len(columns[0])
        if size < 2:
            raise ConfigError(f"{single} cannot be split into training and validation; give more text")
        cut = size - min(size - 1, max(1, round(size * val_fraction)))
        return [column[:cut] for column in columns], [column[cut:] for column in columns]
    sizes: Counter[bytes] = Counter()
    for name, columns in texts:
        sizes[name] += len(columns[0])
    # hash() differs from run to run
    by_hash = sorted(sizes, key=lambda name: hashlib.sha256(name).digest())
    room = val_fraction * sizes.total()
    held = set()
    for name in by_hash:
        if sizes[name] <= room:
            held.add(name)
            room -= sizes[name]
    held = held or {min(by_hash, key=lambda name: sizes[name])}

    def joined(*, of_val: bool) -> list[torch.Tensor]:
        chosen = [columns for name, columns in texts if (name in held) is of_val]
        return [torch.cat(parts) for parts in zip(*chosen, strict=True)]

    return joined(of_val=False), joined(of_val=True)


JSON_LINES = (".jsonl", ".ndjson", ".json")
FORMS = '{"text": ...}, {"prompt": ..., "completion": ...} or {"messages": [{"role": ..., "content": ...}]}'

#: Parts of a text [begin, end), in characters.
Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class Document:
    """A text of which the parts ``learnt`` are to be learnt. ``begins`` says whether the tokenizer adds its
    special token for the beginning; the template of a chat has written it already."""

    where: str
    text: str
    learnt: Spans
    begins: bool = True


def load_tokenizer(folder: str) -> Any:
    """The tokenizer in a Hugging Face folder, or beside a file. Raises ConfigError if none is fast."""
    if not os.path.exists(folder):
        raise ConfigError(f"{folder}: no such folder, and nothing is downloaded: give a local one")
    if not os.path.isdir(folder):
        folder = os.path.dirname(folder) or "."
    try:
        tokenizer = transformers_library().AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{folder}: its tokenizer cannot be loaded ({error}); set data.tokenizer"
        ) from error
    if not tokenizer.is_fast:
        raise ConfigError(f"{folder}: its tokenizer has no offsets of tokens; give a tokenizer.json")
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
        raise ConfigError(f"{', '.join(map(str, paths))}: no documents there; give a file that has some")
    # by their texts: a document that is there twice would flatter the loss if it were in both splits
    texts = [(document.text.encode(), _encode(document, tokenizer)) for document in documents]
    train, val = _split(texts, val_fraction, f"{documents[0].where}: one token")
    if not train:
        raise ConfigError(f"{documents[0].where}: all documents are the same; give more")
    for name, (_, targets) in (("train", train), ("val", val)):
        if bool((targets == IGNORED).all()):
            raise ConfigError(f"the {name} split has nothing to learn: give more documents")
    return TokenData(
        train=train[0],
        val=val[0],
        targets={"train": train[1], "val": val[1]},
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
    """A chat, written by the tokenizer's template. What the assistant says is learnt."""
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
        verbose=False,  # no warning that the text is longer than the model's context
    )
    tokens, places = list(encoded["input_ids"]), encoded["offset_mapping"]
    whole = document.learnt == [(0, len(document.text))]

    def is_learnt(place: tuple[int, int]) -> bool:
        # a token that begins in the prompt and ends in the completion is learnt too
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
