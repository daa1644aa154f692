"""Data of a Hugging Face folder: forms, labels, and errors that name file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datasets", reason="needs datasets (pip install '.[hf]')")

import datasets

from streamer.cli.config import load_config
from streamer.cli.data import documents_of, encode, load_data, load_tokenizer, show_data
from streamer.cli.main import main
from tests import tiny_llama
from tests.cli.common import chat, error_of, refused
from tests.cli.test_config import written

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own
ASSISTANT = "<|assistant|>"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_llama.write(folder)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def config(llama: Path, folder: Path, *data: str, **keys: object) -> Any:
    settings = [
        f"data.paths={json.dumps(data)}",
        *(f"{key.replace('__', '.')}={value}" for key, value in keys.items()),
    ]
    return load_config(written(folder, f'[model]\npath = "{llama}"\n'), settings)


def file(folder: Path, name: str, *items: object) -> str:
    path = folder / name
    path.write_text("".join(f"{json.dumps(item)}\n" for item in items))
    return str(path)


#: Items, and their text with answers in braces, in the tiny model's template.
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"text": "two three"}, "{two three</s>}"),
    ({"prompt": "one", "completion": " two"}, "one{ two</s>}"),
    ({"messages": chat(1)}, f"<|user|>after 1?\n{ASSISTANT}{{2\n</s>}}"),
    (
        {"messages": [{"role": "system", "content": "s"}, *chat(1), *chat(7)]},
        f"<|system|>s\n<|user|>after 1?\n{ASSISTANT}{{2\n}}<|user|>after 7?\n{ASSISTANT}{{8\n</s>}}",
    ),
    (
        {"messages": [*chat(1)[:1], {**chat(1)[1], "weight": 0}, *chat(7)]},
        f"<|user|>after 1?\n{ASSISTANT}2\n<|user|>after 7?\n{ASSISTANT}{{8\n</s>}}",
    ),
    ({"instruction": "a", "input": "b", "output": "c"}, f"<|user|>a\n\nb\n{ASSISTANT}{{c\n</s>}}"),
    (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        f"<|user|>a\n{ASSISTANT}{{b\n</s>}}",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, chat(1)[1]]},
     f"<|user|>a\n{ASSISTANT}{{2\n</s>}}"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("item", "expected"), FORMS, ids=lambda value: "-".join(value) if isinstance(value, dict) else ""
)
def test_answers_have_a_loss(item: dict[str, Any], expected: str, llama: Path) -> None:
    tokenizer = load_tokenizer(str(llama))
    [(_, tokens, labels)] = encode(documents_of(item, tokenizer), tokenizer)
    found, was_answer = "", False
    for token, label in zip(tokens, labels, strict=True):
        assert label in (token, -100)
        if (label != -100) is not was_answer:
            found, was_answer = found + ("}" if was_answer else "{"), not was_answer
        found += tokenizer.decode([token])
    assert found + ("}" if was_answer else "") == expected
    [(_, tokens, labels)] = encode(documents_of(item, tokenizer), tokenizer, answers_only=False)
    assert labels == tokens


def test_text_is_cut_to_the_length_of_a_sequence(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three " * 40)
    train, validation = load_data(
        config(llama, tmp_path, str(tmp_path / "a.txt"), train__max_length=16),
        load_tokenizer(str(llama)),
        seed=0,
    )
    lengths = [len(row["input_ids"]) for part in (train, validation) for row in part]
    assert max(lengths) == 16 and sorted(lengths)[1] == 16
    assert all(row["labels"] == row["input_ids"] for row in train)


def test_tables_and_columns(llama: Path, tmp_path: Path) -> None:
    rows = [{"question": f"{number}?", "answer": f"{number}"} for number in range(6)]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    columns = '{question = "prompt", answer = "completion"}'
    train, validation = load_data(
        config(llama, tmp_path, str(tmp_path / "a.parquet"), data__columns=columns),
        load_tokenizer(str(llama)),
        seed=0,
    )
    decoded = {
        load_tokenizer(str(llama)).decode(row["input_ids"]) for part in (train, validation) for row in part
    }
    assert decoded == {f"{number}?{number}</s>" for number in range(6)}
    same = datasets.Dataset.from_list(rows)
    same.to_json(str(tmp_path / "set" / "train.jsonl"))
    found = load_data(
        config(llama, tmp_path, data__dataset=str(tmp_path / "set"), data__columns=columns),
        load_tokenizer(str(llama)),
        seed=0,
    )
    assert [len(part) for part in found] == [5, 1]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"text": "a"}\n{"text": b}\n', "a.jsonl: it cannot be read as json: JSON parse error"),
        ('{"txt": "a"}\n', "a.jsonl, row 1: a line must be"),
        ('{"text": 3}\n', "a.jsonl, row 1: a line must be"),
        ('{"messages": [{"role": "user"}]}\n', "a.jsonl, row 1: a line must be"),
        ('[{"text": "a"}, {"txt": "b"}]', "a.jsonl, row 2: a line must be"),
        ('{"messages": [{"role": "user", "content": "a"}]}\n' * 3, "the train data has no answer"),
        ("", "a.jsonl: empty, or binary"),
    ],
)
def test_errors_name_the_row(content: str, expected: str, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    assert expected in error_of(
        load_data, config(llama, tmp_path, str(tmp_path / "a.jsonl")), load_tokenizer(str(llama)), seed=0
    )


def test_tokenizers_that_cannot_be_used(llama: Path, tmp_path: Path) -> None:
    assert "there is no tokenizer in it" in error_of(load_tokenizer, str(tmp_path))
    assert "no such folder" in error_of(load_tokenizer, str(tmp_path / "absent"))
    tokenizer = load_tokenizer(str(llama))
    tokenizer.chat_template = None
    assert "has no chat template: use prompt and completion" in error_of(
        documents_of, {"messages": chat(1)}, tokenizer
    )
    (tmp_path / "tokenizer.json").write_text("{")
    assert "its tokenizer cannot be loaded" in error_of(load_tokenizer, str(tmp_path))


def test_the_command_marks_answers(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = file(tmp_path, "a.jsonl", *({"messages": chat(number)} for number in range(20)))
    show_data(config(llama, tmp_path, path, train__max_length=33), 1)
    printed = capsys.readouterr().out
    assert "train: 19 documents of" in printed and f"{ASSISTANT}⟦" in printed
    assert "train.max_length = 33 cuts the ends of" in printed
    assert "no such file or folder" in refused(capsys, "data", str(llama), "--data", "absent.jsonl")
    assert main(["data", str(llama), "--data", path, "--show", "0"]) == 0
