"""How AdamW keeps its moments: that the kernels get what is said, and that nothing is lost on the way."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import streamer
from streamer.backends.thread import ThreadBackend
from streamer.engine.handle import wrapped
from streamer.optim.state import convert
from streamer.optim.update import ParamUpdate, UnitUpdate, update_shard
from streamer.store.host import HostStore
from streamer.store.purposes import BF16, FP32, GRADIENTS, INT8, MODEL, MOMENTS, host_bytes
from streamer_native import Hyper
from tests.optim.test_clip import gpt
from tests.reference import language_loss, streamed

STATE_DTYPES = [torch.float32, torch.bfloat16, "int8"]


def bf16(**options: Any) -> AbstractContextManager[torch.nn.Module]:
    return streamed(gpt(), layers="transformer.h", dtype=torch.bfloat16, **options)


def losses(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    result = []
    for step in steps:
        loss = language_loss(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        result.append(loss.item())
    return result


@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
def test_each_unit_is_updated_as_its_shard_alone(state_dtype: torch.dtype | str) -> None:
    kept = torch.int8 if state_dtype == "int8" else state_dtype
    with bf16() as model:
        executor = wrapped(model).executor
        store = HostStore([shard.layout for shard in executor.store.shards], zeros)
        store.add([GRADIENTS, *MOMENTS[kept]])
        for mine, theirs in zip(store.shards, executor.store.shards, strict=True):
            for name in (purpose.name for purpose in MODEL):
                mine.held[name].copy_(theirs.held[name])
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.2},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 1e-2},
        ]
        optimizer = streamer.AdamW(groups, lr=1e-3, weight_decay=0.0, state_dtype=state_dtype)
        for step in range(1, 5):
            language_loss(model, step).backward()
            units = (*executor.units, executor.root)
            for unit, shard in zip(units, store.shards, strict=True):
                updates = []
                for slice, param in zip(unit.layout.trainable, unit.params, strict=True):
                    slice.view(shard.gradient).copy_(param.grad)
                    matrix = param.dim() > 1
                    hyper = Hyper(1e-3 if matrix else 1e-2, 0.9, 0.999, 1e-8, 0.2 if matrix else 0.0, step)
                    updates.append(ParamUpdate(slice, hyper))
                update_shard(shard, UnitUpdate.of(updates, kept), 1.0, seed=unit.index + 1)
            optimizer.step()
            optimizer.zero_grad()
        streamer.synchronize(model)
        for mine, theirs in zip(store.shards, executor.store.shards, strict=True):
            for slice in mine.layout.slices:
                assert torch.equal(mine.exact(slice), theirs.exact(slice)), slice.param.name
                for purpose in MOMENTS[kept]:
                    ours = purpose.part(slice, mine[purpose])
                    assert torch.equal(ours, purpose.part(slice, theirs[purpose])), purpose.name
                    assert bool(ours.any())


def zeros(nbytes: int, *, pinned: bool) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


IN_8_BITS = {"exp_avg": INT8, "exp_avg_sq": torch.uint8, "exp_avg_scale": FP32, "exp_avg_sq_scale": FP32}


@pytest.mark.parametrize(
    ("state_dtype", "expected"),
    [
        (FP32, {"exp_avg": FP32, "exp_avg_sq": FP32}),
        (BF16, {"exp_avg": BF16, "exp_avg_sq": BF16}),
        ("int8", IN_8_BITS),
    ],
    ids=str,
)
def test_the_state_is_what_the_docstring_says(
    state_dtype: torch.dtype | str, expected: dict[str, torch.dtype]
) -> None:
    with bf16() as model:
        optimizer = streamer.AdamW(model.parameters(), state_dtype=state_dtype)
        losses(model, optimizer, range(2))
        streamer.synchronize(model)
        held = sum(streamer.stats(model).host_bytes[name] for name in expected)
        layouts = [shard.layout for shard in wrapped(model).executor.store.shards]
        kept = INT8 if state_dtype == "int8" else state_dtype
        assert held == sum(host_bytes(layouts, MOMENTS[kept]).values())
        for param in model.parameters():
            state = dict(optimizer.state[param])
            assert state.pop("step") == 2
            assert {name: value.dtype for name, value in state.items()} == expected
            for name, value in state.items():
                blocks = -(-param.numel() // 256)
                assert value.shape == ((blocks,) if name.endswith("scale") else param.shape)


def test_the_moments_are_those_of_fp32_but_for_their_rounding() -> None:
    def after_three(state_dtype: torch.dtype | str) -> list[dict[str, torch.Tensor]]:
        with bf16() as model:
            # a rate of 0: the same gradients whatever the moments
            optimizer = streamer.AdamW(model.parameters(), lr=0.0, state_dtype=state_dtype)
            losses(model, optimizer, range(3))
            streamer.synchronize(model)
            return [
                {name: value.clone() for name, value in optimizer.state[param].items() if name != "step"}
                for param in model.parameters()
            ]

    exact = after_three(torch.float32)
    for state, expected in zip(after_three(torch.bfloat16), exact, strict=True):
        plain = convert(state, BF16, FP32)
        # three roundings, each of at most one in 256 (to nearest) or 128 (stochastic)
        torch.testing.assert_close(plain["exp_avg"], expected["exp_avg"], rtol=3 / 256, atol=1e-4)
        torch.testing.assert_close(plain["exp_avg_sq"], expected["exp_avg_sq"], rtol=3 / 128, atol=1e-12)
    for state, expected in zip(after_three("int8"), exact, strict=True):
        plain, shape = convert(state, INT8, FP32), expected["exp_avg"].shape
        scale = state["exp_avg_scale"].repeat_interleave(256)[: shape.numel()].view(shape)
        # three roundings, each of at most one code of a scale that falls by a tenth a step at most
        assert bool(((plain["exp_avg"] - expected["exp_avg"]).abs() <= 4 * scale).all())
        # each of at most an eighth
        torch.testing.assert_close(plain["exp_avg_sq"], expected["exp_avg_sq"], rtol=3 / 8, atol=1e-14)


@pytest.mark.parametrize("state_dtype", STATE_DTYPES[1:], ids=str)
def test_training_does_not_depend_on_slots_policy_or_threads(state_dtype: torch.dtype | str) -> None:
    def final(**options: object) -> list[torch.Tensor]:
        with bf16(**options) as model:
            optimizer = streamer.AdamW(model.parameters(), lr=1e-2, state_dtype=state_dtype)
            losses(model, optimizer, range(4))
            return [*model.state_dict().values()]

    expected = final()
    for options in ({"num_slots": 1}, {"num_slots": 3, "activations": "keep"}, {"host_threads": 1}):
        assert all(torch.equal(a, b) for a, b in zip(final(**options), expected, strict=True)), options


@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
def test_the_state_travels_to_the_bit(state_dtype: torch.dtype | str) -> None:
    with bf16() as first:
        optimizer = streamer.AdamW(first.parameters(), lr=1e-2, state_dtype=state_dtype)
        losses(first, optimizer, range(3))
        # a copy of the model has the fp32 masters, of which its own state_dict has the upper half
        weights, state = copy.deepcopy(first).state_dict(), copy.deepcopy(optimizer.state_dict())
        expected = losses(first, optimizer, range(3, 6))
    with bf16() as second:
        optimizer = streamer.AdamW(second.parameters(), lr=0.5, state_dtype=state_dtype)
        losses(second, optimizer, range(7, 8))
        second.load_state_dict(weights)
        optimizer.load_state_dict(state)
        assert losses(second, optimizer, range(3, 6)) == expected


def test_state_of_another_dtype_is_refused_and_nothing_changes() -> None:
    with bf16() as model:
        saving = streamer.AdamW(model.parameters(), state_dtype="int8")
        losses(model, saving, range(2))
        saved = copy.deepcopy(saving.state_dict())
        optimizer = streamer.AdamW(model.parameters(), lr=0.25, state_dtype=torch.bfloat16)
        losses(model, optimizer, range(2))
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(ValueError, match=r"'exp_avg_sq_scale'.*use AdamW with the state_dtype"):
            optimizer.load_state_dict(saved)
        after = optimizer.state_dict()
        torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)
        assert after["param_groups"] == before["param_groups"]


def test_a_later_optimizer_may_keep_them_otherwise_and_the_first_is_told() -> None:
    with bf16() as model:
        first = streamer.AdamW(model.parameters())
        losses(model, first, range(1))
        with_fp32 = sum(streamer.stats(model).host_bytes.values())
        later = streamer.AdamW(model.parameters(), state_dtype="int8")
        numel = sum(shard.layout.state_numel for shard in wrapped(model).executor.store.shards)
        assert with_fp32 - sum(streamer.stats(model).host_bytes.values()) > 5.8 * numel
        language_loss(model, 0).backward()
        with pytest.raises(RuntimeError, match="belongs to an optimizer created later"):
            first.step()
        later.step()


@pytest.mark.parametrize("state_dtype", [torch.float16, "bf16", "fp8", 8, None], ids=str)
def test_an_unknown_state_dtype(state_dtype: object) -> None:
    unknown = pytest.raises(ValueError, match=r"state_dtype=.* is unknown: use torch.float32, torch.bfloat16")
    with bf16() as model, unknown:
        streamer.AdamW(model.parameters(), state_dtype=state_dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_short_moments_need_bf16_parameters(dtype: torch.dtype) -> None:
    with streamed(gpt(), layers="transformer.h", dtype=dtype) as model:
        before = streamer.stats(model).host_bytes
        for state_dtype in STATE_DTYPES[1:]:
            with pytest.raises(
                ValueError, match=r"'transformer.wte.weight' is torch.float.*dtype=torch.bfloat16"
            ):
                streamer.AdamW(model.parameters(), state_dtype=state_dtype)
        assert streamer.stats(model).host_bytes == before


def test_an_optimizer_that_cannot_be_made_leaves_the_one_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with bf16() as model:
        first = streamer.AdamW(model.parameters(), lr=1e-2, state_dtype="int8")
        losses(model, first, range(2))
        with monkeypatch.context() as patch:
            patch.setattr(ThreadBackend, "host_available", lambda self: 0)
            with pytest.raises(MemoryError, match="not enough memory for the moments"):
                streamer.AdamW(model.parameters())
            # in place of what is there it fits
            first = streamer.AdamW(model.parameters(), lr=1e-2, state_dtype="int8")
        losses(model, first, range(2))
        stranger = torch.nn.Parameter(torch.zeros(3))
        for groups in (
            [{"params": model.parameters()}, {"params": [stranger]}],
            [{"params": list(model.parameters())[:3]}, {"params": list(model.parameters())[3:], "lr": -1.0}],
        ):
            with pytest.raises(ValueError, match=r"belongs to no wrapped model|lr=-1.0"):
                streamer.AdamW(groups)
        streamer.synchronize(model)
        assert all(state["exp_avg"].any() for state in first.state.values())
        losses(model, first, range(2, 3))


def test_an_optimizer_cannot_be_copied_and_a_group_that_is_refused_leaves_it_as_it_was() -> None:
    with streamed(gpt(), layers="transformer.h") as model:
        params = list(model.parameters())
        optimizer = streamer.AdamW(params[:3])
        with pytest.raises(RuntimeError, match=r"cannot be copied or pickled.*save optimizer.state_dict"):
            copy.deepcopy(optimizer)
        with pytest.raises(ValueError, match="lr=-1"):
            optimizer.add_param_group({"params": params[3:], "lr": -1.0})
        assert len(optimizer.param_groups) == 1
        optimizer.add_param_group({"params": params[3:]})
        losses(model, optimizer, range(2))
