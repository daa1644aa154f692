"""On a GPU: sums of gradients, short moments, updates in backward, and GradScaler, whatever lane is late."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import streamer
from streamer.backends.base import Lane
from tests.backends.test_cuda import (
    MILLISECOND,
    SETTINGS,
    STEPS,
    SlowLane,
    attention_without_atomics,  # noqa: F401 - a fixture that every test of this file uses
    gpt,
    loss_of,
    on_cpu,
)
from tests.reference import assert_same, gradients, in_turn, streamed, train

LANES = [None, Lane.H2D, Lane.D2H, Lane.HOST, Lane.COMPUTE]


def slow(lane: Lane | None) -> dict[str, Any]:
    return {"device": "cuda"} if lane is None else {"backend": SlowLane(lane)}


@cache
def singles() -> list[dict[str, torch.Tensor]]:
    """The gradients of three backward calls of a plain bf16 model, each alone."""
    model, result = untied().cuda().bfloat16(), []
    for step in range(3):
        torch.manual_seed(step)
        loss_of(model, step).backward()
        result.append(gradients(model))
        model.zero_grad()
    return result


def untied() -> nn.Module:
    """Tied, the two uses of one weight are added before they reach its gradient, in a dtype that varies."""
    model = copy.deepcopy(gpt())
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


@pytest.mark.cuda_values
@pytest.mark.parametrize("lane", LANES, ids=str)
def test_gradients_are_summed_in_fp32(lane: Lane | None) -> None:
    with streamed(untied(), dtype=torch.bfloat16, **slow(lane)) as model:
        for repetition in range(2):  # the second time into places that the first has used
            for step in range(3):
                torch.manual_seed(step)
                loss_of(model, step).backward()
            actual = gradients(model)
            norm = streamer.clip_grad_norm_(model, float("inf"))
            for name, total in actual.items():
                a, b, c = (single[name].float() for single in singles())
                assert torch.equal(total, a + b + c), (repetition, name)
            expected = torch.nn.utils.get_total_norm(list(actual.values()))
            torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
            streamer.AdamW(model.parameters(), lr=0.0, weight_decay=0.0).step()
            model.zero_grad()


def run(lane: Lane | None, *, state_dtype: Any = torch.float32, **options: Any) -> Any:
    with streamed(gpt(), **slow(lane), **options) as model:
        optimizer = streamer.AdamW(model.parameters(), **SETTINGS, state_dtype=state_dtype)
        history = on_cpu(train(model, optimizer, None, steps=STEPS, loss_of=loss_of))
    history.first_gradients = {}  # update="backward" shows none
    return history


@pytest.mark.cuda_values
@pytest.mark.parametrize(("lane", "activations"), in_turn(LANES, ["recompute", "keep"]), ids=str)
def test_updates_in_backward_equal_those_in_step(lane: Lane | None, activations: str) -> None:
    actual = run(lane, update="backward", activations=activations)
    assert_same(actual, run(None, activations=activations))


@pytest.mark.cuda_values
@pytest.mark.parametrize("state_dtype", [torch.bfloat16, "int8"], ids=str)
@pytest.mark.parametrize("lane", [Lane.H2D, Lane.D2H, Lane.HOST], ids=str)
def test_short_moments_do_not_depend_on_timing(lane: Lane, state_dtype: Any) -> None:
    options = {"dtype": torch.bfloat16, "state_dtype": state_dtype}
    assert_same(run(lane, **options), run(None, **options))


@pytest.mark.cuda_values
@pytest.mark.parametrize("unscale", [False, True])
def test_a_scaler_in_fp32_equals_no_scaler(unscale: bool) -> None:
    """A scale that is a power of two changes no bit of what is added up in fp32 and divided by it again."""

    def losses(scaled: bool) -> list[float]:
        with streamed(gpt(), device="cuda") as model:
            optimizer, result = streamer.AdamW(model.parameters(), **SETTINGS), []
            scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, enabled=scaled)
            for step in range(STEPS):
                torch.manual_seed(step)
                loss = loss_of(model, step)
                scaler.scale(loss).backward()
                if unscale:
                    scaler.unscale_(optimizer)
                    streamer.clip_grad_norm_(model, 0.5)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                result.append(loss.item())
            return result

    torch.testing.assert_close(losses(True), losses(False), rtol=1e-6, atol=0)


@pytest.mark.cuda_values
def test_an_fp16_step_that_overflows_changes_nothing() -> None:
    with streamed(gpt(), device="cuda", dtype=torch.float16) as model:
        optimizer = streamer.AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24, growth_interval=1000)
        before, skipped = copy.deepcopy(model.state_dict()), 0
        for step in range(40):
            scaler.scale(loss_of(model, step)).backward()
            overflows = not all(p.grad.isfinite().all().item() for p in model.parameters())
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert scaler.get_scale() == (scale / 2 if overflows else scale)
            if not overflows:
                break
            skipped += 1
            torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        assert skipped == streamer.stats(model).skipped_steps > 3
        assert not torch.equal(model.state_dict()["lm_head.weight"], before["lm_head.weight"])


@pytest.mark.cuda_api
def test_what_a_gradscaler_copies_to_the_host_is_there_before_it_is_read() -> None:
    with streamed(gpt(), device="cuda") as model:
        optimizer = streamer.AdamW(model.parameters())
        for step in range(2):
            loss_of(model, step).backward()
            on_host = [p.grad for p in model.transformer.h.parameters()]
            for gradient in on_host:
                gradient.fill_(1.0)
            found_inf, scale = torch.tensor(0.0).cuda(), torch.tensor(0.25).cuda()
            torch.cuda._sleep(20 * MILLISECOND)
            # as torch.amp.grad_scaler._MultiDeviceReplicator does
            copies = [number.to("cpu", non_blocking=True, copy=True) for number in (found_inf, scale)]
            torch._amp_foreach_non_finite_check_and_unscale_(on_host, *copies)
            assert all(torch.equal(gradient, torch.full_like(gradient, 0.25)) for gradient in on_host)
            optimizer.zero_grad()


@pytest.mark.cuda_api
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
def test_a_fused_optimizer_skips_the_step_in_which_a_gradscaler_has_found_infinity(kind: Any) -> None:
    with streamed(gpt(), device="cuda") as model:
        layers = list(model.transformer.h.parameters())
        optimizer = kind(layers, lr=0.1, fused=True)
        optimizer.grad_scale, found = torch.tensor(1.0).cuda(), torch.tensor(1.0).cuda()
        for step in range(2):
            loss_of(model, step).backward()
            for param in layers:
                param.grad.fill_(1.0)
            before = [param.detach().clone() for param in layers]
            # what PyTorch then takes for its copies
            zeros = [torch.zeros(1).pin_memory() for _ in range(100)]
            del zeros
            optimizer.found_inf = torch.zeros_like(found)
            torch.cuda._sleep(300 * MILLISECOND)
            optimizer.found_inf.copy_(found)
            optimizer.step()
            assert all(map(torch.equal, layers, before))
            optimizer.zero_grad()


@pytest.mark.cuda_api
def test_bytes_on_the_device_while_gradients_are_summed() -> None:
    with streamed(untied(), device="cuda", dtype=torch.bfloat16) as model:
        streamer.AdamW(model.parameters())
        for step in range(2):
            loss_of(model, step).backward()
        torch.cuda.synchronize()
        stats = streamer.stats(model)
        root = sum(p.numel() for name, p in model.named_parameters() if ".h." not in name)
        # beside its bf16 gradients the root has fp32 sums; that of a layer is on the host
        assert stats.device_bytes["root gradients"] >= (2 + 4) * root
        assert stats.host_bytes["gradient sums"] >= 4 * sum(p.numel() for p in model.parameters())
