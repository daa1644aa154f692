"""Parameters that are made of several tensors: what they are on another device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from streamer.quantized.parts import composite_of
from tests.quantized import KINDS, quantize

pytestmark = pytest.mark.filterwarnings("ignore:.*(register_constant|Calling register_constant|cast from)")


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
        composite.set_parts([part.to(device) for part in own])
        assert module.weight is weight and isinstance(weight, nn.Parameter)
        assert {weight.device.type, *(part.device.type for part in composite.parts())} == {device}
        assert weight.of_the_user == "kept" and type(weight) is guarded
    weight.__class__ = kind_of_weight
    assert torch.equal(module(x), expected) and expected.any()
