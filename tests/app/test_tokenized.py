"""Text and JSON lines become tokens, and only what is to be learnt becomes targets."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import BertConfig, Gemma2Config, GPT2Config, LlamaConfig, MixtralConfig, T5Config

from streamer.app.cli import main
from streamer.app.config import ConfigError
from streamer.app.data.load import load_tokenizer, load_tokens
from streamer.app.data.splits import IGNORED, Split
from streamer.app.run.samples import end_tokens
from tests import tiny_llama
from tests.app.common import error_of

TOKENIZER = tiny_llama.tokenizer()
END = TOKENIZER.eos_token
SPLITS: tuple[Split, Split] = ("train", "val")


def learnt(tokens: torch.Tensor, targets: torch.Tensor) -> str:
    """The text that is learnt, with | for what is not."""
    assert all(target in (token, IGNORED) for token, target in zip(tokens, targets, strict=True))
    runs = itertools.groupby(targets.tolist(), key=lambda target: target == IGNORED)
    return "".join("|" if hidden else TOKENIZER.decode(list(run)) for hidden, run in runs)


def load(folder: Path, *lines: Any) -> tuple[str, str]:
    """What is learnt of the training and of the validation documents; the latter is the smallest one."""
    path = folder / "data.jsonl"
    path.write_text("\n\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    data = load_tokens([path], TOKENIZER, val_fraction=1e-6)
    assert (data.unit, data.vocab_size) == ("token", len(TOKENIZER))
    of_all = {"train": data.train, "val": data.val} | data.targets
    return learnt(data.train, of_all["train"]), learnt(data.val, of_all["val"])


CHAT = [
    {"role": "user", "content": "what follows one?"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "and two?"},
    {"role": "assistant", "content": "three"},
]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"text": "one two three"}, f"one two three{END}"),
        # the last space of the prompt is in one token with what follows
        ({"prompt": "what follows one? ", "completion": "two, and três."}, f"| two, and três.{END}"),
        ({"messages": CHAT}, f"|two\n|three\n{END}"),
        # of a chat that ends with a question the end is not learnt
        ({"messages": CHAT[:3]}, "|two\n|"),
    ],
)
def test_texts_completions_and_answers_are_learnt(tmp_path: Path, line: Any, expected: str) -> None:
    assert load(tmp_path, line, {"text": "two"}) == (expected, f"two{END}")


def test_a_text_file_is_one_document_and_a_single_one_is_cut(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three, " * 20)
    data = load_tokens([tmp_path], TOKENIZER, val_fraction=0.25)
    whole = TOKENIZER.decode(torch.cat([data.train, data.val]).tolist())
    assert whole == "one two three, " * 20 + END
    assert len(data.val) == round(0.25 * (len(data.train) + len(data.val)))
    (tmp_path / "b.txt").write_text("two")
    data = load_tokens([tmp_path], TOKENIZER, val_fraction=0.001)
    assert TOKENIZER.decode(data.val.tolist()) == f"two{END}"


def test_a_crop_is_shifted_by_one_and_keeps_what_is_not_learnt(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "what follows one? ", "completion": "two"}\n' * 50 + '{"text": "three"}')
    data = load_tokens([path], TOKENIZER, val_fraction=0.3)
    tokens, targets = data.batch("train", 8, 6, torch.Generator().manual_seed(0))
    assert torch.equal(tokens[:, 1:].where(targets[:, :-1] != IGNORED, IGNORED), targets[:, :-1])
    assert 0 < int((targets == IGNORED).sum()) < targets.numel()
    # the loss of knowing frequencies alone is that of what is learnt
    train, val = (Counter(data.targets[split][data.targets[split] != IGNORED].tolist()) for split in SPLITS)
    total = sum(train.values()) + len(TOKENIZER)
    nats = sum(count * -math.log((train[token] + 1) / total) for token, count in val.items())
    assert data.unigram_entropy() == pytest.approx(nats / sum(val.values()), rel=1e-12)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "data.jsonl:3: not an object in JSON on a line of its own: "),
        ("[1]", "data.jsonl:3: a line must be {"),
        ({"txt": "one"}, "data.jsonl:3: a line must be {"),
        ({"text": 1}, "data.jsonl:3: a line must be {"),
        ({"prompt": "one"}, "data.jsonl:3: a line must be {"),
        ({"messages": []}, "data.jsonl:3: a line must be {"),
        ({"messages": [{"role": "user"}]}, "data.jsonl:3: a line must be {"),
        ({"messages": [{"role": "user", "content": ["one"]}]}, "data.jsonl:3: a line must be {"),
    ],
)
def test_a_line_of_another_form_is_named(tmp_path: Path, line: Any, message: str) -> None:
    assert message in error_of(load, tmp_path, {"text": "one"}, line)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% for m in messages %}{{ m.content }}{{ loop.last }}{% endfor %}",
            "otherwise when the answer follows",
        ),
        ("{{ raise_exception('no') }}", "data.jsonl:1: the tokenizer's chat template: no"),
        (None, "data.jsonl:1: the tokenizer has no chat template: give prompt and completion"),
    ],
)
def test_a_template_that_hides_who_speaks_is_refused(
    tmp_path: Path, template: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TOKENIZER, "chat_template", template)
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}] * 2
    assert message in error_of(load, tmp_path, {"messages": chat})


def test_data_in_which_nothing_is_learnt(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the val split has nothing to learn: give chats in which"):
        load(tmp_path, {"text": "what follows one? " * 9}, {"messages": [{"role": "user", "content": ""}]})
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match=r"latin.txt: not UTF-8 .* at byte 3"):
        load_tokens([tmp_path / "latin.txt"], TOKENIZER, val_fraction=0.1)


def test_a_tokenizer_that_adds_the_end_itself(tmp_path: Path) -> None:
    words = tiny_llama.tokenizer()
    begin, end = words.bos_token_id, words.eos_token_id
    words.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", begin), ("</s>", end)]
    )
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "what follows one? ", "completion": "two"}\n{"text": "one"}')
    data = load_tokens([path], words, val_fraction=1e-6)
    assert learnt(data.train, data.targets["train"]) == f"| two{END}"
    assert data.train.tolist().count(begin) == data.train.tolist().count(end) == 1


def test_lines_that_end_otherwise_after_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    lines = [{"prompt": f"{number} follows what, one? " * 30, "completion": "two"} for number in range(20)]
    path.write_text("\ufeff" + "\r\n".join(map(json.dumps, lines)))
    data = load_tokens([path], TOKENIZER, val_fraction=0.3)
    assert sum(len(bounds) - 1 for bounds in data.documents.values()) == 20
    assert 0 < data.count_learnt("train") < len(data.train) / 20


@pytest.mark.parametrize("name", ["data.json", "data.jsonl", "data.ndjson"])
@pytest.mark.parametrize("indent", [None, 1], ids=["on one line", "on several"])
def test_an_array_has_an_item_for_a_line(tmp_path: Path, name: str, indent: int | None) -> None:
    items = [{"prompt": f"{number} follows? ", "completion": "two"} for number in range(20)]
    (tmp_path / name).write_text(json.dumps(items, indent=indent))
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, items)))
    array, lines = (
        load_tokens([tmp_path / each], TOKENIZER, val_fraction=0.3) for each in (name, "lines.jsonl")
    )
    assert array.train.tolist() == lines.train.tolist() and array.count_learnt("train")


def test_documents_that_are_there_twice_stay_together(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n' * 9)
    data = load_tokens([path], TOKENIZER, val_fraction=0.5)
    assert {*data.train.tolist()} & {*data.val.tolist()} == {TOKENIZER.eos_token_id}
    path.write_text('{"text": "one"}\n' * 9)
    with pytest.raises(ConfigError, match="all documents are the same"):
        load_tokens([path], TOKENIZER, val_fraction=0.5)


@pytest.mark.parametrize("kind", [LlamaConfig, GPT2Config, T5Config, BertConfig, Gemma2Config, MixtralConfig])
def test_a_folder_without_a_tokenizer(kind: Any, tmp_path: Path) -> None:
    """For some models the library would make an empty tokenizer, others end in advice about its own code."""
    missing = f"{tmp_path}: there is no tokenizer in it (no tokenizer.json): copy the files"
    assert missing in error_of(load_tokenizer, str(tmp_path))
    kind().save_pretrained(tmp_path)
    assert missing in error_of(load_tokenizer, str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert missing in error_of(load_tokenizer, str(tmp_path))


def test_a_tokenizer_of_which_files_are_missing_or_damaged(tmp_path: Path) -> None:
    GPT2Config().save_pretrained(tmp_path)
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    assert "has a vocab.json without merges.txt" in error_of(load_tokenizer, str(tmp_path))
    (tmp_path / "tokenizer.json").write_text('{"version":')
    error = error_of(load_tokenizer, str(tmp_path))
    assert "its tokenizer cannot be loaded" in error and "put a whole tokenizer.json there" in error


@pytest.mark.parametrize(
    ("library", "message"),
    [
        ("transformers", "need the transformers library: pip install '.[hf]'"),
        ("tokenizers", "need the tokenizers library: pip install tokenizers"),
    ],
)
def test_a_library_that_is_not_installed(
    library: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, library, None)
    error = error_of(load_tokenizer, str(tmp_path))
    assert message in error and "data.tokenizer" not in error


def test_a_folder_without_a_template_for_chats_is_named(tmp_path: Path) -> None:
    with_marks(None).save_pretrained(tmp_path)
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"messages": CHAT}))
    error = error_of(load_tokens, [path], load_tokenizer(str(tmp_path)), val_fraction=0.5)
    assert f"the tokenizer in {tmp_path} has no chat template" in error


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def with_marks(template: str | None) -> Any:
    words = tiny_llama.tokenizer()
    words.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|user|>"]})
    words.chat_template = template
    return words


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, "<|im_end|>"),
        # two marks, of which the first ends the turn
        ("{% for m in messages %}{{ m.content }}<|im_end|>\n</s>{% endfor %}", "<|im_end|>"),
        # the next turn's begin is all that ends this one
        ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}", "<|user|>"),
        ("{% for m in messages %}{{ m.content }} </s>{% endfor %}", "</s>"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", None),
        ("{{ raise_exception('no') }}", None),
        (None, None),
    ],
)
def test_the_token_that_ends_a_turn(template: str | None, end: str | None) -> None:
    words = with_marks(template)
    ends = {words.eos_token_id} | ({words.convert_tokens_to_ids(end)} if end else set())
    assert end_tokens(nn.Linear(1, 1), words) == ends


class Speaks(nn.Module):
    """Ends its turn at once."""

    def __init__(self, vocab: int, end: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, vocab)
        with torch.no_grad():
            self.head.bias[end] = 100.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        made: torch.Tensor = self.head(x)
        return made


def test_samples_stop_where_a_turn_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = with_marks(CHATML)
    words.save_pretrained(tmp_path / "words")
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"text": f"what follows {n}? " * 9}) + "\n" for n in range(20))
    )
    args = f"{{vocab={len(words)}, end={words.convert_tokens_to_ids('<|im_end|>')}}}"
    (tmp_path / "config.toml").write_text(
        f"""
        [model]
        factory = "tests.app.test_tokenized:Speaks"
        args = {args}
        [data]
        paths = ["data.jsonl"]
        tokenizer = "words"
        context = 16
        batch_size = 2
        [run]
        steps = 1
        name = "run"
        sample_tokens = 8
        [sample]
        prompts = ["one"]
        chat = true
        tokens = 8
        [optimizer]
        lr = 1e-6
        warmup_steps = 0
        [stream]
        device = "cpu"
        layers = "layers"
        """
    )
    assert main(["train", "config.toml"]) == 0
    [line] = (tmp_path / "runs" / "run" / "samples.jsonl").read_text().splitlines()
    assert json.loads(line)["text"] == ""
    # nor does the sample after validation text go on
    assert "<|im_end|>" not in capsys.readouterr().out
