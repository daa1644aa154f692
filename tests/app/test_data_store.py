"""Data is made tokens of once, in little memory: the same tokens as of the whole at once."""

from __future__ import annotations

import json
import multiprocessing
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from streamer.app import locks
from streamer.app.data import tokens as store
from streamer.app.data.documents import Words
from streamer.app.data.load import load_bytes, load_tokens
from tests import tiny_llama
from tests.app.common import error_of

TOKENIZER = tiny_llama.tokenizer()
#: Long words and long runs of the same characters, of one to four bytes each, in lines of all lengths.
TEXT = "".join(
    f"{'wört' * (number % 7)} {'🙂' * (number % 3)}{number}, two follows one\n"
    + "\n" * (number % 4)
    + " " * (number % 40)
    for number in range(700)
)


def metaspace() -> Any:
    """As Llama 2's: a text begins with a mark for a space, and words are not cut before pairs are merged."""
    pairs = Tokenizer(models.BPE(unk_token="<unk>"))
    pairs.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    pairs.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    pairs.train_from_iterator([TEXT], trainer)
    pairs.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=pairs, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.mark.parametrize("words", [TOKENIZER, metaspace()], ids=["bytes", "metaspace"])
@pytest.mark.parametrize("piece", [1 << 10, 1 << 13, 1 << 20])
def test_a_text_in_pieces_has_the_tokens_of_the_whole(
    words: Any, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "PIECE", piece)
    path = tmp_path / "a.txt"
    path.write_text(TEXT, encoding="utf-8-sig")
    found = np.concatenate(
        [tokens for tokens, _ in store.encode_text(path, Words.of(words), lambda part: None)]
    )
    whole = words(TEXT)["input_ids"]
    end = words.eos_token_id
    assert found.tolist() == whole + [end] * (whole[-1] != end)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    pairs = [{"prompt": f"what follows {n}? ", "completion": f"{n + 1}"} for n in range(2000)]
    lines = [pair if n % 3 else {"text": f"{n}"} for n, pair in enumerate(pairs)]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def loaded(path: Path, cache: Path) -> list[list[int]]:
    data = load_tokens([path], TOKENIZER, val_fraction=0.1, cache=str(cache))
    found = [data.train, data.val, *data.targets.values(), *data.documents.values()]
    return [tensor.tolist() for tensor in found]


def test_tokens_are_kept_and_found_again(
    chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = loaded(chats, tmp_path / "unused")
    assert not (tmp_path / "unused").exists(), "of little data nothing is kept"
    monkeypatch.setattr(store, "KEPT", 1)
    cache = tmp_path / "cache"
    assert loaded(chats, cache) == expected
    assert f"tokens are kept in {cache}" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(store, "encode", lambda *_: pytest.fail("made again"))
        assert loaded(chats, cache) == expected
        assert "tokens of earlier: " in capsys.readouterr().out
    # what the tokens follow from has changed: other text, another template
    chats.write_text(chats.read_text() + '{"text": "more"}\n')
    assert loaded(chats, cache) != expected
    with monkeypatch.context() as patch:
        patch.setattr(TOKENIZER, "chat_template", tiny_llama.CHAT + " ")
        loaded(chats, cache)
    assert len([*cache.glob("[!.]*")]) == 3
    assert not [*cache.glob("*.partial")]


@pytest.mark.parametrize(("is_array", "after"), [(False, 1), (False, 3), (True, 3)])
def test_what_was_killed_goes_on_where_it_was(
    chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_array: bool, after: int
) -> None:
    if is_array:
        chats.write_text(f"[{','.join(chats.read_text().splitlines())}]")
    expected = loaded(chats, tmp_path)
    for name, value in (("KEPT", 1), ("NOTED", 1 << 8), ("MOST_DOCUMENTS", 100)):
        monkeypatch.setattr(store, name, value)
    cache, encode, calls = tmp_path / "cache", store.encode, []

    def sometimes(documents: Any, words: Any) -> Any:
        calls.append(len(documents))
        if len(calls) == after + 1:
            raise KeyboardInterrupt
        return encode(documents, words)

    monkeypatch.setattr(store, "encode", sometimes)
    with pytest.raises(KeyboardInterrupt):
        loaded(chats, cache)
    assert [path.suffix for path in cache.glob("[!.]*")] == [".partial"], "nothing looks done"
    before = len(calls)
    assert loaded(chats, cache) == expected
    # no document that was noted is made again; of an array none is noted before its last
    assert sum(calls[before:]) == (2000 if is_array else 2000 - 100 * after)


@pytest.mark.parametrize("words", [TOKENIZER, metaspace()], ids=["bytes", "metaspace"])
@pytest.mark.parametrize("calls", [3, 13, 30, 55])
def test_a_text_that_was_killed_goes_on_in_its_middle(
    words: Any, calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("KEPT", 1), ("NOTED", 3 << 10), ("PIECE", 1 << 10), ("AT_ONCE", 2)):
        monkeypatch.setattr(store, name, value)
    paths = [tmp_path / name for name in ("a.txt", "b.txt", "c.txt")]
    for path in paths:
        path.write_text(TEXT + path.name, encoding="utf-8-sig")

    def tokens(cache: str) -> list[list[int]]:
        data = load_tokens(paths, words, val_fraction=0.3, cache=str(tmp_path / cache))
        return [data.train.tolist(), data.val.tolist(), *(each.tolist() for each in data.documents.values())]

    expected = tokens("undisturbed")
    encode, made = store._encode_windows, []

    def sometimes(windows: Any, *given: Any, **options: Any) -> Any:
        made.append(len(windows))
        if len(made) == calls:
            raise KeyboardInterrupt
        return encode(windows, *given, **options)

    monkeypatch.setattr(store, "_encode_windows", sometimes)
    with pytest.raises(KeyboardInterrupt):
        tokens("cache")
    before = sum(made[:-1])
    made.clear()
    made += [0] * calls
    assert tokens("cache") == expected
    [whole] = {sum(-(-path.stat().st_size // 1024) + 1 for path in paths)}
    assert before + sum(made) <= whole + 8, "what was noted is not made again"


def test_what_was_noted_and_lost_is_made_again(
    chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a loss of power: files may be shorter than what is known of them."""
    expected = loaded(chats, tmp_path)
    for name, value in (("KEPT", 1), ("NOTED", 1 << 8), ("MOST_DOCUMENTS", 100)):
        monkeypatch.setattr(store, name, value)
    cache, encode, calls = tmp_path / "cache", store.encode, []

    def sometimes(documents: Any, words: Any) -> Any:
        calls.append(len(documents))
        if len(calls) == 5:
            raise KeyboardInterrupt
        return encode(documents, words)

    monkeypatch.setattr(store, "encode", sometimes)
    with pytest.raises(KeyboardInterrupt):
        loaded(chats, cache)
    [partial] = cache.glob("[!.]*")
    for name in ("tokens", "targets"):
        with (partial / name).open("r+b") as file:
            file.truncate(100)
    assert loaded(chats, cache) == expected


def test_a_cache_that_cannot_be_written_is_named(
    chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "KEPT", 1)
    (tmp_path / "file").write_text("")
    error = error_of(loaded, chats, tmp_path / "file")
    assert "the tokens cannot be written to " in error and error.endswith(
        "or set data.cache to another folder"
    )


# Tokens that are there already


def test_files_of_tokens_are_what_they_are(tmp_path: Path) -> None:
    values = np.arange(1000) * 60 % 50257
    values.astype(np.uint16).tofile(tmp_path / "train.bin")
    np.save(tmp_path / "val.npy", values[::-1].astype(np.int64))
    data = load_bytes([tmp_path / "train.bin"], val_paths=[tmp_path / "val.npy"])
    assert data.train.tolist() == values.tolist() and data.val.tolist() == values[::-1].tolist()
    assert (data.unit, data.vocab_size) == ("token", int(values.max()) + 1)
    # of one alone the tail is for validation
    alone = load_bytes([tmp_path / "train.bin"], val_fraction=0.1)
    assert torch.cat([alone.train, alone.val]).tolist() == values.tolist() and len(alone.val) == 100


def test_tokens_beyond_the_tokenizer_are_named(tmp_path: Path) -> None:
    np.array([1, 2, 5000] * 20, dtype=np.uint16).tofile(tmp_path / "a.bin")
    data = load_tokens([tmp_path / "a.bin"], TOKENIZER, val_fraction=0.1)
    assert f"the data has token 5000, and the tokenizer knows {len(TOKENIZER)}" in error_of(
        data.unigram_entropy
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.bin", b"123", "its bytes are no whole number of uint16"),
        ("a.npy", b"nothing", "no tokens in it"),
        (
            "b.npy",
            np.zeros((2, 2), dtype=np.int64),
            "an array of int64 [2, 2]: give integers of one dimension",
        ),
        ("c.npy", np.zeros(4), "an array of float64 [4]"),
        ("d.npy", np.array([1, -1]), "-1 or 1 is no token"),
    ],
)
def test_what_are_no_tokens_is_named(tmp_path: Path, name: str, content: Any, message: str) -> None:
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        np.save(tmp_path / name, content)
    assert message in error_of(load_bytes, [tmp_path / name])


def test_validation_data_that_was_killed_stays_validation_data(
    chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("KEPT", 1), ("NOTED", 1 << 8), ("MOST_DOCUMENTS", 100)):
        monkeypatch.setattr(store, name, value)
    own = tmp_path / "own.jsonl"
    own.write_text("".join(json.dumps({"text": f"only {n}"}) + "\n" for n in range(30)))

    def made(cache: str) -> tuple[int, int]:
        data = load_tokens([own], TOKENIZER, val_fraction=0.1, val_paths=[chats], cache=str(tmp_path / cache))
        return len(data.documents["train"]) - 1, len(data.documents["val"]) - 1

    assert made("undisturbed") == (30, 2000)
    encode, calls = store.encode, []

    def sometimes(documents: Any, words: Any) -> Any:
        calls.append(len(documents))
        if len(calls) == 8:
            raise KeyboardInterrupt
        return encode(documents, words)

    monkeypatch.setattr(store, "encode", sometimes)
    with pytest.raises(KeyboardInterrupt):
        made("cache")
    assert made("cache") == (30, 2000)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")  # of Python 3.12
def test_two_processes_make_the_same_tokens_one_after_the_other(
    chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = loaded(chats, tmp_path / "alone")
    for name, value in (("KEPT", 1), ("NOTED", 1 << 8), ("MOST_DOCUMENTS", 100)):
        monkeypatch.setattr(store, name, value)
    context = multiprocessing.get_context("fork")
    begun, is_met = context.Event(), context.Event()

    def other_process() -> None:
        encode = store.encode

        def once_met(documents: Any, words: Any) -> Any:
            begun.set()
            assert is_met.wait(60)
            return encode(documents, words)

        store.encode = once_met
        tqdm.set_lock(threading.RLock())  # that of all processes may be held just when this one begins
        assert loaded(chats, tmp_path / "cache") == expected

    def tried(file: Any) -> bool:
        held = is_held(file)
        is_met.set()
        return held

    is_held = locks.is_held
    other = context.Process(target=other_process, daemon=True)
    other.start()
    assert begun.wait(60)
    monkeypatch.setattr(locks, "is_held", tried)
    assert loaded(chats, tmp_path / "cache") == expected
    other.join(60)
    assert other.exitcode == 0
    assert "another process makes tokens for" in capsys.readouterr().out
