"""The data of a run: what its config names, in bytes or in the tokens of a tokenizer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any

from streamer.app.config import Config, ConfigError
from streamer.app.data.documents import Words
from streamer.app.data.files import TOKEN_FILES, find_files
from streamer.app.data.splits import IGNORED, TokenData
from streamer.app.data.tokens import make_store
from streamer.checkpoint.tensors import in_a_line
from streamer.pretrained.architecture import transformers_library

Paths = Sequence[str | os.PathLike[str]]

#: Names of files that a tokenizer's vocabulary may be in.
VOCABULARIES = (
    "tokenizer.json", "vocab*", "*.vocab", "*.model", "*.tiktoken", "tekken.json", "*.spm", "*.bpe",
)  # fmt: skip


def load_tokenizer(folder: str) -> Any:
    """The tokenizer in a Hugging Face folder, or in that of a file. Raises ConfigError if its files or the
    libraries that read them are missing, and if it is not fast."""
    if not os.path.exists(folder):
        raise ConfigError(f"{folder}: no such folder, and nothing is downloaded: give a local one")
    if not os.path.isdir(folder):
        folder = os.path.dirname(folder) or "."
    library = _library()
    _check_vocabulary(Path(folder))
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the library raises nearly anything for files that are damaged
        raise ConfigError(
            f"{folder}: its tokenizer cannot be loaded ({in_a_line(error)}): put a whole tokenizer.json "
            "there, or set data.tokenizer to a folder with one"
        ) from error
    if not tokenizer.is_fast:
        raise ConfigError(f"{folder}: its tokenizer has no offsets of tokens; give a tokenizer.json")
    return tokenizer


def _library() -> Any:
    """The transformers library, with the one that its tokenizers need. Raises ConfigError without either."""
    try:
        library = transformers_library()
        import_module("tokenizers")
    except ImportError as error:
        raise ConfigError(
            f"tokenizers of Hugging Face need the tokenizers library: pip install tokenizers ({error})"
        ) from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return library


def _check_vocabulary(folder: Path) -> None:
    """Raise ConfigError where the files of a tokenizer are missing. The transformers library makes an empty
    tokenizer there, for which every text is one unknown token."""
    names = [path.name for path in folder.iterdir()]
    if "tokenizer.json" in names:
        return
    if not any(fnmatch(name, pattern) for name in names for pattern in VOCABULARIES):
        raise ConfigError(
            f"{folder}: there is no tokenizer in it (no tokenizer.json): copy the files of the model's "
            "tokenizer there, or set data.tokenizer to the folder that has them"
        )
    if "vocab.json" in names and "merges.txt" not in names:
        raise ConfigError(
            f"{folder}: its tokenizer has a vocab.json without merges.txt: copy that there too, or a "
            "tokenizer.json"
        )


def load_bytes(
    paths: Paths = (), *, val_paths: Paths = (), val_fraction: float = 0.05, cache: str | None = None
) -> TokenData:
    """The text at ``paths`` (see `find_files`) as bytes, split into training and validation by file, or with
    that at ``val_paths`` for validation. Files of tokens (`TOKEN_FILES`) stay what they are.

    Where a file goes follows from a hash of its path below the folder that holds them all, so it is the same
    on every machine.

    Raises ConfigError, in one line, as `find_files` does, and for a single file of a single byte.
    """
    files, val_files = _find(paths, val_paths)
    are_tokens = [path.suffix in TOKEN_FILES for path in (*files, *val_files)]
    if any(are_tokens) and not all(are_tokens):
        raise ConfigError(f"{files[0]}: files of text and of tokens together: set data.tokenizer")
    store = make_store(
        files, val_files, None, val_fraction=val_fraction, cache=cache, single=f"{files[0]}: one byte"
    )
    data = TokenData(store.tokens["train"], store.tokens["val"], documents=store.documents)
    about = _sources(files, val_files, paths)
    if not any(are_tokens):
        return replace(data, sources=about)
    highest = max(int(tokens.max()) for tokens in store.tokens.values())
    return replace(data, sources=about, unit="token", vocab_size=highest + 1, decode=_numbers)


def _find(paths: Paths, val_paths: Paths) -> tuple[list[Path], list[Path]]:
    """The files to train on and those to validate on; what is named for validation is not trained on."""
    val_files = find_files(val_paths) if val_paths else []
    apart = {path.resolve() for path in val_files}
    files = [path for path in find_files(paths) if path.resolve() not in apart]
    if not files:
        raise ConfigError("all data is named in data.val_paths: leave some to train on")
    return files, val_files


def _numbers(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def load_tokens(
    paths: Paths, tokenizer: Any, *, val_fraction: float, val_paths: Paths = (), cache: str | None = None
) -> TokenData:
    """The documents at ``paths`` (see `find_files`), one after another, each with an end-of-text token.

    A file is one document; each line of a file in JSON lines is one, in one of the forms of
    `streamer.app.data.documents`: of a prompt with a completion only the completion is learnt, of a chat what
    the assistant says. Which documents are for validation follows from a hash of their texts; of a single
    document the tail is. With ``val_paths`` those there are.

    Raises ConfigError, in one line that names file and line, for what is not in one of these forms, and where
    a split has nothing to learn.
    """
    files, val_files = _find(paths, val_paths)
    words = Words.of(tokenizer)
    single = f"{files[0]}: one token"
    store = make_store(files, val_files, words, val_fraction=val_fraction, cache=cache, single=single)
    if not sum(len(bounds) - 1 for bounds in store.documents.values()):
        raise ConfigError(f"{files[0]}: no documents there; give a file that has some")
    if not len(store.tokens["train"]):
        raise ConfigError(f"{files[0]}: all documents are the same; give more")
    for split, targets in store.targets.items():
        if not any(bool((part != IGNORED).any()) for part in targets.split(1 << 22)):
            raise ConfigError(
                f"the {split} split has nothing to learn: give chats in which the assistant answers, or "
                "prompts with completions"
            )
    return TokenData(
        train=store.tokens["train"],
        val=store.tokens["val"],
        targets=store.targets,
        unit="token",
        vocab_size=len(tokenizer),
        decode=tokenizer.decode,
        tokenizer=tokenizer,
        sources=_sources(files, val_files, paths),
        documents=store.documents,
    )


def _sources(files: Sequence[Path], val_files: Sequence[Path], asked: Paths) -> str:
    """What the data is made of, on one line: places, files and bytes."""
    places = [str(place) for place in asked] or ["the Python standard library's source (data.paths is empty)"]
    shown = ", ".join(places[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")
    return f"{shown}: {_amount(files)}" + (f"; for validation {_amount(val_files)}" if val_files else "")


def _amount(files: Sequence[Path]) -> str:
    nbytes = sum(path.stat().st_size for path in files)
    size = f"{nbytes / 1e6:,.1f} MB" if nbytes >= 1e5 else f"{nbytes:,} bytes"
    return f"{len(files):,} file{'s' if len(files) > 1 else ''}, {size}"


def check_data(config: Config) -> None:
    """Raise ConfigError for data that is not there, before anything is read or made.

    A pretrained model learns nothing by accident: its data is named.
    """
    if config.model.pretrained is not None and not config.data.paths:
        raise ConfigError(
            "there is nothing to train on: give files or folders with --data, or data.paths in the config"
        )
    find_files(config.data.paths)
    if config.data.val_paths:
        find_files(config.data.val_paths)


def load_data(config: Config) -> TokenData:
    """The config's data, in bytes or in the tokens of a tokenizer. Raises ConfigError for what is wrong."""
    check_data(config)
    given = config.data
    options: dict[str, Any] = {
        "val_fraction": given.val_fraction, "val_paths": given.val_paths, "cache": given.cache,
    }  # fmt: skip
    tokenizer = given.tokenizer or config.model.pretrained
    if tokenizer is None:
        return load_bytes(given.paths, **options)
    # before the text is read, so that a wrong folder is refused at once
    return load_tokens(given.paths, load_tokenizer(tokenizer), **options)
