"""The kernels of SGD with momentum and of Lion take PyTorch's steps to the bit, those of RMSprop and Adagrad
nearly so, on every kind of master."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import streamer_native as native
from streamer.optim.lion import Lion

SIZE = 2 * native.BLOCK + 77


def gradient(step: int) -> torch.Tensor:
    """Values that bf16 and fp16 hold, some of them zero."""
    drawn = torch.randn(SIZE, generator=torch.Generator().manual_seed(step)).bfloat16().half()
    return drawn.masked_fill(drawn.abs() < 0.1, 0.0).bfloat16().float()


class Layout:
    """A master as the kernels hold it, next to its weight."""

    def __init__(self, dtype: torch.dtype, values: torch.Tensor) -> None:
        self.dtype = dtype
        self.momentum = np.zeros(SIZE, np.float32)
        if dtype == torch.bfloat16:
            self.weight, self.master_data = np.zeros(SIZE, np.uint16), np.zeros(SIZE, np.uint16)
            native.split(values.numpy(), self.weight, self.master_data)
        elif dtype == torch.float16:
            self.weight, self.master_data = values.half().numpy(), values.numpy().copy()
        else:
            self.weight, self.master_data = values.numpy().copy(), None

    def arrays(self, step: int) -> tuple[Any, ...]:
        grad = gradient(step).to(self.dtype)
        bits = grad.view(torch.uint16) if self.dtype == torch.bfloat16 else grad
        return self.weight, self.master_data, bits.numpy(), self.momentum

    def master(self) -> np.ndarray:
        if self.dtype != torch.bfloat16:
            return self.weight if self.master_data is None else self.master_data
        master = np.zeros(SIZE, np.float32)
        native.join(self.weight, self.master_data, master)
        return master


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.1}, {"nesterov": True, "weight_decay": 0.1}, {"dampening": 0.5}],
    ids=["plain", "decay", "nesterov", "dampening"],
)
def test_sgd(options: dict[str, Any], dtype: torch.dtype) -> None:
    param = nn.Parameter(torch.randn(SIZE, generator=torch.Generator().manual_seed(9)))
    layout = Layout(dtype, param.detach().clone())
    plain = torch.optim.SGD([param], lr=0.1, momentum=0.9, **options)
    for step in range(4):
        param.grad = gradient(step) * 0.5
        plain.step()
        native.sgd(
            *layout.arrays(step),
            lr=0.1,
            weight_decay=options.get("weight_decay", 0.0),
            decay=0.9,
            gain=1 - options.get("dampening", 0.0) if step else 1.0,
            nesterov=options.get("nesterov", False),
            grad_scale=0.5,
        )
    assert np.array_equal(layout.master(), param.detach().numpy())
    assert np.array_equal(layout.momentum, plain.state[param]["momentum_buffer"].numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lion(dtype: torch.dtype) -> None:
    param = nn.Parameter(torch.randn(SIZE, generator=torch.Generator().manual_seed(9)))
    layout = Layout(dtype, param.detach().clone())
    plain = Lion([param], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(4):
        param.grad = gradient(step) * 0.5
        plain.step()
        native.lion(*layout.arrays(step), lr=1e-3, weight_decay=0.1, beta1=0.9, beta2=0.95, grad_scale=0.5)
    assert np.array_equal(layout.master(), param.detach().numpy())
    assert np.array_equal(layout.momentum, plain.state[param]["exp_avg"].numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.Adagrad])
def test_rms(kind: type[torch.optim.Optimizer], weight_decay: float, dtype: torch.dtype) -> None:
    param = nn.Parameter(torch.randn(SIZE, generator=torch.Generator().manual_seed(9)))
    layout = Layout(dtype, param.detach().clone())
    plain = kind([param], lr=1e-2, eps=1e-6, weight_decay=weight_decay)  # type: ignore[call-arg]
    decay, gain = (0.99, 1 - 0.99) if kind is torch.optim.RMSprop else (1.0, 1.0)
    for step in range(4):
        param.grad = gradient(step) * 0.5
        plain.step()
        options = {"lr": 1e-2, "weight_decay": weight_decay, "decay": decay, "gain": gain}
        native.rms(*layout.arrays(step), **options, eps=1e-6, grad_scale=0.5)
    # PyTorch does not round square roots correctly
    np.testing.assert_allclose(layout.master(), param.detach().numpy(), rtol=1e-6, atol=1e-8)
    squares = plain.state[param]["square_avg" if kind is torch.optim.RMSprop else "sum"]
    np.testing.assert_allclose(layout.momentum, squares.numpy(), rtol=1e-6 if weight_decay else 0)


def test_a_gradient_that_is_not_finite_reaches_the_master() -> None:
    for kernel in (
        lambda *arrays: native.lion(*arrays, lr=0.1, weight_decay=0.1, beta1=0.9, beta2=0.9),
        lambda *arrays: native.sgd(*arrays, lr=0.1, weight_decay=0.1, decay=0.9, gain=1.0, nesterov=False),
    ):
        layout = Layout(torch.bfloat16, torch.ones(SIZE))
        weight, master_data, grad, momentum = layout.arrays(0)
        grad = grad.copy()
        grad[3] = 0x7FC0
        kernel(weight, master_data, grad, momentum)
        assert np.isnan(layout.master()[3]) and np.isfinite(layout.master()[4:]).all()


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("weight", np.zeros(SIZE, np.int32)),
        ("remainder", np.zeros(SIZE, np.float32)),
        ("grad", np.zeros(SIZE - 1, np.uint16)),
        ("momentum", np.zeros((SIZE, 1), np.float32)),
    ],
)
def test_arrays_that_do_not_fit_are_refused(name: str, array: np.ndarray) -> None:
    arrays = dict(
        zip(
            ("weight", "remainder", "grad", "momentum"),
            Layout(torch.bfloat16, torch.ones(SIZE)).arrays(0),
            strict=True,
        )
    )
    with pytest.raises(ValueError, match=name):
        native.lion(*(arrays | {name: array}).values(), lr=0.1, weight_decay=0.1, beta1=0.9, beta2=0.9)


def test_widening_a_gradient() -> None:
    source, into = gradient(0).bfloat16(), np.zeros(SIZE, np.float32)
    native.widen(source.view(torch.uint16).numpy(), into, 0.3)
    assert np.array_equal(into, (source.float() * np.float32(0.3)).numpy())
