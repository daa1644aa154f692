"""Memory that the device or the system refuses, at each place where it is asked for."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import streamer
from models.gpt2 import GPT
from streamer.torch_private import set_allocator

pytestmark = pytest.mark.cuda_api

#: Tokens of a step: most tensors are so large that PyTorch's allocator asks CUDA for each.
TOKENS = (32, 256)


def gpt() -> GPT:
    return GPT(vocab_size=512, block_size=256, n_layer=3, n_head=4, n_embd=128)


def allocated() -> int:
    gc.collect()
    return torch.cuda.memory_allocated()


def begin(model: GPT) -> Callable[[], int]:
    """A step of ``model``, which returns the bytes at rest after it."""
    optimizer = streamer.AdamW(model.parameters())
    tokens = torch.zeros(TOKENS, dtype=torch.long, device="cuda")

    def step() -> int:
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        streamer.synchronize(model)
        return allocated()

    return step


@pytest.fixture(autouse=True)
def allocator_as_new() -> None:
    """As a process has it that has chosen no setting, with nothing of other tests in what it has taken."""
    set_allocator("expandable_segments:False")
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def asked(nullgpu: ModuleType, work: Callable[[], object]) -> int:
    """How often ``work`` asks CUDA for memory, where PyTorch has kept none."""
    gc.collect()
    torch.cuda.empty_cache()
    before = nullgpu.report()["device_mallocs"]
    work()
    return int(nullgpu.report()["device_mallocs"] - before)


def refused_at(number: int, nullgpu: ModuleType, work: Callable[[], object]) -> None:
    """Run ``work``, with every request but the first ``number`` refused."""
    gc.collect()
    torch.cuda.empty_cache()
    nullgpu.change(allocations=number)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            work()
    finally:
        nullgpu.change(allocations=-1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activations": "recompute+offload"},
        {"activations": "keep"},
        {"micro_batch_size": 16},
        {"update": "backward"},
        {"dtype": torch.bfloat16, "num_slots": 3},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_after_each_refusal_in_a_step_the_model_is_usable(
    options: dict[str, Any], nullgpu: ModuleType
) -> None:
    model = gpt()
    streamer.wrap(model, layers="transformer.h", device="cuda", **options)
    registered = nullgpu.report()["registered_bytes"]
    try:
        step = begin(model)
        step()
        at_rest = step()
        count = asked(nullgpu, step)
        assert count > 2
        for number in range(count):
            refused_at(number, nullgpu, step)
            assert step() == at_rest, number
        assert nullgpu.report()["registered_bytes"] >= registered
    finally:
        streamer.unwrap(model)


def test_after_each_refusal_in_wrap_the_model_is_as_it_was(nullgpu: ModuleType) -> None:
    model, before = gpt(), nullgpu.report()["registered_bytes"]
    weights = {name: value.clone() for name, value in model.state_dict().items()}

    def wrap() -> None:
        streamer.wrap(model, layers="transformer.h", device="cuda")

    wrap()
    streamer.unwrap(model)
    at_rest = allocated()
    count = asked(nullgpu, wrap)
    streamer.unwrap(model)
    assert count
    for number in range(count):
        refused_at(number, nullgpu, wrap)
        assert allocated() == at_rest, number
        assert nullgpu.report()["registered_bytes"] == before, number
        torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)
    wrap()
    begin(model)()
    streamer.unwrap(model)


@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_memory_that_cannot_be_registered_is_used_as_it_is(blocks: int, nullgpu: ModuleType) -> None:
    before = nullgpu.report()
    model = gpt()
    layer = sum(param.nbytes for param in model.transformer.h[0].parameters())
    nullgpu.change(lockable=before["registered_bytes"] + (blocks + 0.5) * layer)
    with pytest.warns(UserWarning, match="could not page-lock .* bytes of host memory") as warned:
        streamer.wrap(model, layers="transformer.h", device="cuda")
        step = begin(model)
        step()
        assert step() == step()
        streamer.unwrap(model)
    assert len([one for one in warned if "page-lock" in str(one.message)]) == 1
    after = nullgpu.report()
    assert after["pageable_async_copies"] > before["pageable_async_copies"]
    assert after["registered_bytes"] == before["registered_bytes"]
