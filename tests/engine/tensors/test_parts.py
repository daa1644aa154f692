"""Parameters that are made of several tensors: what they are on another device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from streamer.quantized.parts import composite_of, remade
from tests.quantized import KINDS, quantize

pytestmark = pytest.mark.filterwarnings("ignore:.*(register_constant|Calling register_constant|cast from)")


@dataclass(frozen=True)
class About:
    dtype: torch.dtype
    device: torch.device


class Told(torch.Tensor):
    """A tensor that is on the device that its context tells, wherever its inner tensor is."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, context: Any) -> Any:
        (device,) = _devices(context)
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=device)

    def __init__(self, values: torch.Tensor, context: Any) -> None:
        self.values, self.context = values, context

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values"], self.context

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, *_: Any) -> Told:
        return Told(inner["values"], context)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{function} of a tensor that only tells what it is made of")


def _devices(context: Any) -> list[torch.device]:
    if isinstance(context, torch.device):
        return [context]
    if isinstance(context, About):
        return [context.device]
    if isinstance(context, dict):
        return _devices([*context.values()])
    return [d for each in context for d in _devices(each)] if isinstance(context, list | tuple) else []


@pytest.mark.parametrize(
    "context",
    [
        lambda device: device,
        lambda device: {"block": 64, "device": device},
        lambda device: {"about": About(torch.float32, device)},
        lambda device: [torch.float32, device],
        lambda device: (64, {"device": device}),
    ],
    ids=["itself", "dict", "dataclass", "list", "tuple"],
)
def test_a_device_that_is_told_in_a_context(context: Callable[[torch.device], Any]) -> None:
    tensor = Told(torch.zeros(3), context(torch.device("cpu")))
    made: Any = remade(tensor, [torch.empty(3, device="meta")])
    assert made.is_meta and made.context == context(torch.device("meta"))
    assert made.shape == tensor.shape


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_is_shown_on_another_device_and_back(kind: str) -> None:
    torch.manual_seed(0)
    module = quantize(nn.Linear(64, 256, bias=False), kind).requires_grad_(False)
    x = torch.randn(2, 64)
    expected = copy.deepcopy(module)(x)
    weight: Any = module.weight
    weight.of_the_user = "kept"
    composite = composite_of("weight", weight, [module])
    assert composite is not None
    kind_of_weight = type(weight)
    # as the parameters of a wrapped model are
    guarded = type("Guarded", (kind_of_weight,), {"_plain_class": kind_of_weight})
    weight.__class__ = guarded
    own = [part.detach().clone() for part in composite.parts()]
    for device in ("meta", "cpu"):
        composite.show([part.to(device) for part in own])
        assert module.weight is weight and isinstance(weight, nn.Parameter)
        assert {weight.device.type, *(part.device.type for part in composite.parts())} == {device}
        assert weight.of_the_user == "kept" and type(weight) is guarded
    weight.__class__ = kind_of_weight
    assert torch.equal(module(x), expected) and expected.any()
