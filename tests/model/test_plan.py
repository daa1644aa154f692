"""`streamer.plan` tells what `streamer plan` and a real step do."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

import streamer
from models.gpt2 import GPT
from streamer.cli.config import load_config
from streamer.cli.plan.planning import plan_run
from streamer.engine.executor import Executor
from streamer.planner.machine import MACHINES, named_machine
from tests.cli.test_plan_command import SMALL
from tests.reference import unwrapping

SIZES = {"vocab_size": 256, "block_size": 32, "n_layer": 5, "n_head": 2, "n_embd": 64}
TOKENS = torch.zeros(8, 32, dtype=torch.long)


def model() -> GPT:
    with torch.device("meta"):
        return GPT(**SIZES)


def test_it_agrees_with_the_command(tmp_path: object) -> None:
    from pathlib import Path

    path = Path(str(tmp_path)) / "small.toml"
    path.write_text(SMALL)
    command = plan_run(load_config(path, ["train.max_grad_norm=0"]), named_machine("rtx-4090")).step
    found = streamer.plan(model(), TOKENS, layers="transformer.h", machine="rtx-4090")
    assert found.host_bytes == dict(command.host_bytes)
    # the buffers are the same; the command's loss holds logits in fp32
    for owner in ("weight slots", "gradient slots", "root weights", "root gradients"):
        assert found.device_bytes[owner] == command.device_bytes[owner]
    for lane in ("h2d", "d2h", "host"):
        assert found.busy_seconds[lane] > 0
    assert found.fits and found.samples == 8 and found.lacking == {}


def test_on_a_cpu_it_holds_what_a_real_model_holds() -> None:
    options = {"layers": "transformer.h", "dtype": "bf16"}
    found = streamer.plan(model(), TOKENS, machine="rtx-4090", **options)
    real = GPT(**SIZES)
    with unwrapping(streamer.wrap(real, device="cpu", **options)):
        optimizer = streamer.AdamW(real.parameters())
        real(TOKENS).float().sum().backward()
        optimizer.step()
        streamer.synchronize(real)
        held = streamer.stats(real).host_bytes
        assert {name: nbytes for name, nbytes in held.items() if nbytes} == found.host_bytes


def test_what_does_not_fit_is_told_and_how_it_reads() -> None:
    found = streamer.plan(model(), TOKENS, layers="transformer.h", device_memory="1MiB", num_slots=2)
    assert not found.fits and found.lacking["device"] > 0
    told = repr(found)
    assert told.startswith("RTX 4090")
    assert all(
        words in told
        for words in ("device, 2 slots", "weight slots", "exp_avg_sq", "h2d", "does not fit: lacks ")
    )
    assert repr(streamer.plan(model(), TOKENS, layers="transformer.h")).endswith("\nfits")


def test_one_memory_is_not_counted_twice() -> None:
    spark = MACHINES["dgx-spark"]
    options = {"layers": "transformer.h", "dtype": torch.bfloat16}
    needed = streamer.plan(model(), TOKENS, machine=spark, **options)
    both = needed.device_needed + needed.host_needed
    for there, fits in ((both, True), (both - 1, False)):
        machine = replace(spark, device_bytes=there, host_bytes=there)
        assert streamer.plan(model(), TOKENS, machine=machine, **options).fits is fits
    apart = replace(machine, coherent=False)
    assert streamer.plan(model(), TOKENS, machine=apart, **options).fits, "the memory of each has room"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"machine": "rtx4090"}, r"there is no machine 'rtx4090': did you mean rtx-4090\? known are"),
        ({"activations": "auto"}, "plan does not choose options"),
        ({"slots": 2}, "plan knows no option 'slots'"),
        ({"layers": "h"}, "layers='h': there is no such module"),
    ],
)
def test_what_cannot_be_planned(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        streamer.plan(model(), TOKENS, **options)  # type: ignore[arg-type]


def test_a_plan_leaves_no_model_behind() -> None:
    def executors() -> int:
        gc.collect()
        return sum(type(each) is Executor for each in gc.get_objects())

    before = executors()
    streamer.plan(model(), TOKENS, layers="transformer.h", machine="rtx-4090")
    assert executors() == before
