"""Where parameters lie in a unit's buffers."""

from __future__ import annotations

import torch
from torch import nn

from streamer.engine.schedule.op import ROOT
from streamer.model.units import make_units
from streamer.store.layout import ALIGN, Layout, Param, Slice, Stretch

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def param(name: str, shape: tuple[int, ...], dtype: torch.dtype = FP32, *, trainable: bool = True) -> Param:
    return Param(name, shape, dtype, trainable)


MIXED = (
    param("a", (3, 5), FP16),
    param("frozen", (7,), FP32, trainable=False),
    param("b", (33,), FP32),
    param("scalar", (), BF16),
    param("empty", (0, 4), FP32),
    param("frozen too", (2, 2), BF16, trainable=False),
    param("c", (64,), FP32),
)


def test_places() -> None:
    layout = Layout.of([param("weight", (4, 5)), param("bias", (40,))])
    assert layout == Layout(
        slices=(
            Slice(FP32, offset=0, index=0, numel=20, param=param("weight", (4, 5)), block=0),
            Slice(FP32, offset=32 * 4, index=32, numel=40, param=param("bias", (40,)), block=1),
        ),
        nbytes=(32 + 64) * 4,
        grad_nbytes=(32 + 64) * 4,
        state_numel=32 + 64,
        state_blocks=2,
    )
    assert layout.numel == 60


def test_trainable_parameters_come_first_and_their_gradients_and_state_are_a_prefix() -> None:
    layout = Layout.of(MIXED)
    names = [slice.param.name for slice in layout.slices]
    assert names == ["a", "b", "scalar", "empty", "c", "frozen", "frozen too"]
    assert [slice.param.name for slice in layout.trainable] == names[:5]
    # a 32 fp16, b 64 fp32 (from 128 on), scalar 32 bf16, c 64 fp32 (from 512 on)
    assert [slice.offset for slice in layout.slices] == [0, 128, 384, 512, 512, 768, 896]
    assert all(slice.offset % (ALIGN * slice.param.dtype.itemsize) == 0 for slice in layout.slices)
    assert layout.grad_nbytes == 512 + 64 * 4
    assert layout.state_numel == 32 + 64 + 32 + 0 + 64
    assert layout.nbytes == 896 + 32 * 2
    assert [slice.index for slice in layout.trainable] == [0, 32, 96, 128, 128]


def test_nothing_trainable_or_nothing_at_all() -> None:
    layout = Layout.of([param("weight", (3,), trainable=False)])
    assert (layout.grad_nbytes, layout.state_numel, layout.nbytes) == (0, 0, 128)
    assert layout.trainable == ()
    assert Layout.of([]) == Layout((), 0, 0, 0, 0)


def test_stretches_hold_what_is_used_and_no_padding() -> None:
    layout = Layout.of([*(param(name, (64,)) for name in "abc"), param("d", (5,)), param("e", (32,), BF16)])
    a, _, c, _, e = layout.slices
    joined = [Stretch(FP32, a.offset, a.index, 64 * 3 + 5), Stretch(BF16, e.offset, e.index, 32)]
    assert layout.stretches([True] * 5) == joined
    apart = [Stretch(FP32, piece.offset, piece.index, 64) for piece in (a, c)]
    assert layout.stretches([True, False, True, False, False]) == apart
    assert layout.stretches([False] * 5) == []


def test_views_share_the_buffer() -> None:
    layout = Layout.of(MIXED)
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    state = torch.zeros(layout.state_numel)
    for slice in layout.slices:
        view = slice.view(buffer)
        described = tuple(view.shape), view.dtype, view.is_contiguous()
        assert described == (slice.param.shape, slice.param.dtype, True)
        if view.numel():
            assert view.data_ptr() == buffer.data_ptr() + slice.offset
    for slice in layout.trainable:
        view = slice.state(state)
        assert tuple(view.shape) == slice.param.shape
        if view.numel():
            assert view.data_ptr() == state.data_ptr() + 4 * slice.index


def test_tie_inside_a_unit_takes_one_place() -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    layer[1].weight = layer[0].weight
    layer[0].bias.requires_grad_(False)
    model = nn.Sequential(layer)
    (unit,), root = make_units(model, [("0", layer)], None)
    assert [slice.param.name for slice in unit.layout.slices] == ["0.0.weight", "0.1.bias", "0.0.bias"]
    assert [id(p) for p in unit.params] == [id(layer[0].weight), id(layer[1].bias), id(layer[0].bias)]
    assert unit.owners == (
        ((layer[0], "weight"), (layer[1], "weight")),
        ((layer[1], "bias"),),
        ((layer[0], "bias"),),
    )
    assert unit.layout.nbytes == 3 * 32 * 4
    assert (root.index, root.params) == (ROOT, ())


def test_streamed_dtype_decides_the_bytes() -> None:
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer, nn.Linear(8, 2))
    (unit,), root = make_units(model, [("0", layer)], BF16)
    assert [slice.param.dtype for slice in (*unit.layout.slices, *root.layout.slices)] == [BF16] * 4
    assert unit.layout.nbytes == (64 + 32) * 2
    assert [slice.param.name for slice in root.layout.slices] == ["1.weight", "1.bias"]
