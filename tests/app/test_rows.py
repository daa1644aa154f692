"""Whole conversations in rows: nothing is lost, nothing seen twice in an epoch, and none sees another."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import processors

from streamer.app.cli import main
from streamer.app.data.documents import Words, of_item
from streamer.app.data.load import load_tokens
from streamer.app.data.rows import Rows
from streamer.app.data.show import marked
from streamer.app.data.splits import IGNORED, TokenData
from streamer.app.data.tokens import encode
from streamer.app.run.loop import TokenLoss, packs
from tests import tiny_llama
from tests.app.common import error_of, logged, refused, sets

TOKENIZER = tiny_llama.tokenizer()
CONTEXT = 24


@pytest.fixture
def data(tmp_path: Path) -> TokenData:
    lines = [{"prompt": f"what follows {n}? " * (1 + n % 4), "completion": f"{n + 1}"} for n in range(90)]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return load_tokens([path], TOKENIZER, val_fraction=0.2)


def conversations(data: TokenData, split: Any = "train") -> list[list[int]]:
    bounds = data.documents[split].tolist()
    return [data.tokens(split)[a:b].tolist() for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


def texts(batch: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The conversations in a packed batch, each with its targets: parts between positions of 0."""
    found = []
    for tokens, targets, positions in zip(*batch, strict=True):
        begins = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
        for a, b in zip(begins[:-1], begins[1:], strict=True):
            assert positions[a:b].tolist() == list(range(b - a))
            if bool((targets[a:b] != IGNORED).any()):
                found.append((tuple(tokens[a:b].tolist()), tuple(targets[a:b].tolist())))
    return found


@pytest.mark.parametrize("packing", [True, False])
def test_an_epoch_is_every_conversation_once(data: TokenData, packing: bool) -> None:
    rows = Rows(data, CONTEXT, 4, packing, seed=3)
    seen: list[Counter[Any]] = []
    for epoch in range(2):
        steps = range(rows.steps(epoch), rows.steps(epoch + 1))
        batches = [rows.batch(step) for step in steps]
        if packing:
            found = Counter(text for batch in batches for text in texts(batch))
        else:
            assert all(batch.positions is None for batch in batches)
            given = [row for batch in batches for row in zip(batch.tokens, batch.targets, strict=True)]
            found = Counter((tuple(x.tolist()), tuple(y.tolist())) for x, y in given)
        seen.append(found)
    assert seen[0] == seen[1]
    whole = [tokens for tokens in conversations(data) if len(tokens) - 1 <= CONTEXT]
    for (x, y), count in seen[0].items():
        inputs = [tokens for tokens in whole if tuple(tokens[:-1]) == x[: len(tokens) - 1]]
        assert count == 1 and (inputs or rows.cut), "each is a conversation, or the beginning of one"
        learnt = [place for place, target in enumerate(y) if target != IGNORED]
        assert learnt and all(y[place] == (inputs[0][place + 1] if inputs else y[place]) for place in learnt)
    # a conversation that was cut before its answer has nothing to learn
    answered = sum(len(tokens) - 1 <= CONTEXT for tokens in conversations(data))
    assert answered <= sum(seen[0].values()) <= len(conversations(data))
    assert rows.cut == len(conversations(data)) - answered


def test_the_order_differs_by_epoch_and_seed_and_follows_from_them(data: TokenData) -> None:
    def order(seed: int, epoch: int) -> list[Any]:
        rows = Rows(data, CONTEXT, 4, True, seed)
        first = rows.steps(epoch)
        return [text for step in range(first, rows.steps(epoch + 1)) for text in texts(rows.batch(step))]

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1) and order(0, 0) != order(1, 0)
    assert Counter(order(0, 0)) == Counter(order(1, 1))
    # a step is the same whatever was asked for before
    rows = Rows(data, CONTEXT, 4, True, 0)
    last = rows.steps(3) - 1
    assert all(
        torch.equal(a, b)
        for a, b in zip(rows.batch(last), Rows(data, CONTEXT, 4, True, 0).batch(last), strict=True)
    )


def test_packing_needs_fewer_rows(data: TokenData) -> None:
    assert Rows(data, 64, 1, True, 0).steps(1) < 0.6 * Rows(data, 64, 1, False, 0).steps(1)


def test_windows_of_a_text_in_epochs() -> None:
    text = torch.arange(101, dtype=torch.int32)
    rows = Rows(TokenData(text, text), 10, 4, True, 0)
    assert rows.steps(1) == 3
    batches = [rows.batch(step) for step in range(3)]
    assert sorted(torch.cat([batch.tokens[:, 0] for batch in batches]).tolist()) == list(range(0, 100, 10))
    assert all(torch.equal(batch.targets, batch.tokens + 1) and batch.positions is None for batch in batches)
    assert [len(batch.tokens) for batch in batches] == [4, 4, 2]


KINDS = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_conversation_sees_another(kind: str, data: TokenData) -> None:
    config, make = KINDS[kind]
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = make(config(vocab_size=len(TOKENIZER), num_key_value_heads=2, head_dim=16, **sizes)).eval()
    assert packs(model, len(TOKENIZER))
    loss = TokenLoss(model)
    with torch.no_grad():
        batch = Rows(data, 64, 4, True, 0).batch(0)
        apart = [
            (loss(torch.tensor([x]), torch.tensor([y])).item(), sum(target != IGNORED for target in y))
            for x, y in texts(batch)
        ]
        mean = sum(value * count for value, count in apart) / sum(count for _, count in apart)
        assert loss(*batch).item() == pytest.approx(mean, rel=1e-5)
        # one that sees the others has another loss
        assert abs(loss(batch.tokens, batch.targets).item() - mean) > 1e-4 * mean


class Blind(torch.nn.Module):
    """Takes positions and does not use them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(97, 16)

    def forward(self, tokens: torch.Tensor, position_ids: Any = None, use_cache: bool = True) -> torch.Tensor:
        x = self.embed(tokens)
        return torch.cumsum(x, dim=1) @ self.embed.weight.T


def test_a_model_that_cannot_keep_them_apart_is_seen() -> None:
    assert not packs(Blind(), 97)
    assert not packs(torch.nn.Linear(2, 2), 97)


# Forms of chats

QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}CALL {{ c.function.name }}{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def qwen() -> Any:
    words = tiny_llama.tokenizer()
    words.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    words.chat_template = QWEN
    return words


def shown(given: Any, words: Any) -> list[str]:
    """The documents of a line, with what is learnt in brackets."""
    found = []
    for document in of_item("here", given, Words.of(words)):
        text, at = "", 0
        for begin, end in document.learnt:
            text += document.text[at:begin] + "[" + document.text[begin:end] + "]"
            at = end
        found.append(text + document.text[at:])
    return found


TURNS = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "three"},
]


def test_answers_that_are_written_otherwise_later_are_samples_of_their_own(qwen: Any) -> None:
    first = "<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\n"
    think = "<think>\n\n</think>\n\n"
    assert shown({"messages": TURNS}, qwen) == [
        f"{first}[{think}two<|im_end|>]\n",
        f"{first}two<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n"
        f"<|im_start|>assistant\n[{think}three<|im_end|>]\n",
    ]
    # the token that ends the turn is learnt, what the template writes behind it is not
    tokens = [*load_line({"messages": TURNS[:2]}, qwen)]
    assert tokens[-1] == IGNORED and qwen.decode(tokens[-2]) == "<|im_end|>"


def load_line(given: Any, words: Any) -> list[int]:
    [encoded] = encode(of_item("here", given, Words.of(words)), Words.of(words))
    assert encoded.targets is not None
    return encoded.targets.tolist()


def test_other_forms_are_the_same_chats(qwen: Any) -> None:
    chat = shown({"messages": TURNS[:2]}, qwen)
    share = [{"from": "human", "value": "one?"}, {"from": "gpt", "value": "two"}]
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "?"}]},
        TURNS[1],
    ]
    for given in (
        {"conversations": share},
        {"instruction": "one?", "output": "two"},
        {"instruction": "one?", "input": "", "output": "two"},
        {"messages": parts},
    ):
        assert shown(given, qwen) == chat
    [asked] = shown({"instruction": "add", "input": "1 2", "output": "3"}, qwen)
    assert "user\nadd\n\n1 2<|im_end|>" in asked
    plain = tiny_llama.tokenizer()
    plain.chat_template = None
    assert shown({"instruction": "add", "output": "3"}, plain) == [
        "### Instruction:\nadd\n\n### Response:\n[3]"
    ]
    calls = [TURNS[0], {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "now"}}]}]
    answer = [{"role": "tool", "content": "noon"}, {"role": "assistant", "content": "noon it is"}]
    called, answered = shown({"messages": [*calls, *answer]}, qwen)
    assert "CALL now<|im_end|>]" in called
    assert "CALL now<|im_end|>\n<|im_start|>tool\nnoon<|im_end|>\n" in answered
    assert answered.endswith("noon it is<|im_end|>]\n")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "content of type 'image': only text",
        ),
        ({"conversations": [{"from": "martian", "value": ""}]}, 'of each turn "from" must be one of human, '),
        ({"conversations": {}}, "a line must be {"),
        ({"instruction": 1, "output": ""}, "a line must be {"),
    ],
)
def test_a_form_that_is_wrong_is_named(given: Any, message: str, qwen: Any) -> None:
    assert message in error_of(of_item, "here", given, Words.of(qwen))


# Runs

RUN = """
[run]
name = "run"
epochs = 2
eval_every = 100
sample_tokens = 0
save_every = 2
[model]
pretrained = "llama"
[data]
paths = ["data.jsonl"]
val_paths = ["val.jsonl"]
context = 32
batch_size = 4
[stream]
device = "cpu"
micro_batch_size = 2
[optimizer]
lr = 1e-3
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tiny_llama.write(tmp_path / "llama")
    for name, numbers in (("data", range(60)), ("val", range(60, 80))):
        chats = [
            [{"role": "user", "content": f"after {n}?"}, {"role": "assistant", "content": f"{n + 1}"}]
            for n in numbers
        ]
        lines = [{"messages": chat} for chat in chats]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


@pytest.mark.filterwarnings("ignore")
def test_a_run_of_epochs_ends_when_they_do_and_goes_on_to_the_bit(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(config)]) == 0
    printed = capsys.readouterr().out
    assert "data: 60 whole conversations, several to a row, " in printed
    assert "data: data.jsonl: 1 file, " in printed and "; for validation 1 file, " in printed
    run = config.parent / "runs" / "run"
    losses = [line["loss"] for line in logged(run, "loss")]
    data = load_tokens(["data.jsonl"], tiny_llama.tokenizer(), val_fraction=0.05, val_paths=["val.jsonl"])
    steps = Rows(data, 32, 4, True, 0).steps(2)
    assert len(losses) == steps > 4
    weights = (run / "model" / "model.safetensors").read_bytes()
    earlier = run / "checkpoints" / f"step-{steps - 1 - (steps - 1) % 2:07d}"
    assert main(["train", str(config), "--resume", str(earlier)]) == 0
    assert [line["loss"] for line in logged(run, "loss")] == losses
    assert (run / "model-2" / "model.safetensors").read_bytes() == weights
    assert main(["train", str(config), "--resume"]) == 0
    assert "has finished at step" in capsys.readouterr().out
    assert main(["train", str(config), "--resume", *sets("run.epochs=3")]) == 0
    assert "run.epochs is 3 from here on; it was 2" in capsys.readouterr().out
    assert len(logged(run, "loss")) == Rows(data, 32, 4, True, 0).steps(3)


def test_a_pretrained_model_learns_nothing_by_accident(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(RUN.replace('paths = ["data.jsonl"]\nval_', "val_"))
    assert "there is nothing to train on: give files or folders with --data" in refused(
        capsys, "train", str(config)
    )
    assert not (config.parent / "runs").exists()


def test_data_is_shown_with_what_is_learnt(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", str(config), "--show", "100", *sets("data.context=48")]) == 0
    out = capsys.readouterr().out
    data = load_tokens(["data.jsonl"], tiny_llama.tokenizer(), val_fraction=0.05, val_paths=["val.jsonl"])
    rows = Rows(data, 48, 4, True, 0)
    lengths = sorted(len(each) for each in conversations(data))
    assert (
        f"train: 60 conversations of {sum(lengths):,} tokens, {data.count_learnt('train')} of them learnt; "
        f"half have up to {lengths[30]} tokens, nine of ten up to {lengths[54]}, the longest {lengths[-1]}\n"
    ) in out
    assert "val: 20 conversations of " in out
    assert f"an epoch is {rows.steps(1)} steps of 4 x 48 tokens\n" in out
    # in the order of the run's first epoch, each as the model gets it
    batches = [rows.batch(step) for step in range(rows.steps(1))]
    expected = [
        TOKENIZER.decode(x).removesuffix("</s>") for batch in batches for x, _ in texts(batch)
    ]  # fmt: skip
    blocks = out.split("\n--- ")[1:]
    assert len(blocks) == 60
    for block, text in zip(blocks, expected, strict=True):
        shown = block.partition("\n")[2]
        before, _, learnt = shown.partition("⟦")
        number = int(before.partition("after ")[2].partition("?")[0])
        assert before == f"<|user|>after {number}?\n<|assistant|>"
        assert learnt == f"{number + 1}\n</s>⟧\n"
        assert text == before + learnt.removesuffix("</s>⟧\n")
    # what a row has no room for
    Path("same.jsonl").write_bytes(Path("data.jsonl").read_bytes())
    narrow = ["data.context=29", "data.packing=false", "data.val_paths=['same.jsonl']"]
    assert main(["data", str(config), "--show", "1", *sets(*narrow)]) == 0
    out = capsys.readouterr().out
    cut = Rows(data, 29, 4, False, 0)
    assert (cut.left_out, cut.cut) == (50, 60)
    assert f"data.context = 29 cuts the ends of {cut.cut} conversations to train on\n" in out
    assert f"{cut.left_out} are left out: nothing of them is learnt before they are cut\n" in out
    assert "more that data.context = 29 cuts\n" in out and "one to a row: rows are full to 100%" in out


@pytest.mark.parametrize("more", [[], ["run.steps=0", "run.epochs=1"]])
def test_text_is_shown_as_it_is_drawn(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question\n" * 9)
    command = ["data", "gpt2-demo", "--data", str(tmp_path), "--show", "2", *sets("data.batch_size=1", *more)]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "all of them are learnt\n" in out and out.count("65 bytes, 64 of them learnt") == 2
    assert out.count("⟦") == out.count("⟧") == 3
    assert refused(capsys, "data", "gpt2-demo", "--data", str(tmp_path / "none"))


def test_marks_are_around_what_is_learnt() -> None:
    tokens = TOKENIZER("what follows one? two")["input_ids"]
    learnt = [place % 5 > 2 for place in range(len(tokens))]
    shown = marked(tokens, learnt, TOKENIZER.decode, "[]")
    assert shown.replace("[", "").replace("]", "") == "what follows one? two"
    parts = [part.partition("]")[0] for part in shown.split("[")[1:]]
    groups = [tokens[at + 3 : at + 5] for at in range(0, len(tokens), 5)]
    assert parts == [TOKENIZER.decode(group) for group in groups if group]


def test_a_long_text_beside_conversations_is_used_whole(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("one two three four five, " * 100)
    lines = [{"prompt": f"what follows {n}? ", "completion": f"{n + 1}"} for n in range(40)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    paths = [tmp_path / "book.txt", tmp_path / "chats.jsonl"]
    data = load_tokens(paths, TOKENIZER, val_fraction=0.1, val_paths=[tmp_path / "chats.jsonl"])
    assert len(data.documents["train"]) == 2, "what is for validation is not trained on"
    (tmp_path / "val.jsonl").write_text(json.dumps(lines[0]))
    data = load_tokens(paths, TOKENIZER, val_fraction=0.1, val_paths=[tmp_path / "val.jsonl"])
    rows = Rows(data, CONTEXT, 4, True, 0)
    seen = sum(int((rows.batch(step).targets != IGNORED).sum()) for step in range(rows.steps(1)))
    learnt = int((data.targets["train"] != IGNORED).sum())
    # of each text the first token is no target
    assert rows.cut == rows.left_out == 0 and seen == learnt - 1


def test_answers_of_one_conversation_are_in_one_split(qwen: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    chats = [[{**turn, "content": f"{turn['content']} {n}"} for turn in TURNS] for n in range(60)]
    path.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    data = load_tokens([path], qwen, val_fraction=0.3)
    splits: dict[str, set[str]] = {}
    for split in ("train", "val"):
        texts_of = [qwen.decode(each) for each in conversations(data, split)]
        splits[split] = {text.partition("one? ")[2].partition("<")[0] for text in texts_of}
        assert len(texts_of) == 2 * len(splits[split])
    assert splits["val"] and not splits["train"] & splits["val"]


def test_marks_in_chats_are_honoured(qwen: Any) -> None:
    muted = [TURNS[0], {**TURNS[1], "weight": 0}, TURNS[2], TURNS[3]]
    [only] = shown({"messages": muted}, qwen)
    assert "two<|im_end|>\n" in only and only.count("[") == 1 and "three<|im_end|>]" in only
    [none] = shown({"messages": [TURNS[0], {**TURNS[1], "train": False}]}, qwen)
    assert "[" not in none
    # an answer that comes first
    first = shown({"conversations": [{"from": "gpt", "value": "hello"}]}, qwen)
    assert first == ["<|im_start|>assistant\n<think>\n\n</think>\n\n[hello<|im_end|>]\n"]


def test_what_begins_with_the_mark_of_a_beginning_gets_no_other(tmp_path: Path) -> None:
    words = tiny_llama.tokenizer()
    words.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", words.bos_token_id)]
    )
    [bare], [marked_one] = (
        encode(of_item("here", {"text": text}, Words.of(words)), Words.of(words))
        for text in ("one", "<s>one")
    )
    assert bare.tokens.tolist() == marked_one.tokens.tolist()
    assert "half of a character ('\\ud83d'): correct the text" in error_of(
        of_item, "here", {"text": "a \ud83d"}, Words.of(words)
    )
