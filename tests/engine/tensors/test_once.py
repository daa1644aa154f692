"""What is made of quantized weights once in a visit: when it is kept, and when it is made anew."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from streamer import bitsandbytes_private
from streamer.bitsandbytes_private import dequantizes
from streamer.engine.tensors.once import Made, codes
from streamer.engine.tensors.parts import composite_of
from tests.quantized import quantize

pytestmark = pytest.mark.filterwarnings("ignore:.*(register_constant|Calling register_constant|cast from)")


def counted(make: Callable[[], torch.Tensor]) -> tuple[Callable[[], torch.Tensor], list[None]]:
    calls: list[None] = []

    def counting() -> torch.Tensor:
        calls.append(None)
        return make()

    return counting, calls


def test_what_is_made_is_kept_from_the_beginning_of_a_visit_to_its_end() -> None:
    made = Made()
    make, calls = counted(lambda: torch.ones(2))
    assert made.once("key", make) is not made.once("key", make)
    assert len(calls) == 2
    for _ in range(2):
        made.begin()
        calls.clear()
        assert made.once("key", make) is made.once("key", make)
        made.once("other", make)
        assert len(calls) == 2
        made.end()
    assert not made.is_kept


def test_what_is_made_on_the_way_is_not_kept() -> None:
    made = Made()
    made.begin()
    part, calls = counted(lambda: torch.ones(2))
    made.once("whole", lambda: made.once("part", part) * 2)
    made.once("part", part)
    assert len(calls) == 2


def test_what_somebody_has_written_is_made_anew() -> None:
    made = Made()
    made.begin()
    made.once("key", lambda: torch.ones(2)).mul_(3)
    assert made.once("key", lambda: torch.ones(2)).tolist() == [1, 1]


@pytest.mark.parametrize(
    "make",
    [lambda: torch.ones(2, requires_grad=True) * 2, torch.inference_mode()(lambda: torch.ones(2))],
    ids=["in a graph", "of inference"],
)
def test_what_belongs_to_a_graph_or_to_inference_is_not_kept(make: Callable[[], torch.Tensor]) -> None:
    made = Made()
    made.begin()
    assert made.once("key", make) is not made.once("key", make)


def int8(made: Made, **options: bool) -> Any:
    return codes(torch.arange(-4, 4, dtype=torch.int8).view(4, 2), made, **options)


def test_codes_are_cast_once_for_each_dtype_and_view() -> None:
    made = Made()
    weight, expected = int8(made), torch.arange(-4.0, 4).view(4, 2)
    assert weight.to(torch.float32) is not weight.to(torch.float32)
    made.begin()
    turned = weight.t()
    assert weight.to(torch.float32) is weight.to(dtype=torch.float32)
    assert turned.to(torch.float32) is turned.to(torch.float32) is not weight.to(torch.float32)
    assert torch.equal(weight.to(torch.float32), expected)
    assert torch.equal(turned.to(torch.float32), expected.t())
    for part in (slice(0, 2), slice(2, 4)):
        assert torch.equal(weight[part].to(torch.float32), expected[part])
    assert weight.to(torch.bfloat16).dtype == torch.bfloat16
    # what is computed of codes is plain
    assert type(weight + 1) is type(weight.to(torch.int16)) is type(weight.to(torch.float32)) is torch.Tensor


@pytest.mark.parametrize(
    ("kind", "views"),
    [("torchao float8", [lambda w: w.t()]), ("torchao int8", [])],
)
def test_a_weight_and_its_transpose_are_dequantized_once_each(
    kind: str, views: list[Callable[[Any], Any]]
) -> None:
    plain: Any = quantize(nn.Linear(64, 64, bias=False), kind).weight
    composite = composite_of("weight", plain, ())
    assert composite is not None
    composite.made.begin()
    weight: Any = composite.like(composite.parts())
    for view in (lambda w: w, *views):
        assert view(weight).dequantize() is view(weight).dequantize()
        assert torch.equal(view(weight).dequantize(), view(plain).dequantize())
    assert weight.dequantize(torch.bfloat16).dtype == torch.bfloat16
    if kind == "torchao int8":  # the library asks for the class
        assert torch.equal(weight[32:].dequantize(), plain[32:].dequantize())
    kept = weakref.ref(weight)
    del weight, view
    assert kept() is None, "nothing but the garbage collector frees it"


def test_four_bits_are_dequantized_once_for_each_dtype() -> None:
    import bitsandbytes as bnb

    plain: Any = quantize(nn.Linear(64, 64, bias=False), "bitsandbytes nf4").weight
    composite = composite_of("weight", plain, ())
    assert composite is not None
    composite.made.begin()
    weight: Any = composite.like(composite.parts())
    for dtype in (torch.float32, torch.bfloat16):
        plain.quant_state.dtype = weight.quant_state.dtype = dtype
        found = bnb.functional.dequantize_4bit(weight, weight.quant_state)
        assert found is bnb.functional.dequantize_4bit(weight, weight.quant_state)
        assert torch.equal(found, bnb.functional.dequantize_4bit(plain.data, plain.quant_state))


def test_codes_that_are_scaled_in_place() -> None:
    made = Made()
    weight, scales = int8(made, are_scaled_in_place=True), torch.arange(1.0, 5).unsqueeze(1)
    expected = torch.arange(-4.0, 4).view(4, 2)
    made.begin()
    first = weight.to(torch.float32).mul_(scales)
    assert torch.equal(first, expected * scales)
    assert weight.data.to(torch.float32, copy=True).mul_(scales) is first
    # anything else has the codes themselves
    assert torch.equal(weight.to(torch.float32) * 2, expected * 2)
    assert torch.equal(torch.cat([weight.to(torch.float32), scales.expand(4, 2)])[:4], expected)
    assert weight.to(torch.float32).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("many", "wide", "answer"),
    [(2048, 64, True), (1024, 64, True), (8, 64, False), (1024, 96, False), (2048, 96, True)],
)
def test_few_rows_on_a_gpu_are_left_to_the_kernel_that_multiplies_with_codes(
    many: int, wide: int, answer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As bitsandbytes chooses, whose own functions are asked."""
    pytest.importorskip("bitsandbytes")
    asked: list[tuple[object, ...]] = []

    def prefers_codes(*of: object) -> bool:
        asked.append(of)
        return of[2] == 8

    own = SimpleNamespace(_gemm_4bit_custom_max_m=1536, _gemm_4bit_use_custom_fn=prefers_codes)
    monkeypatch.setitem(sys.modules, "bitsandbytes.backends.cuda.ops", own)
    device = SimpleNamespace(type="cuda", index=1)
    rows: Any = SimpleNamespace(
        device=device, shape=(many, wide), numel=lambda: many * wide, dtype=torch.bfloat16
    )
    nothing: Any = None
    assert dequantizes(rows, nothing, (32, wide), nothing, 64) is answer
    assert all(of == (1, torch.bfloat16, many, 32, wide) for of in asked)
    del own._gemm_4bit_use_custom_fn
    assert not dequantizes(rows, nothing, (32, wide), nothing, 64)


def test_a_product_that_is_given_something_else_is_left_to_its_library(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("bitsandbytes")
    request.addfinalizer(bitsandbytes_private._is_as_known.cache_clear)
    given = torch.ones(2, 64), torch.ones(4), (32, 64), torch.ones(1), 64, "nf4"
    assert dequantizes(*given)
    monkeypatch.setattr(bitsandbytes_private, "_GIVEN", [*bitsandbytes_private._GIVEN, "another"])
    bitsandbytes_private._is_as_known.cache_clear()
    assert not dequantizes(*given)
