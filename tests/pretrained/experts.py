"""What tests of mixtures have in common: adapters, stacks of experts, the rules by which they are joined."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import conversion_mapping

import streamer
from streamer.backends.base import Lane
from streamer.backends.virtual import VirtualBackend
from streamer.engine.handle import wrapped
from streamer.planner.machine import RTX_4090
from streamer.planner.step import StepPlan, plan_step
from streamer.store.shard import HostShard
from tests.pretrained.test_quantize import least_memory
from tests.quantized import bytes_moved, history, logits, trained, whole_step
from tests.reference import assert_equal

peft = pytest.importorskip("peft", reason="peft is not installed")

STACKS = ("gate_up_proj", "down_proj")
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def adapt(model: nn.Module) -> Any:
    options = peft.LoraConfig(target_modules=ATTENTION, r=4, lora_dropout=0.1, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, options)


def streamed(folder: Path, **options: Any) -> Any:
    options = {"adapt": adapt, "dtype": torch.bfloat16, "device": "cpu"} | options
    return streamer.from_pretrained(folder, **options).train()


def experts_of(model: nn.Module) -> list[Any]:
    return [module for name, module in model.named_modules() if name.endswith("mlp.experts")]


def assert_same_experts(model: nn.Module, reference: nn.Module) -> None:
    for mine, theirs in zip(experts_of(model), experts_of(reference), strict=True):
        for key in STACKS:
            values, expected = getattr(mine, key), getattr(theirs, key)
            assert values.dtype == expected.dtype and torch.equal(values, expected)


def trains_alike_on_disk(
    folder: Path, disk: bool | str, look: Callable[[HostShard], None] = lambda shard: None, **options: Any
) -> None:
    """With all layers on ``disk``, whose shards are shown to ``look``, as without."""
    histories = []
    for more in ({}, {"disk": disk, "host_memory": least_memory(folder, adapt=adapt, disk=disk, **options)}):
        torch.manual_seed(3)
        model = streamed(folder, **more, **options)
        for shard in wrapped(model).executor.store.shards[:-1]:
            assert shard.is_out == bool(more)
            if more:
                look(shard)
        histories.append(history(model))
        streamer.unwrap(model)
        histories[-1] += [experts.down_proj.detach() for experts in experts_of(model)]
    assert_equal(*histories)


def with_rules(monkeypatch: pytest.MonkeyPatch, operation: Any) -> None:
    """Let transformers do an ``operation`` more to gates and ups that it joins."""
    mapping = conversion_mapping.get_model_conversion_mapping

    def changed(model: nn.Module) -> Any:
        rules = mapping(model)  # type: ignore[arg-type]
        for rule in rules:
            if "experts.gate_up_proj" in "".join(rule.target_patterns):
                rule.operations.append(operation)  # type: ignore[union-attr]
        return rules

    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", changed)


def planned(folder: Path, **options: Any) -> StepPlan:
    """The plan of a step."""
    model = streamed(folder, **options, device=None, backend=VirtualBackend(RTX_4090))
    optimizer = streamer.AdamW(trained(model))
    plan = plan_step(wrapped(model).executor, lambda: whole_step(model, optimizer, "meta"))
    streamer.unwrap(model)
    return plan


def assert_planned(folder: Path, **options: Any) -> int:
    """A plan has the bytes that a model holds and moves. Those of a layer."""
    plan, model = planned(folder, **options), streamed(folder, **options)
    optimizer = streamer.AdamW(trained(model))
    for _ in range(2):
        whole_step(model, optimizer, "cpu")
    moved = bytes_moved(model, lambda: whole_step(model, optimizer, "cpu"))
    held, of_layer = streamer.stats(model), wrapped(model).executor.units[0].layout.nbytes
    streamer.unwrap(model)
    assert {owner: nbytes for owner, nbytes in held.host_bytes.items() if nbytes} == dict(plan.host_bytes)
    assert held.device_bytes["weight slots"] == plan.device_bytes["weight slots"] == 2 * of_layer
    for lane in (Lane.H2D, Lane.D2H):
        assert moved[lane] == plan.prediction.moved_bytes[lane]
    return of_layer


def assert_saved(folder: Path, to: Path, **options: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A checkpoint, and adapters in files of peft, bring trained adapters back. The model, unwrapped, and its
    state dict of before."""
    model = streamed(folder, **options)
    optimizer = streamer.AdamW(trained(model), lr=1e-2)
    whole_step(model, optimizer, "cpu")
    streamer.save(model, optimizer, to / "checkpoint", step=1)
    model.save_pretrained(to / "adapters")
    expected, state = logits(model), model.state_dict()
    streamer.unwrap(model)
    again = streamed(folder, **options)
    streamer.load(again, streamer.AdamW(trained(again)), to / "checkpoint")
    assert torch.equal(logits(again), expected)
    streamer.unwrap(again)
    base = streamer.unwrap(streamed(folder, adapt=None, **options))
    adapted = peft.PeftModel.from_pretrained(base, to / "adapters", autocast_adapter_dtype=False)
    assert torch.equal(logits(adapted), expected)
    return model, state
