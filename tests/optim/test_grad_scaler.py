"""`torch.amp.GradScaler` around a streamed model, in the loops of PyTorch's documentation."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import streamer
import streamer_native
from tests.reference import assert_trains_alike, language_loss, streamed, tiny_gpt


def scaler(init_scale: float = 2.0**10, **options: float) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=init_scale, **options)


def fp16() -> AbstractContextManager[nn.Module]:
    return streamed(tiny_gpt(), layers="transformer.h", dtype=torch.float16)


def scaled_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaling: torch.amp.GradScaler,
    steps: range,
    *,
    parts: int = 1,
    before_step: Callable[[], object] = lambda: None,
) -> list[float]:
    """The losses of PyTorch's loop, each of which goes backward in ``parts``."""
    losses = []
    for step in steps:
        for _ in range(parts):
            loss = language_loss(model, step) / parts
            scaling.scale(loss).backward()
        before_step()
        scaling.step(optimizer)
        scaling.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fp16_with_masters(steps: int, scale: float, lr: float) -> tuple[list[float], dict[str, np.ndarray]]:
    """A plain fp16 model whose fp32 masters the fp32 kernel updates from gradients divided by ``scale``."""
    model = tiny_gpt().half()
    masters = {n: p.detach().clone().numpy().ravel() for n, p in tiny_gpt().named_parameters()}
    moments = {name: np.zeros((2, master.size), np.float32) for name, master in masters.items()}
    losses, kernels = [], ThreadPoolExecutor(1)
    for step in range(1, steps + 1):
        loss = language_loss(model, step)
        (loss * scale).backward()
        losses.append(loss.item())
        for name, param in model.named_parameters():
            gradient = param.grad.float().view(-1).numpy() / np.float32(scale)
            hyper = streamer_native.Hyper(lr, 0.9, 0.999, 1e-8, 0.1, step)
            segments = [streamer_native.Segment(0, masters[name].size, hyper)]
            update = partial(streamer_native.adamw_fp32, masters[name], gradient, *moments[name], segments)
            # in a thread of its own: here it would change how many PyTorch uses, and with that last bits
            kernels.submit(update).result()
            with torch.no_grad():
                param.copy_(torch.from_numpy(masters[name]).view(param.shape))
        model.zero_grad()
    kernels.shutdown()
    return losses, masters


def test_fp16_with_a_scaler_is_fp16_with_masters_and_unscaled_gradients() -> None:
    losses, masters = fp16_with_masters(6, 2.0**10, 1e-3)
    with fp16() as model:
        optimizer = streamer.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        actual = scaled_steps(model, optimizer, scaler(), range(1, 7))
        weights = {name: value.clone() for name, value in model.state_dict().items()}
    assert actual == losses
    for name, master in masters.items():
        assert torch.equal(weights[name].view(-1), torch.from_numpy(master).half()), name


def test_a_step_that_overflows_changes_nothing_and_the_scale_backs_off() -> None:
    with fp16() as model:
        optimizer = streamer.AdamW(model.parameters(), lr=1e-2)
        scaling = scaler(2.0**24, growth_interval=1000)
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
        skipped = 0
        for step in range(40):
            scaling.scale(language_loss(model, step)).backward()
            overflows = not all(p.grad.isfinite().all() for p in model.parameters())
            scale = scaling.get_scale()
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # a scaler expects such steps: nobody is to be warned
                scaling.step(optimizer)
            scaling.update()
            optimizer.zero_grad()
            assert scaling.get_scale() == (scale / 2 if overflows else scale)
            if not overflows:
                break
            skipped += 1
            after = model.state_dict(), optimizer.state_dict()["state"]
            torch.testing.assert_close(after, before, rtol=0, atol=0)
        assert skipped > 3
        assert streamer.stats(model).skipped_steps == skipped
        assert all(state["step"] == 1 for state in optimizer.state_dict()["state"].values())
        assert not torch.equal(model.state_dict()["lm_head.weight"], before[0]["lm_head.weight"])


@pytest.mark.parametrize("unscale", [False, True])
def test_fp32_with_a_scaler_equals_the_plain_loop(unscale: bool) -> None:
    def loop(
        model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[float], object]
    ) -> list[float]:
        scaling = scaler()

        def unscale_and_clip() -> None:
            scaling.unscale_(optimizer)
            clip(0.1)

        options = {"before_step": unscale_and_clip} if unscale else {}
        return scaled_steps(model, optimizer, scaling, range(6), **options)

    options = {"layers": "transformer.h"}
    assert_trains_alike(tiny_gpt(), loop, options=options, tolerance=1e-5, lr=1e-3, eps=1e-3)


def test_accumulated_fp16_gradients_are_unscaled_too() -> None:
    """Sums in fp32: half the loss twice is the loss once."""

    def final(parts: int) -> dict[str, torch.Tensor]:
        with fp16() as model:
            optimizer = streamer.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
            scaled_steps(model, optimizer, scaler(), range(3), parts=parts)
            return {name: value.float() for name, value in model.state_dict().items()}

    once, twice = final(1), final(2)
    for name, weight in once.items():
        torch.testing.assert_close(twice[name], weight, rtol=0, atol=2e-3, msg=name)


def test_clipping_by_the_norm_that_unscaled_gradients_would_have() -> None:
    def final(scale: float) -> tuple[list[float], dict[str, torch.Tensor]]:
        norms: list[float] = []
        with fp16() as model:
            optimizer, scaling = streamer.AdamW(model.parameters(), lr=1e-2, eps=1.0), scaler(scale)

            def clip() -> None:
                norm = streamer.clip_grad_norm_(model, 0.1, grad_scale=scaling.get_scale())
                norms.append(norm.item())

            scaled_steps(model, optimizer, scaling, range(3), before_step=clip)
            return norms, {name: value.float() for name, value in model.state_dict().items()}

    norms, weights = final(2.0**6)
    other_norms, other_weights = final(2.0**12)
    assert all(norm > 0.1 for norm in norms)
    torch.testing.assert_close(norms, other_norms, rtol=1e-2, atol=0)
    for name, weight in weights.items():
        torch.testing.assert_close(other_weights[name], weight, rtol=0, atol=1e-3, msg=name)


def test_update_in_backward_refuses_a_scaler() -> None:
    with streamed(tiny_gpt(), layers="transformer.h", update="backward") as model:
        optimizer = streamer.AdamW(model.parameters())
        scaling = scaler()
        scaling.scale(language_loss(model, 0)).backward()
        with pytest.raises(RuntimeError, match=r"before GradScaler could unscale the gradients"):
            scaling.step(optimizer)


def test_a_disabled_scaler_is_not_there() -> None:
    with streamed(tiny_gpt(), layers="transformer.h") as model:
        optimizer = streamer.AdamW(model.parameters())
        scaling = torch.amp.GradScaler("cpu", enabled=False)
        scaling.scale(language_loss(model, 0)).backward()
        scaling.step(optimizer)
        scaling.update()
        language_loss(model, 1).backward()
        next(iter(model.parameters())).grad.view(-1)[0] = math.nan
        with pytest.warns(UserWarning, match="this step is skipped"):
            scaling.step(optimizer)
