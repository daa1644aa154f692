"""`streamer.Muon` and `streamer.Lion`, beside other implementations."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import streamer
from tests.optim.masters import master, masters, take_gradients
from tests.reference import language_loss, streamed, tiny_gpt


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_takes_the_steps_of_two_optimizers(dtype: torch.dtype) -> None:
    """Those of torch.optim.Muon on the matrices of layers, of AdamW on all else."""
    with streamed(tiny_gpt(layers=2), layers="transformer.h", dtype=dtype) as model:
        params = [*model.parameters()]
        in_layers = {*map(id, model.transformer.h.parameters())}
        hidden = [param.dim() == 2 and id(param) in in_layers for param in params]
        copies = masters(params)
        mine = streamer.Muon(params, lr=1e-2, weight_decay=0.1)
        muon = torch.optim.Muon(
            [copy for copy, is_hidden in zip(copies, hidden, strict=True) if is_hidden],
            lr=1e-2,
            weight_decay=0.1,
            adjust_lr_fn="match_rms_adamw",
        )
        rest = [copy for copy, is_hidden in zip(copies, hidden, strict=True) if not is_hidden]
        adamw = torch.optim.AdamW(rest, lr=1e-2, weight_decay=0.1)
        for step in range(4):
            language_loss(model, step).backward()
            take_gradients(copies, params)
            for optimizer in (mine, muon, adamw):
                optimizer.step()
            mine.zero_grad()
        for param, copy in zip(params, copies, strict=True):
            torch.testing.assert_close(master(param), copy.detach(), rtol=1e-5, atol=1e-6)


def test_a_group_says_which_parameters_are_muons() -> None:
    matrix, vector = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(3))
    optimizer = streamer.Muon([{"params": [matrix], "use_muon": True}, {"params": [vector], "lr": 1e-2}])
    assert [group["use_muon"] for group in optimizer.param_groups] == [True, False]
    with pytest.raises(ValueError, match="use_muon=True has a parameter that is not a matrix"):
        streamer.Muon([{"params": [vector], "use_muon": True}])


def test_lion_is_its_formula() -> None:
    """In float64, from the paper: the sign of a mix of momentum and gradient."""
    param = nn.Parameter(torch.linspace(-1, 1, 20))
    optimizer = streamer.Lion([param], lr=1e-2, betas=(0.9, 0.99), weight_decay=0.5)
    weight, momentum = param.detach().double(), torch.zeros(20, dtype=torch.float64)
    for step in range(5):
        grad = torch.randn(20, generator=torch.Generator().manual_seed(step))
        param.grad = grad.clone()
        optimizer.step()
        sign = torch.sign(0.9 * momentum + 0.1 * grad.double())
        weight = weight - 1e-2 * (sign + 0.5 * weight)
        momentum = 0.99 * momentum + 0.01 * grad.double()
    torch.testing.assert_close(param.detach().double(), weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("options", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"weight_decay": -0.1}])
def test_lion_refuses_what_is_out_of_range(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="lr and weight_decay are 0 or more"):
        streamer.Lion([nn.Parameter(torch.ones(1))], **options)  # type: ignore[arg-type]
