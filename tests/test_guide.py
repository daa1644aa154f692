"""The examples and commands of README.md and docs/ run as they are written, on tiny models; links lead
somewhere; the README's sentences are plain."""

from __future__ import annotations

import gc
import importlib.util
import io
import json
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from streamer.cli.main import command_line, main
from streamer.engine.handle import Wrapped
from tests.ranks.common import listening

HOME = Path(__file__).parent.parent
PAGES = [HOME / "README.md", *sorted((HOME / "docs").glob("*.md"))]
#: Keeps a run of the command small.
SMALL = [
    part
    for setting in (
        "train.max_steps=2",
        "train.per_device_train_batch_size=2",
        "stream.micro_batch_size=1",
        "train.max_length=32",
        "stream.device=cpu",
    )
    for part in ("--set", setting)
]
#: The same for a model of one's own.
SMALL_GPT = ["--set", "train.eval_batches=1", "--set", "stream.device=cpu", "--steps", "2"]


def blocks(kind: str) -> dict[str, list[str]]:
    """The blocks of a kind by page and heading."""
    found: dict[str, list[str]] = {}
    for page in PAGES:
        parts = re.split(r"^## (.+)$", page.read_text(), flags=re.MULTILINE)
        for heading, text in zip(["", *parts[1::2]], parts[0::2], strict=True):
            inside = re.findall(rf"^```{kind}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
            if inside:
                found[f"{page.name}: {heading}"] = inside
    return found


PYTHON, SHELL = blocks("python"), blocks("sh")


def modules(examples: list[str]) -> set[str]:
    """The modules that the examples import."""
    lines = "\n".join(examples).splitlines()
    return {match[1] for line in lines if (match := re.match(r"(?:import|from) (\w+)", line))}


def test_pages_have_no_blocks_that_are_not_run() -> None:
    for page in PAGES:
        for kind in re.findall(
            r"^ *```([^\n]*)\n.*?^ *```", page.read_text(), flags=re.MULTILINE | re.DOTALL
        ):
            assert kind in ("python", "sh", "toml"), f"{page.name}: a block of kind {kind!r}"
    assert len(PYTHON) > 20 and len(SHELL) > 4


@pytest.mark.parametrize("place", PYTHON)
@pytest.mark.filterwarnings("ignore")  # those of seven libraries
def test_an_example_runs(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = PYTHON[place]
    needed = {"transformers", *modules(examples)} | ({"datasets"} if "trl" in modules(examples) else set())
    for name in sorted(needed - set(sys.stdlib_module_names)):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"the example needs {name}, which is not installed")
    from tests import tiny_llama

    for folder in ("OUT", "SCRATCH"):
        (tmp_path / folder).mkdir()
    tiny_llama.write(tmp_path / "DIR")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    torch.manual_seed(0)
    tokens = torch.randint(260, (8, 16))
    if "process_group" in "".join(examples):
        _store, where = listening()
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", **where}.items():
            monkeypatch.setenv(name, value)
    given: dict[str, Any] = {
        "batches": list(tokens.split(4)),
        "pairs": [(torch.randn(4, 5, 8), torch.randn(4, 1))] * 2,
        "dataset": [{"input_ids": row, "labels": row} for row in tokens],
        "loader": torch.utils.data.DataLoader(tokens, 4),
        "tokenizer": tiny_llama.tokenizer(),
    }
    if place.startswith("README.md"):
        given |= own_model()
    if "trl" in modules(examples):
        from datasets import load_dataset

        lines = tmp_path / "chats.jsonl"
        lines.write_text(CHATS)
        given["chats"] = load_dataset("json", data_files=str(lines), cache_dir=str(tmp_path))["train"]
    for example in examples:
        exec(compile(example, place, "exec"), given)
        for handle in [thing for thing in gc.get_objects() if type(thing) is Wrapped]:
            handle.close()
    printed = capsys.readouterr().out
    assert ("compute: busy" in printed) == ("stats" in given)


def own_model() -> dict[str, Any]:
    """A model of one's own with its data and loss."""
    from models.gpt2 import GPT

    tokens = torch.randint(256, (2, 4, 17))
    return {
        "model": GPT(vocab_size=256, block_size=64, n_layer=4, n_head=2, n_embd=32),
        "loader": [(rows[:, :-1], rows[:, 1:]) for rows in tokens],
        "loss_fn": lambda logits, y: torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()),
    }


TURNS = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
CHATS = f"{json.dumps({'messages': TURNS})}\n" * 40


@pytest.mark.parametrize("place", SHELL)
@pytest.mark.filterwarnings("ignore")
def test_commands_run(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of streamer, in one folder and in their order; `streamer plan` is in
    tests/cli/test_readme_plans.py. Names in commands of other programs exist."""
    pytest.importorskip("trl", reason="needs trl (pip install trl)")
    from tests import tiny_llama

    tiny_llama.write(tmp_path / "DIR")
    (tmp_path / "SCRATCH").mkdir()
    (tmp_path / "FILE.jsonl").write_text(CHATS)
    (tmp_path / "configs").symlink_to(HOME / "configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n"))
    for block in SHELL[place]:
        for line in block.replace("\\\n", " ").splitlines():
            for command in line.partition("#")[0].split("&&"):
                if command.strip():
                    run(shlex.split(command))


def run(words: list[str]) -> None:
    """Run the command, or check what it names."""
    if words[0] == "streamer":
        if words[1] == "plan":
            command_line().parse_args(words[1:])
        elif words[1] == "train":
            is_folder = words[2] == "DIR"
            assert main([*words[1:], *(SMALL if is_folder else SMALL_GPT)]) == 0
        else:
            assert main(words[1:]) == 0, words
    elif words[0] == "torchrun":
        if "-m" in words:
            assert words[words.index("-m") + 1] == "streamer"
            command_line().parse_args(words[words.index("-m") + 2 :])
        else:
            assert words[-1].endswith(".py")
    elif words[:2] == ["pip", "install"]:
        for extras in re.findall(r"\[(.*)\]", " ".join(words)):
            has_extras(extras)
    else:
        known = (["git", "clone"], ["cd"], ["python3", "-m", "venv"], ["source"], ["hf", "download"])
        assert any(words[: len(each)] == each for each in known), words


def has_extras(extras: str) -> None:
    project = tomllib.loads((HOME / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])


def test_commands_in_sentences_name_what_is_there() -> None:
    targets = re.findall(r"^([\w-]+):", (HOME / "Makefile").read_text(), flags=re.MULTILINE)
    for page in PAGES:
        for command in re.findall(r"`([^`\n]+)`", page.read_text()):
            words = command.split()
            if words[0] == "make":
                assert words[1] in targets, command
            elif words[:2] == ["python", "-m"]:
                assert importlib.util.find_spec(words[2]) is not None, command
            elif words[0] == "bash":
                assert (HOME / words[1]).exists(), command
            elif words[:2] == ["pip", "install"]:
                has_extras(re.findall(r"\[(.*)\]", command)[0])


def test_every_link_leads_somewhere() -> None:
    for page in [*PAGES, *map(HOME.joinpath, ("CONTRIBUTING.md", "CHANGELOG.md", "docs/examples/README.md"))]:
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            path, _, place = target.partition("#")
            if "://" in path:
                continue
            file = (page.parent / path) if path else page
            assert file.exists(), f"{page.name}: {target}"
            if place and file.suffix == ".md":
                headings = re.findall(r"^#+ (.+)$", file.read_text(), flags=re.MULTILINE)
                slugs = {
                    re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", h))
                    .strip()
                    .lower()
                    .replace(" ", "-")
                    for h in headings
                }
                assert place in slugs, f"{page.name}: {target}"


#: Words that chain clauses, per sentence: fewer than a documentation page of PyTorch has.
MOST = 0.45


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sentences_are_plain(page: Path) -> None:
    text = re.sub(r"<!--.*?-->|^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    prose = [line for line in text.splitlines() if not line.startswith(("|", "#"))]
    plain = re.sub(r"\]\([^)]*\)|`[^`]*`|[*\[]", "x", "\n".join(prose))
    sentences = [part for part in re.split(r"[.:?!]\s|\n\n|^- ", plain, flags=re.MULTILINE) if part.strip()]
    chained = re.findall(r"\b(?:which|that|whose|what)\b", " ".join(sentences))
    assert len(chained) / len(sentences) <= MOST, f"{len(chained)} in {len(sentences)} sentences"
