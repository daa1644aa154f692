"""Documents become tokens, once: files that are mapped into memory, and that later runs find again.

A *store* is a folder with, for each split, its tokens (int32), what of them is to be learnt (int32, absent
where that is all) and where documents begin (int64). It is written document by document, so that memory holds
some megabytes of them at a time, and goes on where it was killed; its name follows from what it is made of.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from streamer.app.config import ConfigError
from streamer.app.data.documents import JSON_LINES, Document, Words, read_lines
from streamer.app.data.files import TOKEN_FILES, read_parts
from streamer.app.data.splits import IGNORED, Split
from streamer.app.locks import alone

#: Of the files; another number makes all stores anew.
FORMAT = 2
#: Characters of a text that are made tokens of at a time, and of those before them that are seen again.
PIECE, OVERLAP = 1 << 17, 1 << 9
#: Pieces that are made tokens of side by side: some 20 MB of memory each.
AT_ONCE = min(8, os.cpu_count() or 1)
#: Documents, and characters of them, that are given to the tokenizer at a time.
MOST_DOCUMENTS, MOST_CHARACTERS = 512, 1 << 20
#: Bytes of input after which what is written is noted, so that a killed process loses no more.
NOTED = 1 << 24
#: Smaller input is made tokens of anew in each run, in seconds.
KEPT = 1 << 22

TOKENS, TARGETS, SIZES, DIGESTS = "tokens", "targets", "sizes", "digests"
PROGRESS, ABOUT = "progress.json", "about.json"


@dataclass(frozen=True)
class Encoded:
    """A document's tokens int32 [length], and its targets int32 [length], None where all are learnt."""

    tokens: np.ndarray
    targets: np.ndarray | None


def encode(documents: Sequence[Document], words: Words) -> list[Encoded]:
    """The tokens of ``documents``, each with an end-of-text token."""
    found: list[Encoded | None] = [None] * len(documents)
    mark = words.tokenizer.bos_token
    # what has the mark of its beginning already gets no other
    bare = [document.begins and not (mark and document.text.startswith(mark)) for document in documents]
    for begins in (True, False):
        places = [place for place, is_bare in enumerate(bare) if is_bare is begins]
        if not places:
            continue
        encoded = words.tokenizer(
            [documents[place].text for place in places],
            add_special_tokens=begins,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,  # no warning that a text is longer than the model's context
        )
        for place, ids, offsets in zip(places, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            found[place] = _with_end(documents[place], ids, offsets, words)
    return [one for one in found if one is not None]


def _with_end(document: Document, ids: Sequence[int], offsets: Any, words: Words) -> Encoded:
    tokens = np.array(ids, dtype=np.int32)
    learnt = np.ones(len(tokens), dtype=bool)
    if not document.is_whole:
        at = np.array(offsets, dtype=np.int64).reshape(-1, 2)
        learnt[:] = False
        for begin, end in document.learnt:
            # a token that begins in the prompt and ends in the completion is learnt too
            learnt |= (begin < at[:, 1]) & (at[:, 0] < end)
    end = words.tokenizer.eos_token_id
    if end is not None and document.ends:
        if len(tokens) and tokens[-1] == end:  # some tokenizers put it there
            tokens, learnt = tokens[:-1], learnt[:-1]
        at_end = bool(document.learnt) and document.learnt[-1][1] == len(document.text)
        tokens, learnt = np.append(tokens, np.int32(end)), np.append(learnt, at_end)
    if learnt.all():
        return Encoded(tokens, None)
    return Encoded(tokens, np.where(learnt, tokens, np.int32(IGNORED)).astype(np.int32))


class Tail(NamedTuple):
    """Where a text has been made tokens of: the byte to go on from, the last characters before it, and the
    tokens of these, which may still change, with where in them each begins."""

    place: int
    text: str
    ids: list[int]
    begins: list[int]


class _Window(NamedTuple):
    """A piece of a text, its ``new`` last characters, behind the last characters of the piece before; after
    it the text goes on at the byte ``place``."""

    text: str
    new: int
    place: int
    is_last: bool


def _windows(path: Path, told: Callable[[bytes], None], after: Tail | None) -> Iterator[_Window]:
    """The pieces of a text file, from ``after`` on; ``told`` gets the bytes of each."""
    text, begin = ("", 0) if after is None else (after.text, after.place)
    decoder = codecs.getincrementaldecoder("utf-8" if begin else "utf-8-sig")()
    with path.open("rb") as file:
        file.seek(begin)
        while True:
            place = file.tell() - len(decoder.getstate()[0])
            part = file.read(PIECE)
            try:
                more = decoder.decode(part, final=not part)
            except UnicodeDecodeError as error:
                wrong = place + error.start
                raise ConfigError(f"{path}: not UTF-8 ({error.reason} at byte {wrong}); convert it") from None
            told(part)
            text = text[-OVERLAP:] + more
            yield _Window(text, len(more), file.tell() - len(decoder.getstate()[0]), is_last=not part)
            if not part:
                return


class _Placed(NamedTuple):
    """Tokens, and where in their window each begins."""

    ids: np.ndarray
    begins: np.ndarray

    def where(self, chosen: np.ndarray) -> _Placed:
        return _Placed(self.ids[chosen], self.begins[chosen])


def _encode_windows(windows: Sequence[_Window], words: Words, *, is_first: bool) -> Iterator[_Placed]:
    """The tokens of each window. A fast tokenizer makes them on as many cores as there are windows."""
    encoded = words.tokenizer(
        [window.text for window in windows],
        add_special_tokens=is_first,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    for ids, offsets in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        if is_first and len(ids) > 1 and ids[-1] == words.tokenizer.eos_token_id and not offsets[-1][1]:
            ids, offsets = ids[:-1], offsets[:-1]  # some tokenizers end each text that they are given
        begins = np.array([begin for begin, _ in offsets], dtype=np.int64)
        yield _Placed(np.array(ids, dtype=np.int32), begins)


def encode_text(
    path: Path, words: Words, told: Callable[[bytes], None], after: Tail | None = None
) -> Iterator[tuple[np.ndarray, Tail]]:
    """The tokens of a text file, a piece at a time, as of the whole text at once, with where to go on
    ``after`` each; ``told`` gets the bytes of each piece.

    A piece is made tokens of with some of the text before it, and goes on from where tokens of both begin at
    the same character.
    """
    windows, tail = _windows(path, told, after), after
    # what a tokenizer writes before a text it writes once
    while some := [*itertools.islice(windows, 1 if tail is None else AT_ONCE)]:
        for window, found in zip(some, _encode_windows(some, words, is_first=tail is None), strict=True):
            begun = np.empty(0, dtype=np.int32)
            if tail is not None:
                ids, begins = np.array(tail.ids, dtype=np.int32), np.array(tail.begins, dtype=np.int64)
                middle = (len(window.text) - window.new) // 2
                common = np.intersect1d(begins[begins >= middle], found.begins)
                if not len(common):
                    raise ConfigError(
                        f"{path}: a token of more than {OVERLAP // 2} characters: shorten its lines"
                    )
                begun, found = ids[begins < common[0]], found.where(found.begins >= common[0])
            # those of the last characters may belong to a longer token
            first_seen_again = max(0, len(window.text) - OVERLAP)
            stays = found.begins < (len(window.text) - OVERLAP)
            if window.is_last:
                tail = Tail(window.place, "", [], [])
                yield np.append(begun, _ended(found.ids, words.tokenizer)), tail
                return
            changes = found.where(~stays)
            tail = Tail(
                window.place,
                window.text[-OVERLAP:],
                changes.ids.tolist(),
                (changes.begins - first_seen_again).tolist(),
            )
            yield np.append(begun, found.ids[stays]), tail


def _ended(tokens: np.ndarray, tokenizer: Any) -> np.ndarray:
    end = tokenizer.eos_token_id
    if end is None:
        return tokens
    if len(tokens) and tokens[-1] == end:
        return tokens
    return np.append(tokens, np.int32(end))


def token_file(path: Path) -> np.ndarray:
    """The tokens of a file that holds nothing else, mapped. Raises ConfigError for what is no such file."""
    try:
        if path.suffix == ".npy":
            found: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        elif path.stat().st_size % 2:
            raise ValueError("its bytes are no whole number of uint16")
        else:
            found = np.memmap(path, dtype=np.uint16, mode="r")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: no tokens in it ({error}): give nanoGPT's .bin of uint16, or a .npy"
        ) from None
    if found.ndim != 1 or found.dtype.kind not in "iu" or not len(found):
        raise ConfigError(
            f"{path}: an array of {found.dtype} {list(found.shape)}: give integers of one dimension, tokens"
        )
    return found


class _Raw:
    """The documents of all sources one after another, in files that only grow: tokens, targets, sizes and
    digests. `note` keeps where this stands, and a new one of the same folder goes on from there."""

    def __init__(self, folder: Path, dtype: type[Any], *, has_targets: bool) -> None:
        self.folder, self.dtype = folder, dtype
        #: the source that is read, the byte of it to go on from, documents, and the first for validation only
        self.source = self.place = self.documents = self.tokens = 0
        self.val_from: int | None = None
        #: tokens of the document that is being written, and where its text goes on
        self.partial = 0
        self.tail: list[Any] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError, ValueError, KeyError):
            noted = json.loads((folder / PROGRESS).read_text())
            # after a machine has lost its power, what is noted may be there without the files
            if all((folder / name).stat().st_size >= nbytes for name, nbytes in noted.pop("sizes").items()):
                vars(self).update(noted)
        self._has_targets = has_targets
        self._files: dict[str, BinaryIO] = {}
        for name, nbytes in self._sizes().items():
            self._files[name] = (folder / name).open("r+b" if (folder / name).exists() else "w+b")
            self._files[name].truncate(nbytes)
            self._files[name].seek(nbytes)

    def add(self, tokens: np.ndarray, targets: np.ndarray | None) -> None:
        """Add tokens to the document that is being written."""
        self._files[TOKENS].write(tokens.astype(self.dtype).tobytes())
        if TARGETS in self._files:
            self._files[TARGETS].write((tokens if targets is None else targets).astype(np.int32).tobytes())

    def end(self, size: int, digest: bytes) -> None:
        """The document that was written has ``size`` tokens."""
        self._files[SIZES].write(np.int64(size).tobytes())
        self._files[DIGESTS].write(digest)
        self.documents += 1
        self.tokens += size

    def _sizes(self) -> dict[str, int]:
        """Bytes of the files as far as they are noted."""
        tokens = self.tokens + self.partial
        sizes = {TOKENS: np.dtype(self.dtype).itemsize * tokens, SIZES: 8 * self.documents}
        sizes |= {DIGESTS: 32 * self.documents}
        return sizes | ({TARGETS: 4 * tokens} if self._has_targets else {})

    def note(self, source: int, place: int, *, partial: int = 0, tail: Tail | None = None) -> None:
        """All before ``place`` of this source is written; of its text ``partial`` tokens, and it goes on from
        ``tail``."""
        self.source, self.place, self.partial = source, place, partial
        self.tail = None if tail is None else [*tail]
        for file in self._files.values():
            file.flush()
        names = ("source", "place", "documents", "tokens", "val_from", "partial", "tail")
        known = {name: getattr(self, name) for name in names} | {"sizes": self._sizes()}
        beside = self.folder / f".{PROGRESS}"
        beside.write_text(json.dumps(known))
        beside.replace(self.folder / PROGRESS)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _read_all(
    raw: _Raw, sources: Sequence[Path], first_val: int, words: Words | None, bar: tqdm[Any]
) -> None:
    root = os.path.commonpath([path.absolute().parent for path in sources])
    # where a file of bytes goes follows from its name below the folder that holds them all
    names = [os.fsencode(path.absolute().relative_to(root).as_posix()) for path in sources]
    for number in range(raw.source, len(sources)):
        if number == first_val and raw.val_from is None:  # it may go on in the middle of that source
            raw.val_from = raw.documents
        path, begin = sources[number], raw.place if number == raw.source else 0
        if path.suffix in TOKEN_FILES:
            _copy_tokens(raw, path, bar)
        elif words is not None and path.suffix.lower() in JSON_LINES:
            _read_documents(raw, path, number, begin, words, bar)
        elif words is not None:
            _read_text(raw, path, number, words, bar)
        else:
            _copy_bytes(raw, path, names[number], bar)
        raw.note(number + 1, 0)


def _copy_tokens(raw: _Raw, path: Path, bar: tqdm[Any]) -> None:
    found, digest = token_file(path), hashlib.sha256()
    for begin in range(0, len(found), NOTED):
        part = np.asarray(found[begin : begin + NOTED])
        if part.min() < 0 or int(part.max()) >= 1 << 31:
            raise ConfigError(
                f"{path}: {int(part.min())} or {int(part.max())} is no token: give numbers from 0 on"
            )
        digest.update(part.tobytes())
        raw.add(part, None)
        bar.update(part.nbytes)
    raw.end(len(found), digest.digest())


def _copy_bytes(raw: _Raw, path: Path, name: bytes, bar: tqdm[Any]) -> None:
    size = 0
    for part in read_parts(path, NOTED):
        raw.add(np.frombuffer(part, dtype=np.uint8), None)
        size += len(part)
        bar.update(len(part))
    raw.end(size, hashlib.sha256(name).digest())


def _read_text(raw: _Raw, path: Path, number: int, words: Words, bar: tqdm[Any]) -> None:
    digest, size, after = hashlib.sha256(), 0, None

    def told(part: bytes) -> None:
        digest.update(part)
        bar.update(len(part))

    if raw.tail is not None:
        after, size = Tail(*raw.tail), raw.partial
        for part in read_parts(path, NOTED, after.place):
            told(part)
    noted = 0 if after is None else after.place
    for tokens, tail in encode_text(path, words, told, after):
        raw.add(tokens, None)
        size += len(tokens)
        if tail.place - noted >= NOTED:
            raw.note(number, 0, partial=size, tail=tail)
            noted = tail.place
    raw.partial, raw.tail = 0, None
    raw.end(size, digest.digest())


def _read_documents(raw: _Raw, path: Path, number: int, begin: int, words: Words, bar: tqdm[Any]) -> None:
    waiting: list[Document] = []
    digests: list[bytes] = []
    characters, place, noted = 0, begin, begin

    def write() -> None:
        for encoded, digest in zip(encode(waiting, words), digests, strict=True):
            raw.add(encoded.tokens, encoded.targets)
            raw.end(len(encoded.tokens), digest)
        waiting.clear()
        digests.clear()

    for documents, after in read_lines(path, words, begin):
        waiting += documents
        # the answers of one conversation go into the same split
        of_line = [hashlib.sha256(document.text.encode()).digest() for document in documents[-1:]]
        digests += of_line * len(documents)
        characters += sum(len(document.text) for document in documents)
        bar.update(after - place)
        place = after
        if len(waiting) >= MOST_DOCUMENTS or characters >= MOST_CHARACTERS:
            write()
            characters = 0
            if place - noted >= NOTED:
                raw.note(number, place)
                noted = place
    write()


def _divide(raw: _Raw, val_fraction: float, single: str) -> np.ndarray:
    """Of each document whether it is for validation; for a single one nothing.

    In the order of the hashes of their texts, documents are for validation unless they would bring it above
    ``val_fraction`` of all; where that leaves none, the smallest is. Documents of one text stay together.
    """
    sizes = np.fromfile(raw.folder / SIZES, dtype=np.int64)
    if raw.val_from is not None:
        return np.arange(len(sizes)) >= raw.val_from
    if len(sizes) == 1:
        if sizes[0] < 2:
            raise ConfigError(f"{single} cannot be split into training and validation; give more text")
        return np.zeros(0, dtype=bool)
    content = (raw.folder / DIGESTS).read_bytes()
    digests = [content[begin : begin + 32] for begin in range(0, len(content), 32)]
    total: Counter[bytes] = Counter()
    for digest, size in zip(digests, sizes.tolist(), strict=True):
        total[digest] += size
    room, held = val_fraction * total.total(), set()
    for digest in sorted(total):
        if total[digest] <= room:
            held.add(digest)
            room -= total[digest]
    held = held or {min(sorted(total), key=lambda digest: total[digest])}
    return np.array([digest in held for digest in digests])


def _write_splits(raw: _Raw, val_fraction: float, single: str) -> None:
    """Copy the documents of each split to files of its own, in their order."""
    for_val = _divide(raw, val_fraction, single)
    sizes = np.fromfile(raw.folder / SIZES, dtype=np.int64)
    dtypes = {TOKENS: raw.dtype, TARGETS: np.int32}
    names = [name for name in dtypes if (raw.folder / name).exists()]
    whole = {name: np.memmap(raw.folder / name, dtype=dtypes[name], mode="r") for name in names}
    if TARGETS in whole and not _is_masked(whole[TARGETS]):
        del whole[TARGETS]
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    if not len(for_val):
        cut = int(sizes[0]) - min(int(sizes[0]) - 1, max(1, round(int(sizes[0]) * val_fraction)))
        parts = {"train": [(0, cut)], "val": [(cut, int(sizes[0]))]}
    else:
        parts = {
            split: [(int(bounds[d]), int(bounds[d + 1])) for d in np.flatnonzero(for_val == (split == "val"))]
            for split in ("train", "val")
        }
    for split, ranges in parts.items():
        for name, values in whole.items():
            with (raw.folder / f"{split}.{name}").open("wb") as file:
                for begin, end in _joined(ranges):
                    for at in range(begin, end, NOTED):
                        file.write(values[at : min(end, at + NOTED)].tobytes())
        lengths = np.array([0, *(end - begin for begin, end in ranges)], dtype=np.int64)
        np.cumsum(lengths).tofile(raw.folder / f"{split}.documents")


def _is_masked(targets: np.ndarray) -> bool:
    return any(bool((targets[at : at + NOTED] == IGNORED).any()) for at in range(0, len(targets), NOTED))


def _joined(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Ranges of which those that follow one another are one."""
    begin = end = 0
    for first, last in ranges:
        if first == end and end:
            end = last
            continue
        if end > begin:
            yield begin, end
        begin, end = first, last
    if end > begin:
        yield begin, end


@dataclass(frozen=True)
class Store:
    """What is mapped of a store, by split: tokens, targets where not all is learnt, bounds of documents."""

    tokens: dict[Split, torch.Tensor]
    targets: dict[Split, torch.Tensor]
    documents: dict[Split, torch.Tensor]

    @staticmethod
    def open(folder: Path, dtype: type[Any] = np.int32) -> Store:
        def mapped(name: str, dtype: type[Any]) -> torch.Tensor:
            path = folder / name
            if not path.stat().st_size:
                return torch.from_numpy(np.empty(0, dtype=dtype))
            # "c": nothing that is written goes to the file, and PyTorch takes no array that cannot be written
            return torch.from_numpy(np.memmap(path, dtype=dtype, mode="c"))

        splits: tuple[Split, Split] = ("train", "val")
        return Store(
            {split: mapped(f"{split}.{TOKENS}", dtype) for split in splits},
            {
                split: mapped(f"{split}.{TARGETS}", np.int32)
                for split in splits
                if (folder / f"{split}.{TARGETS}").exists()
            },
            {split: mapped(f"{split}.documents", np.int64) for split in splits},
        )


def cache_folder(given: str | None) -> Path:
    """Where stores are kept: ``given``, or a folder of the user's."""
    if given is not None:
        return Path(given)
    users = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(users) if os.path.isabs(users) else Path.home() / ".cache") / "streamer" / "data"


def make_store(
    sources: Sequence[Path],
    val_sources: Sequence[Path],
    words: Words | None,
    *,
    val_fraction: float,
    cache: str | None,
    single: str,
) -> Store:
    """The store of the documents in ``sources``: found, or made. Those of ``val_sources``, where there are
    any, are for validation; else some of the others are. Without ``words`` a token is a byte.

    Raises ConfigError, in one line, for what is in no known form, and where the store cannot be written.
    """
    every = [*sources, *val_sources]
    nbytes = sum(path.stat().st_size for path in every)
    first_val = len(sources) if val_sources else len(every)

    is_bytes = words is None and not any(path.suffix in TOKEN_FILES for path in every)

    def make(folder: Path) -> Store:
        has_targets = words is not None and any(path.suffix.lower() in JSON_LINES for path in every)
        dtype = np.uint8 if is_bytes else np.int32
        raw = _Raw(folder, dtype, has_targets=has_targets)
        try:
            done = sum(path.stat().st_size for path in every[: raw.source]) + raw.place
            with tqdm(
                total=nbytes, initial=done, unit="B", unit_scale=True, desc="making tokens",
                disable=nbytes < KEPT, mininterval=0.5,
            ) as bar:  # fmt: skip
                _read_all(raw, every, first_val, words, bar)
        finally:
            raw.close()
        if not raw.documents:
            raise ConfigError(
                f"{', '.join(map(str, sources))}: no documents there; give a file that has some"
            )
        _write_splits(raw, val_fraction, single)
        return Store.open(folder, dtype)

    if nbytes < KEPT or is_bytes:
        # bytes are copied in no time; the files are gone at once, and stay mapped
        with tempfile.TemporaryDirectory(dir=None if nbytes < KEPT else _there(cache)) as folder:
            return make(Path(folder))
    kept = cache_folder(cache) / _name(every, first_val, words, val_fraction)
    partial = kept.with_name(f"{kept.name}.partial")
    try:
        if (kept / ABOUT).exists():
            print(f"tokens of earlier: {kept}")
            return Store.open(kept)
        partial.parent.mkdir(parents=True, exist_ok=True)
        with alone(
            kept.with_name(f".{kept.name}.lock"), f"another process makes tokens for {kept}: waiting for it"
        ):
            if (kept / ABOUT).exists():
                print(f"tokens of another process: {kept}")
                return Store.open(kept)
            make(partial)
            for name in (TOKENS, TARGETS, SIZES, DIGESTS, PROGRESS):
                (partial / name).unlink(missing_ok=True)
            (partial / ABOUT).write_text(json.dumps({"sources": list(map(str, every))}, indent=2) + "\n")
            shutil.rmtree(kept, ignore_errors=True)
            partial.rename(kept)
    except OSError as error:
        raise ConfigError(
            f"the tokens cannot be written to {partial} ({error.strerror or error}): make room there, or set "
            "data.cache to another folder"
        ) from error
    print(f"tokens are kept in {kept}")
    return Store.open(kept)


def _there(cache: str | None) -> Path:
    folder = cache_folder(cache)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}: set data.cache to another folder") from error
    return folder


def _name(sources: Sequence[Path], first_val: int, words: Words | None, val_fraction: float) -> str:
    """A name that follows from all that the store depends on."""
    digest = hashlib.sha256()

    def add(*values: object) -> None:
        digest.update(repr(values).encode())

    add(FORMAT, first_val, val_fraction)
    for path in sources:
        known = path.stat()
        add(str(path.resolve()), known.st_size, known.st_mtime_ns)
    if words is not None:
        tokenizer = words.tokenizer
        add(
            tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template, tokenizer.eos_token_id, words.marks
        )
    return digest.hexdigest()[:24]
