"""The scripts of docs/examples run, on tiny models."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from streamer.engine.handle import Wrapped

HOME = Path(__file__).parent.parent
EXAMPLES = HOME / "docs" / "examples"
TURNS = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
PAIR = {"prompt": "after one?", "chosen": " two", "rejected": " three"}
#: Arguments of each script, and what it leaves.
SCRIPTS = {
    "nanogpt": ([], "ckpt.pt"),
    "trainer": (["DIR", "FILE.txt"], "runs/trainer/model.safetensors"),
    "sft": (["DIR", "CHATS.jsonl"], "runs/sft/adapter_model.safetensors"),
    "dpo": (["DIR", "PAIRS.jsonl"], "runs/dpo/adapters/adapter_model.safetensors"),
    "grpo": (["DIR", "PROMPTS.jsonl"], "runs/grpo/adapters/adapter_model.safetensors"),
    "qlora": (["DIR", "FILE.txt"], "merged/model.safetensors"),
    "kohya_lora": ([], "lora.pt"),
    "diffusers_lora": ([], "lora/pytorch_lora_weights.safetensors"),
    "diffusers_full": ([], "transformer/diffusion_pytorch_model.safetensors"),
    "disk": (["SCRATCH"], None),
    "two_ranks": (["DIR"], "checkpoint"),
}


def test_each_script_is_tested_and_says_how_it_is_called() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SCRIPTS}
    for name, (arguments, _) in SCRIPTS.items():
        first = (EXAMPLES / f"{name}.py").read_text().partition("\n")[0]
        assert f"docs/examples/{name}.py {' '.join(arguments)}".strip() in first


def write_files(folder: Path) -> None:
    from tests import tiny_llama

    tiny_llama.write(folder / "DIR")
    (folder / "SCRATCH").mkdir()
    (folder / "FILE.txt").write_text("what follows one? two follows one, and three follows two.\n" * 40)
    (folder / "CHATS.jsonl").write_text(f"{json.dumps({'messages': TURNS})}\n" * 16)
    (folder / "PROMPTS.jsonl").write_text(f"{json.dumps({'prompt': 'after one?'})}\n" * 8)
    (folder / "PAIRS.jsonl").write_text(f"{json.dumps(PAIR)}\n" * 8)


def losses(printed: str) -> list[float]:
    return [float(each) for each in re.findall(r"loss (\d+\.\d+)", printed)]


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "two_ranks"])
@pytest.mark.filterwarnings("ignore")  # the libraries' own
def test_it_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    needed = {*re.findall(r"^(?:import|from) (\w+)", text, flags=re.MULTILINE)} - set(sys.stdlib_module_names)
    for module in sorted(needed | ({"bitsandbytes"} if "nf4" in text else set())):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"the example needs {module}, which is not installed")
    write_files(tmp_path)
    arguments, left = SCRIPTS[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    torch.manual_seed(0)
    try:
        runpy.run_path(str(EXAMPLES / f"{name}.py"))
    finally:
        for handle in [thing for thing in gc.get_objects() if type(thing) is Wrapped]:
            handle.close()
    assert left is None or (tmp_path / left).exists()
    if "adapter_model" in str(left) or "lora_weights" in str(left):
        trained = [value for key, value in load_file(tmp_path / str(left)).items() if "lora_B" in key]
        assert trained and all(value.any() for value in trained)
    printed = capsys.readouterr().out
    if name in ("nanogpt", "kohya_lora", "diffusers_full"):
        assert losses(printed)[-1] < losses(printed)[0]
    if name == "disk":
        assert "on disk: {}" not in printed


def test_two_ranks_run(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    write_files(tmp_path)
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", str(EXAMPLES / "two_ranks.py"), "DIR"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(HOME), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert len(losses(done.stdout)) == 4
    assert (tmp_path / "checkpoint").is_dir()
