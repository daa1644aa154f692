"""Weights of a tensor subclass that nobody but this file knows, on the CPU and on a GPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

import streamer
from streamer.engine.handle import wrapped

WIDTH, LAYERS = 64, 4
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, pytest.mark.cuda_api])]


class Scaled(torch.Tensor):
    """Codes of 8 bits and a scale for each row."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Scaled:
        made: Scaled = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=scale.dtype, device=codes.device, requires_grad=False
        )
        made.codes, made.scale = codes, scale
        return made

    codes: torch.Tensor
    scale: torch.Tensor

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Scaled:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes.detach(), args[0].scale.detach())
        if func is torch.ops.aten._to_copy.default:
            device = (kwargs or {}).get("device")
            return cls(args[0].codes.to(device), args[0].scale.to(device))

        def plain(value: Any) -> Any:
            return value.codes.to(value.scale.dtype) * value.scale if isinstance(value, cls) else value

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        base = nn.Linear(WIDTH, WIDTH)
        scale = base.weight.detach().abs().amax(1, keepdim=True) / 127
        codes = (base.weight.detach() / scale).round().to(torch.int8)
        base.weight = nn.Parameter(Scaled(codes, scale), requires_grad=False)
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.base(x) + self.up(self.down(x))


def model() -> nn.Module:
    """The last module is in no layer, and quantized too."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(*(Layer() for _ in range(LAYERS))), Layer())


def step(of: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> torch.Tensor:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
    loss: torch.Tensor = of(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def trained(of: nn.Module) -> list[nn.Parameter]:
    return [param for param in of.parameters() if param.requires_grad]


def updated_on_the_host(plain: nn.Module) -> torch.optim.Optimizer:
    """An AdamW that updates layers on the CPU, as those of a streamed model are: a GPU rounds otherwise."""
    on_device = trained(plain[0])  # type: ignore[index]
    on_host = [nn.Parameter(param.detach().to("cpu", copy=True)) for param in on_device]

    def take_gradients(*_: Any) -> None:
        for param, host in zip(on_device, on_host, strict=True):
            assert param.grad is not None
            host.grad, param.grad = param.grad.cpu(), None

    @torch.no_grad()
    def give_weights(*_: Any) -> None:
        for param, host in zip(on_device, on_host, strict=True):
            param.copy_(host)

    optimizer = torch.optim.AdamW([*on_host, *trained(plain[1])], lr=1e-2, foreach=False)  # type: ignore[index]
    optimizer.register_step_pre_hook(take_gradients)
    optimizer.register_step_post_hook(give_weights)
    return optimizer


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_it_is_paged_by_its_parts(device: str, activations: str) -> None:
    streamed = model()
    streamer.wrap(streamed, layers="0", device=device, num_slots=2, activations=activations)
    executor = wrapped(streamed).executor
    optimizer = streamer.AdamW(trained(streamed), lr=1e-2)
    for _ in range(3):
        step(streamed, optimizer, device)
    streamer.synchronize(streamed)
    # codes, scales, the bias of the base, and the adapters, each at a multiple of 64 bytes or of 32 elements
    of_layer = WIDTH * WIDTH + 4 * (WIDTH + WIDTH + 2 * 4 * WIDTH)
    assert executor.units[0].layout.nbytes == of_layer
    assert streamer.stats(streamed).device_bytes["weight slots"] == 2 * of_layer
    # the user's parameters are the same objects, in host memory, and those of the root on the device
    for layer, where in ((streamed[0][1], "cpu"), (streamed[1], device)):  # type: ignore[index]
        weight = layer.base.weight
        assert weight.device.type == where
        assert (weight.codes.device.type, weight.codes.dtype) == (where, torch.int8)
    streamer.unwrap(streamed)
    assert type(streamed[1].base.weight) is Scaled  # type: ignore[union-attr]
    assert streamed[1].base.weight.device.type == "cpu"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, pytest.mark.cuda_values])]
)
@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_it_learns_as_without_streaming(device: str, activations: str) -> None:
    plain, streamed = model().to(device), model()
    assert type(plain[1].base.weight) is Scaled  # type: ignore[union-attr]
    streamer.wrap(streamed, layers="0", device=device, num_slots=2, activations=activations)
    expected = updated_on_the_host(plain)
    optimizer = torch.optim.AdamW(trained(streamed), lr=1e-2, foreach=False)
    for _ in range(3):
        assert torch.equal(step(streamed, optimizer, device), step(plain, expected, device))
    copied = copy.deepcopy(streamed)
    streamer.unwrap(streamed)
    for one, other, third in zip(plain.parameters(), streamed.parameters(), copied.parameters(), strict=True):
        for part in ("codes", "scale") if type(other) is Scaled else ("data",):
            assert torch.equal(getattr(one, part).cpu(), getattr(other, part).cpu())
            assert torch.equal(getattr(one, part).cpu(), getattr(third, part).cpu())
