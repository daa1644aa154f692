"""The commands `streamer plan` of the README and of docs/ run, and print the numbers there."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from streamer.cli.config import Config, load_config
from streamer.cli.main import main
from streamer.cli.plan import planning
from streamer.cli.plan.planning import Models, RunPlan, plan_run
from streamer.cli.shipped import config_path
from streamer.errors import amount
from streamer.planner.machine import Machine, named_machine
from tests.cli.test_plan_command import SMALL

HOME = Path(__file__).parents[2]
PAGES = "\n\n".join(page.read_text() for page in (HOME / "README.md", *sorted((HOME / "docs").glob("*.md"))))
#: Those in blocks, with DIR for a model and CONFIG for a config.
COMMANDS = re.findall(r"^streamer (plan [^#\n]+)", PAGES, re.MULTILINE)
#: Those in a paragraph, behind its numbers.
PARAGRAPHS = [text for text in PAGES.split("\n\n") if "`streamer plan gpt2-10b " in text]

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@pytest.mark.filterwarnings("ignore")  # of the library
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_a_page_runs(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    made: list[RunPlan] = []

    def planned_once(config: Config, machine: Machine, models: Models | None = None) -> RunPlan:
        """The plan of the command itself stands for its variants, which test_plan_command.py plans."""
        made.extend([] if made else [plan_run(config, machine, models)])
        return replace(made[0], config=config)

    monkeypatch.setattr(planning, "plan_run", planned_once)
    monkeypatch.chdir(HOME)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "config.toml").write_text(SMALL)
    names = {"DIR": str(tmp_path), "CONFIG": str(tmp_path / "config.toml")}
    words = [re.sub(r"^(DIR|CONFIG)\b", lambda name: names[name[0]], word) for word in shlex.split(command)]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "tokens/s" in out


def test_there_are_commands_and_numbers() -> None:
    assert len(COMMANDS) >= 4 and len(PARAGRAPHS) == 3


@pytest.mark.parametrize("paragraph", PARAGRAPHS)
def test_numbers_of_the_pages_are_those_of_the_plan(paragraph: str) -> None:
    (command,) = re.findall(r"`streamer plan (gpt2-10b [^`]+)`", paragraph)
    name, *words = shlex.split(command)
    options = dict(zip(words[::2], words[1::2], strict=True))
    changes = [value for key, value in zip(words[::2], words[1::2], strict=True) if key == "--set"]
    if "--host-memory" in options:
        changes.append(f"stream.host_memory={options['--host-memory']}")
    plan = plan_run(load_config(config_path(name), changes), named_machine(options["--machine"]))
    text = " ".join(paragraph.split())
    if not plan.has_disk:
        assert f"{amount(plan.device_needed)}" in text and f"{amount(plan.host_needed)}" in text
        return
    read, written = plan.disk_moved
    assert f"reads {amount(read)} and writes {amount(written)}" in text
    assert f"{10**15 // written:,} steps" in text
    in_memory = plan_run(load_config(config_path(name)), named_machine(options["--machine"]))
    speeds = f"{plan.tokens_per_second:,.0f} tokens/s in place of {in_memory.tokens_per_second:,.0f}"
    assert f"at most {speeds}" in text
