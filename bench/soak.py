"""Does a run that is killed again and again end where an undisturbed one does?

    python -m bench.soak --minutes 30

Trains one small model with `streamer train`, in processes of their own: once undisturbed, then in lives that
are killed at random moments (SIGKILL, SIGTERM or SIGINT, drawn anew each time) and resumed until they end,
and so on until the time is up. Every life's last checkpoint must hold the same weights and moments as the
undisturbed run's, to the bit, and its metrics the same losses. After SIGKILL a resume must find a complete
checkpoint if one was written; after the others the process must have saved and ended by itself with exit code
0. Exits with 1 at the first thing that is not so. The log is the JSON's list of kills.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from bench.common import RESULTS, load_average, provenance, write_json
from streamer.checkpoint.manifest import checkpoints

HOME = Path(__file__).parent.parent
CONFIG = """
[run]
name = "life"
steps = {steps}
eval_every = 50
eval_batches = 2
sample_tokens = 0
save_every = 10
[model]
factory = "models.gpt2:GPT"
args = {{vocab_size = 256, block_size = 32, n_layer = 6, n_head = 4, n_embd = 64, dropout = 0.1}}
[data]
context = 32
batch_size = 4
[stream]
layers = "transformer.h"
device = "cpu"
dtype = "bfloat16"
host_threads = 1
[optimizer]
lr = 2e-3
state_dtype = "{state_dtype}"
warmup_steps = 10
"""
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


class Broken(RuntimeError):
    """What must not be."""


def start(config: Path, out: str, *arguments: str) -> subprocess.Popen[str]:
    """`streamer train` in a process of its own, in the config's folder."""
    command = [sys.executable, "-m", "streamer", "train", str(config), "--set", f"run.out='{out}'"]
    environment = os.environ | {"PYTHONPATH": str(HOME), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *arguments],
        cwd=config.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end_of(run: Path) -> tuple[dict[str, torch.Tensor], list[tuple[int, float | None]]]:
    """The last checkpoint's weights and moments, and the losses by step."""
    last = checkpoints(run / "checkpoints")[-1]
    tensors = {
        f"{path.name}: {name}": tensor
        for path in sorted(last.glob("*-*.safetensors"))
        for name, tensor in load_file(path).items()
    }
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return tensors, [(line["step"], line.get("loss", line.get("val_loss"))) for line in lines]


def check_same_end(run: Path, undisturbed: Path) -> None:
    (mine, my_losses), (theirs, their_losses) = end_of(run), end_of(undisturbed)
    differing = [name for name in theirs if name not in mine or not torch.equal(mine[name], theirs[name])]
    if differing or list(mine) != list(theirs):
        raise Broken(
            f"{run}: {len(differing)} tensors differ from those of the undisturbed run: {differing[:3]}"
        )
    if my_losses != their_losses:
        raise Broken(f"{run}: other losses than those of the undisturbed run")


def live(config: Path, out: str, draw: random.Random, until: float, longest: float) -> list[dict[str, Any]]:
    """One life, killed and resumed until it ends or the time is up; its kills."""
    kills: list[dict[str, Any]] = []
    run = config.parent / out / "life"
    while True:
        before = [path.name for path in checkpoints(run / "checkpoints")]
        if not before and run.exists():
            run.rename(run.with_name(f"early-{len(kills)}"))  # killed before its first checkpoint
        child = start(config, out, *(["--resume"] if before else []))
        # time to import is part of what may be interrupted; nearly all of it is without a checkpoint at stake
        seconds, number = draw.uniform(2.0, longest), draw.choice(SIGNALS)
        try:
            output, _ = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            child.send_signal(number)
            output, _ = child.communicate(timeout=120)
            after = [path.name for path in checkpoints(run / "checkpoints")]
            kills.append(
                {"signal": number.name, "seconds": seconds, "resumed_from": before[-1:], "left": after[-1:]}
                | {"exit_code": child.returncode, "life": out}
            )
            if before and not after:
                raise Broken(f"{out}: no complete checkpoint is left after {number.name}") from None
            # before it has said what it is about to do, and after what it has done, it ends as any process
            in_the_loop = "tokens, to" in output and "Written to" not in output
            if number is not signal.SIGKILL and in_the_loop and child.returncode != 0:
                raise Broken(
                    f"{out}: exit code {child.returncode} after {number.name}: {output[-500:]}"
                ) from None
            if time.monotonic() > until:
                return kills
            continue
        if child.returncode != 0:
            raise Broken(f"{out}: exit code {child.returncode} by itself: {output[-500:]}")
        return [*kills, {"signal": None, "life": out}]


def soak(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    draw = random.Random(0)
    config = folder / "life.toml"
    config.write_text(CONFIG.format(steps=options.steps, state_dtype=options.state_dtype))
    begun = time.monotonic()
    until = begun + options.minutes * 60
    plain = start(config, "undisturbed")
    output, _ = plain.communicate(timeout=1800)
    if plain.returncode != 0:
        raise Broken(f"the undisturbed run: {output[-500:]}")
    undisturbed_seconds = time.monotonic() - begun
    kills: list[dict[str, Any]] = []
    ended = 0
    while time.monotonic() < until:
        out = f"life{ended}"
        kills += live(config, out, draw, until, options.longest)
        if kills[-1]["signal"] is None:
            kills.pop()
            check_same_end(folder / out / "life", folder / "undisturbed" / "life")
            ended += 1
            print(f"{time.monotonic() - begun:6.0f} s: life {ended} ended as it should; {len(kills)} kills")
    hidden = [path for path in folder.rglob(".*") if path.is_dir()]
    return {
        "minutes": (time.monotonic() - begun) / 60,
        "undisturbed_seconds": undisturbed_seconds,
        "steps_per_life": options.steps,
        "lives_that_ended_equal": ended,
        "kills": len(kills),
        "kills_by_signal": {s.name: sum(kill["signal"] == s.name for kill in kills) for s in SIGNALS},
        "resumes": sum(bool(kill["resumed_from"]) for kill in kills),
        "half_written_folders_left": len(hidden),
        "log": kills,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--steps", type=int, default=400, help="of a life (400)")
    parser.add_argument("--longest", type=float, default=15, help="seconds until a kill at most (15)")
    parser.add_argument("--state-dtype", default="bfloat16", help="of the moments (bfloat16)")
    parser.add_argument("--json", type=Path, default=RESULTS / "soak.json")
    options = parser.parse_args()
    load_before = load_average()
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = soak(Path(folder), options)
        except Broken as error:
            print(f"FAILED: {error}")
            return 1
    write_json(options.json, {**provenance("bench/soak.py", load_before=load_before), **found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
