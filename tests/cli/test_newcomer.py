"""What a newcomer does, from a wheel and outside of any checkout: fine-tune a chat model on a JSONL file of
their own, lose the machine on the way, go on, look at it, load it elsewhere. With adapters it is tried in the
tests' own process.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft", reason="peft is not installed")

import torch
import transformers

from tests import tiny_llama
from tests.cli.common import HOME, chat, sets

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # the libraries' own
    pytest.mark.skipif(os.name != "posix", reason="kills a process as Linux does"),
]
STEPS_A_SAVE = 5
SETTINGS = [
    *(
        "train.num_train_epochs=2",
        f"train.save_steps={STEPS_A_SAVE}",
        "train.eval_steps=20",
        "train.max_length=64",
    ),
    *("train.per_device_train_batch_size=2", 'data.val_paths=["val.jsonl"]', "stream.device=cpu"),
    *('sample.prompts=["after 3?"]', "sample.chat=true", "sample.temperature=0", "sample.tokens=8"),
    *("stream.micro_batch_size=1", "train.learning_rate=1e-2", "train.packing=false"),
]
#: Its argument: commands, of which each has to succeed.
IN_TURN = """
import json, sys
from streamer.cli.main import main
for arguments in json.loads(sys.argv[1]):
    if code := main(arguments):
        sys.exit(code)
"""


class Place:
    """A virtual environment for streamer's wheel, and a folder with a model and data to work in."""

    def __init__(self, root: Path) -> None:
        self.sources, self.work, self._env = root / "sources", root / "work", root / "env"
        left_out = shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "__pycache__")
        shutil.copytree(HOME, self.sources, ignore=left_out)
        self._pip("wheel", "--wheel-dir", str(root / "wheels"), str(self.sources))
        [self._wheel] = (root / "wheels").glob("layer_streamer-*.whl")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self._env], check=True)
        self._bin = self._env / "bin"
        [site] = self._env.glob("lib/python*/site-packages")
        self.installed = site / "streamer_native"
        # the libraries, but not this checkout's own installation, which a file there names
        libraries = {
            Path(str(find_spec(name).origin)).parents[1] for name in ("torch", "peft", "trl", "matplotlib")
        }  # type: ignore[union-attr]
        (site / "libraries.pth").write_text("".join(f"{path}\n" for path in libraries))
        self.work.mkdir()
        write_model_and_data(self.work)
        usual = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "NUMBA"))}
        self.environment = usual | {"CUDA_VISIBLE_DEVICES": ""}

    def _pip(self, *arguments: str) -> None:
        options = [
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
            "--quiet",
            "--disable-pip-version-check",
        ]
        subprocess.run([sys.executable, "-m", "pip", *arguments[:1], *options, *arguments[1:]], check=True)

    def install(self, *what: str) -> None:
        python = str(self._bin / "python")
        command = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "--quiet"]
        options = ["--no-deps", "--no-index", "--no-build-isolation", "--force-reinstall"]
        subprocess.run([*command, "install", *options, *(what or [str(self._wheel)])], check=True)

    def start(self, *commands: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """One command as such, several in one process: most of what each of them takes are its imports."""
        given = [str(self._bin / "streamer"), *commands[0]]
        if len(commands) > 1:
            given = [str(self._bin / "python"), "-u", "-c", IN_TURN, json.dumps(commands)]
        return subprocess.Popen(
            given,
            cwd=self.work,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **options,
        )

    def streamer(self, *commands: Sequence[str]) -> str:
        """What the commands print; they have to succeed."""
        process = self.start(*commands)
        printed, _ = process.communicate(timeout=120)
        assert process.returncode == 0, printed
        return printed


def validation_loss(model: Any, words: Any) -> float:
    """Of the answers in val.jsonl and the token that ends them, by transformers alone."""
    total, count = 0.0, 0
    for number in range(60, 70):
        text = words.apply_chat_template(chat(number), tokenize=False) + words.eos_token
        encoded = words(text, return_offsets_mapping=True)
        begins = text.index("<|assistant|>") + len("<|assistant|>")
        labels = [
            token if begin >= begins else -100
            for token, (begin, _) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        ]
        logits = model(torch.tensor([encoded["input_ids"]])).logits[0, :-1].float()
        target = torch.tensor(labels[1:])
        total += torch.nn.functional.cross_entropy(logits, target, ignore_index=-100, reduction="sum").item()
        count += int((target != -100).sum())
    return total / count


def check_what_is_left(run: Path, out: Path, of_run: Any) -> None:
    """A run has learnt in two epochs, and transformers computes with what it left, and with what was
    exported to ``out``, what the run says."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert [line["step"] for line in lines if "loss" in line] == [*range(1, 61)], "two epochs of 30 steps"
    assert sum(losses[-10:]) < sum(losses[:10])
    summary = json.loads((run / "summary.json").read_text())
    assert summary["last_val_loss"] < summary["first_val_loss"]

    words = transformers.AutoTokenizer.from_pretrained(out)
    exported = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    with torch.no_grad():
        for model in (of_run.eval(), exported):
            assert validation_loss(model, words) == pytest.approx(summary["last_val_loss"], rel=1e-4)
    [sample] = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    tokens = words.apply_chat_template(
        chat(3)[:1], add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    found = exported.generate(tokens, do_sample=False, max_new_tokens=8, max_length=None, eos_token_id=1)
    assert words.eos_token_id == 1
    assert sample["text"] == words.decode(found[0, tokens.shape[1] :], skip_special_tokens=True)


def write_model_and_data(folder: Path) -> None:
    tiny_llama.write(folder / "llama")
    for name, numbers in (("train", range(60)), ("val", range(60, 70))):
        lines = [json.dumps({"messages": chat(number)}) for number in numbers]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))


COMMAND = ["llama", "--data", "train.jsonl", *sets(*SETTINGS)]


def test_a_folder_becomes_a_trained_model(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.install()
    assert "gpt2-demo" in place.streamer(["configs"]), "by the script that the wheel brings"
    command = [*COMMAND, *sets('train.output_dir="runs/full"')]
    run, out = place.work / "runs" / "full", place.work / "out"
    process = place.start(["data", *command, "--show", "1"], ["train", *command], start_new_session=True)
    third = run / f"checkpoint-{3 * STEPS_A_SAVE}" / "trainer_state.json"
    while not third.exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    shown = process.communicate()[0]
    assert "train: 60 documents of " in shown and "⟦" in shown
    assert not (run / "summary.json").exists(), "it was to be killed before its end"
    finishing = [["plot", "runs/full"], ["export", "runs/full", "--to", out.name]]
    printed = place.streamer(["train", *command, "--resume"], *finishing)
    assert "tokens/s" in printed and "training.png" in printed
    pictures = {path.name: path.stat().st_size for path in (run / "plots").iterdir()}
    assert {"training.png", "lanes.png", "timeline.png"} <= pictures.keys()
    assert min(pictures.values()) > 5000
    check_what_is_left(run, out, transformers.AutoModelForCausalLM.from_pretrained(run / "model"))

    # an editable installation after the wheel: files next to the wheel's sources kept a folder
    # alive in its place, which hid the package
    assert place.installed.exists()
    place.install("--editable", str(place.sources))
    assert not place.installed.exists()
    assert "gpt2-demo" in place.streamer(["configs"])
