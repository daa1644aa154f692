"""The examples of the library's guide, streamer/README.md, run as they are written, on a tiny Llama."""

from __future__ import annotations

import gc
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from streamer.engine.handle import Wrapped
from tests.ranks.common import listening

GUIDE = Path(__file__).parent.parent / "streamer" / "README.md"


def sections() -> dict[str, list[str]]:
    """The examples in Python by the heading that they stand under."""
    parts = re.split(r"^## (.+)$", GUIDE.read_text(), flags=re.MULTILINE)
    found = {
        heading: re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
        for heading, text in zip(parts[1::2], parts[2::2], strict=True)
    }
    return {heading: examples for heading, examples in found.items() if examples}


def modules(examples: list[str]) -> set[str]:
    """What the examples import."""
    lines = "\n".join(examples).splitlines()
    return {match[1] for line in lines if (match := re.match(r"(?:import|from) (\w+)", line))}


@pytest.mark.parametrize("heading", sections())
@pytest.mark.filterwarnings("ignore")  # those of seven libraries
def test_an_example_of_the_guide_runs(
    heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = sections()[heading]
    needed = {"transformers", *modules(examples)} | ({"datasets"} if "trl" in modules(examples) else set())
    for name in sorted(needed - set(sys.stdlib_module_names)):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"the example needs {name}, which is not installed")
    from tests import tiny_llama

    (tmp_path / "OUT").mkdir()
    tiny_llama.write(tmp_path / "DIR")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    torch.manual_seed(0)
    tokens = torch.randint(260, (8, 16))
    if "process_group" in "".join(examples):
        _store, place = listening()
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", **place}.items():
            monkeypatch.setenv(name, value)
    given: dict[str, Any] = {
        "batches": list(tokens.split(4)),
        "pairs": [(torch.randn(4, 5, 8), torch.randn(4, 1))] * 2,
        "dataset": [{"input_ids": row, "labels": row} for row in tokens],
        "loader": torch.utils.data.DataLoader(tokens, 4),
        "tokenizer": tiny_llama.tokenizer(),
    }
    if "trl" in modules(examples):
        from datasets import load_dataset

        turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
        lines = tmp_path / "chats.jsonl"
        lines.write_text(f"{json.dumps({'messages': turns})}\n" * 4)
        given["chats"] = load_dataset("json", data_files=str(lines), cache_dir=str(tmp_path))["train"]
    for example in examples:
        exec(compile(example, f"{GUIDE.name}: {heading}", "exec"), given)
        for handle in [thing for thing in gc.get_objects() if type(thing) is Wrapped]:
            handle.close()
    printed = capsys.readouterr().out
    assert ("compute: busy" in printed) == ("stats" in given)


def test_every_link_of_the_guides_leads_somewhere() -> None:
    for page in (GUIDE, GUIDE.parent.parent / "README.md"):
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
