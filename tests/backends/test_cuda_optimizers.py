"""On a GPU: optimizers of PyTorch update masters on the host, and the device gets the new weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import streamer
from streamer.backends.base import Lane
from tests.backends.test_cuda import SlowLane, gpt, loss_of
from tests.optim.masters import assert_same_state, master, masters, rounded
from tests.optim.optimizers import Sum
from tests.reference import streamed

pytestmark = [pytest.mark.cuda, pytest.mark.cuda_api]
OPTIMIZERS: dict[str, Any] = {
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.9),
    "Lion": partial(streamer.Lion, lr=1e-3),
    "Sum": partial(Sum, lr=1e-3),
}


@pytest.mark.parametrize("lane", [Lane.D2H, Lane.HOST], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_masters_of_layers_and_of_the_rest(name: str, lane: Lane) -> None:
    with streamed(gpt(), dtype=torch.bfloat16, backend=SlowLane(lane)) as model:
        params = [*model.parameters()]
        copies = masters(params)
        mine, plain = OPTIMIZERS[name](params), OPTIMIZERS[name](copies)
        for step in range(3):
            loss_of(model, step).backward()
            for number, param in enumerate(params):
                if param.grad is not None:  # numbers of which no kernel of a device is asked
                    values = torch.randn(param.shape, generator=torch.Generator().manual_seed(number))
                    param.grad = values.to(param.grad.device, torch.bfloat16)
            on_host = [param.grad.cpu() for param in params]
            for copy, grad in zip(copies, on_host, strict=True):
                copy.grad = grad.float()
            mine.step()
            plain.step()
            model.zero_grad()
        assert_same_state(mine, plain)
        streamer.synchronize(model)
        for param in params:
            assert torch.equal(param.detach().cpu(), rounded(master(param)))
