"""What the user keeps of a gradient, or of its memory, when the gradient is dropped and others come; and of
the memory of a moment."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import streamer
from streamer.backends.base import Lane
from streamer.backends.thread import ThreadBackend
from streamer.engine.handle import wrapped
from tests.reference import assert_trains_alike, language_loss, one_step, streamed, tiny_gpt

KEEP: dict[str, Callable[[Any], Any]] = {
    "itself": lambda grad: grad,
    "a view of a view": lambda grad: grad.detach().view(-1)[1:],
    "data": lambda grad: grad.data,
    "NumPy": lambda grad: torch.from_numpy(grad.numpy()),
}


gpt = partial(tiny_gpt, width=16)


def late() -> dict[str, Any]:
    """Each update begins so late that who does not wait for it writes what it reads."""
    return {"backend": ThreadBackend(delays={Lane.HOST: lambda: 0.005}, poison=True)}


@pytest.mark.parametrize("keep", KEEP.values(), ids=[*KEEP])
def test_it_keeps_its_values(keep: Callable[[Any], Any]) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[float], object]) -> Any:
        kept = []
        for step in range(4):
            language_loss(model, step).backward()
            # of some layers, and only at some steps
            for layer in model.transformer.h[: 2 - step % 2]:
                kept += [keep(param.grad) for param in layer.parameters()]
            clip(1e-2)
            optimizer.step()
            kept += [keep(param.grad) for param in model.parameters()]
            optimizer.zero_grad()
        return kept

    assert_trains_alike(gpt(), loop, options=late(), lr=1e-2, eps=1.0)


@pytest.mark.parametrize("keep", [KEEP["a view of a view"], KEEP["NumPy"]])
def test_a_sum_keeps_its_values(keep: Callable[[Any], Any]) -> None:
    with streamed(gpt(), dtype=torch.bfloat16) as model:
        optimizer = streamer.AdamW(model.parameters())
        kept, expected = [], []
        for step in range(3):
            for part in range(3):
                language_loss(model, 3 * step + part).backward()
            kept += [keep(param.grad) for param in model.parameters()]
            expected += [keep(param.grad.clone()) for param in model.parameters()]
            optimizer.zero_grad()
        streamer.synchronize(model)
        assert {each.dtype for each in kept} == {torch.float32}
        assert all(map(torch.equal, kept, expected))


@pytest.mark.parametrize("keep", KEEP.values(), ids=[*KEEP])
def test_it_follows_a_gradient_that_is_not_dropped(keep: Callable[[Any], Any]) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[float], object]) -> Any:
        one_step(model, optimizer, 0)
        optimizer.zero_grad()
        language_loss(model, 0).backward()
        params = list(model.transformer.h.parameters())
        kept, found = [keep(param.grad) for param in params], []
        for step in range(1, 4):
            optimizer.step()
            with torch.no_grad():
                for each in kept:  # while the update may be reading it
                    each.mul_(step % 2)
            language_loss(model, step).backward()
            clip(1e-2)
            found += [each.clone() for each in kept]
        return found

    assert_trains_alike(gpt(), loop, options=late(), lr=1e-2, eps=1.0)


def test_a_gradient_that_cannot_have_other_memory_is_refused() -> None:
    with streamed(gpt()) as model:
        language_loss(model, 0).backward()
        layer = model.transformer.h[1]
        kept = [param.grad.detach() for param in layer.mlp.parameters()]
        layer.mlp.zero_grad()
        with pytest.raises(RuntimeError, match=r"'transformer\.h\.1' share their memory .* keep copies"):
            language_loss(model, 1).backward()
        model.zero_grad()
        before = [each.clone() for each in kept]
        language_loss(model, 1).backward()
        assert all(map(torch.equal, kept, before))


def test_memory_that_is_kept_counts_and_is_warned_of() -> None:
    """A part of one gradient holds the memory of its layer's."""
    with streamed(gpt()) as model:
        executor = wrapped(model).executor
        optimizer = streamer.AdamW(model.parameters())
        one_step(model, optimizer, 0)
        alone, of_layer = executor.host.bytes(), executor.units[1].layout.grad_nbytes

        def keep(steps: int) -> list[torch.Tensor]:
            kept = []
            for step in range(steps):
                language_loss(model, step).backward()
                kept.append(model.transformer.h[1].ln_1.weight.grad.detach().cpu())
                optimizer.step()
                optimizer.zero_grad()
            return kept

        kept = keep(4)
        assert executor.host.bytes()["gradients"] == alone["gradients"] + 3 * of_layer
        del kept
        one_step(model, optimizer, 0)
        assert executor.host.bytes() == alone
        with pytest.warns(UserWarning, match=r"of .transformer\.h\.1. step after step .*keep copies"):
            keep(6)


def test_memory_that_is_kept_is_refused_where_there_is_none_left() -> None:
    with streamed(gpt()) as model:
        streamer.AdamW(model.parameters())
        limit = sum(wrapped(model).executor.host.bytes().values()) + 1000
    with streamed(gpt(), host_memory=limit) as model:
        optimizer = streamer.AdamW(model.parameters())
        language_loss(model, 0).backward()
        kept = model.transformer.h[1].ln_1.weight.grad.detach()
        optimizer.zero_grad()
        with pytest.raises(MemoryError, match=r"kept gradients of 'transformer\.h\.1'.*\.clone"):
            language_loss(model, 1).backward()
        del kept
        optimizer.zero_grad()
        one_step(model, optimizer, 1)


@pytest.mark.parametrize("keep", [KEEP["data"], KEEP["NumPy"]])
def test_the_memory_of_a_moment_shows_each_step_and_what_is_written_to_it_counts(
    keep: Callable[[Any], Any],
) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[float], object]) -> Any:
        found = []
        for step in range(4):
            language_loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                states = [optimizer.state[param] for param in model.parameters()]
                kept = [keep(state[name]) for state in states for name in ("exp_avg", "exp_avg_sq")]
            found += [each.clone() for each in kept]
            for each in kept:
                each.mul_(0.5)
        return found

    assert_trains_alike(gpt(), loop, options=late(), lr=1e-2, eps=1.0)
