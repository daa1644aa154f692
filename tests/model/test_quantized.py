"""Quantized weights are streamed by their parts, to the bit as the quantized model without streaming."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import streamer
from streamer.backends.base import Lane
from streamer.backends.virtual import VirtualBackend
from streamer.engine.handle import wrapped as handle_of
from streamer.planner.machine import RTX_4090
from streamer.planner.measure import Tracker
from streamer.planner.model import skeleton
from streamer.planner.step import WORKING_SET, plan_step
from tests.models import Layers
from tests.quantized import (
    KINDS,
    LAYERS,
    bytes_moved,
    history,
    llama,
    logits,
    loss_of,
    quantize,
    trained,
    whole_step,
)
from tests.reference import assert_equal, in_turn, unwrapping

pytestmark = pytest.mark.filterwarnings("ignore:.*(register_constant|Calling register_constant|cast from)")


def streamed(model: nn.Module, **options: Any) -> AbstractContextManager[nn.Module]:
    return unwrapping(streamer.wrap(model, layers=LAYERS, device="cpu", **options))


@pytest.fixture(scope="module")
def plain(request: pytest.FixtureRequest) -> tuple[str, list[Any], torch.Tensor]:
    """A kind, what training without streaming brings, and the logits after it."""
    model = llama(request.param)
    return request.param, history(model), logits(model)


@pytest.mark.parametrize(
    ("plain", "options"),
    in_turn(KINDS, [{"activations": "keep", "num_slots": 1}, {"activations": "recompute+offload"}]),
    indirect=["plain"],
    ids=str,
)
def test_losses_and_gradients_are_those_of_the_plain_model(
    plain: tuple[str, list[Any], torch.Tensor], options: dict[str, Any]
) -> None:
    kind, expected, after = plain
    model = llama(kind)
    names, objects = [*model.state_dict()], [*model.parameters()]
    with streamed(model, **options):
        assert [*model.state_dict()] == names and all(map(lambda a, b: a is b, model.parameters(), objects))
        assert_equal(history(model), expected)
        copied = copy.deepcopy(model)
    assert torch.equal(logits(copied), after)
    assert torch.equal(logits(model), after)


@pytest.mark.parametrize("kind", ["torchao float8", "torchao nf4", "bitsandbytes int8"])
def test_a_plan_has_every_byte(kind: str) -> None:
    options = {"layers": LAYERS, "num_slots": 2}
    plan = llama(kind)
    virtual = skeleton(plan).train()
    streamer.wrap(virtual, backend=VirtualBackend(RTX_4090), **options)
    optimizer = streamer.AdamW(trained(virtual))

    planned = plan_step(handle_of(virtual).executor, lambda: whole_step(virtual, optimizer, "meta"))
    with streamed(plan, num_slots=2) as model:
        own = streamer.AdamW(trained(model))
        executor = handle_of(model).executor
        for _ in range(2):
            whole_step(model, own, "cpu")
        moved = bytes_moved(model, lambda: whole_step(model, own, "cpu"))
        held = streamer.stats(model)
        weights = sum(unit.layout.nbytes for unit in (*executor.units, executor.root))
        exact = 0.5 if kind.endswith("4") else 1
        quantized = sum(
            slice.nbytes
            for unit in executor.units
            for slice in unit.layout.slices
            if not slice.param.trainable and slice.param.dtype.itemsize == 1 and slice.numel > 1000
        )
    assert moved[Lane.H2D] == planned.prediction.moved_bytes[Lane.H2D]
    assert moved[Lane.D2H] == planned.prediction.moved_bytes[Lane.D2H]
    assert {k: v for k, v in held.host_bytes.items() if v} == dict(planned.host_bytes)
    assert held.host_bytes["weights"] == weights
    for owner in ("weight slots", "gradient slots", "root weights"):
        assert held.device_bytes[owner] == planned.device_bytes[owner]
    codes = 3 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128)
    assert quantized == codes * exact


@pytest.mark.parametrize("kind", ["torchao int8", "bitsandbytes nf4", "bitsandbytes int8"])
def test_a_checkpoint_holds_the_parts(kind: str, tmp_path: Path) -> None:
    with streamed(llama(kind)) as model:
        optimizer = streamer.AdamW(trained(model), lr=1e-2)
        loss_of(model, 0).backward()
        optimizer.step()
        streamer.save(model, optimizer, tmp_path / "whole", step=1)
        streamer.save(model, optimizer, tmp_path / "adapters", step=1, frozen=False)
        expected = logits(model)
    for folder in ("whole", "adapters"):
        with streamed(llama(kind)) as model:
            streamer.load(model, streamer.AdamW(trained(model)), tmp_path / folder)
            assert torch.equal(logits(model), expected)


def states_in(model: nn.Module) -> list[Any]:
    return [module.state for module in model.modules() if hasattr(module, "state")]


def test_modules_keep_nothing_of_a_slot() -> None:
    """The first forward of an Int8Params moves its codes and scales into its module's state, which an
    autograd context keeps."""
    model = llama("bitsandbytes int8")
    before = [dict(vars(state)) for state in states_in(model)]
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with streamed(model, num_slots=1, activations="keep"):
        loss_of(model, 0).backward()
        for each in (model, copy.deepcopy(model)):
            assert [vars(state) for state in states_in(each)] == before
        saved = model.state_dict()
    assert len(before) == len(model.model.layers) * 7
    assert saved.keys() == expected.keys()
    assert_equal([*saved.values()], [*expected.values()])


ONE_WEIGHT, ONE_LAYER = 4 * 64 * 128, 4 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128)


@pytest.mark.parametrize(
    ("kind", "least", "most"),
    [
        ("bitsandbytes nf4", 0.9 * ONE_WEIGHT, ONE_WEIGHT),
        # autograd saves the values of the layer whose backward runs
        ("torchao int8", ONE_LAYER, ONE_LAYER),
    ],
)
def test_the_values_that_a_device_holds_are_in_a_plan(kind: str, least: float, most: float) -> None:
    def step(model: nn.Module, device: str) -> None:
        tokens = torch.zeros(1, 4, dtype=torch.long, device=device)
        model(input_ids=tokens, labels=tokens).loss.backward()

    def planned(kind: str | None) -> int:
        model = skeleton(llama(kind)).train()
        streamer.wrap(model, layers=LAYERS, backend=VirtualBackend(RTX_4090))
        return plan_step(handle_of(model).executor, lambda: step(model, "meta")).device_bytes[WORKING_SET]

    def held(kind: str | None) -> int:
        with streamed(llama(kind)) as model:
            step(model, "cpu")
            with Tracker() as tracker:
                step(model, "cpu")
        return tracker.peak

    for bytes_of in (planned, held):
        assert least <= bytes_of(kind) - bytes_of(None) <= most, bytes_of


@pytest.mark.parametrize("kind", ["torchao int8", "bitsandbytes nf4"])
def test_micro_batches(kind: str) -> None:
    def gradients(**options: Any) -> list[torch.Tensor]:
        model = llama(kind)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        model.config.attention_dropout = 0.0
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.0
        with streamed(model, **options):
            loss_of(model, 0).backward()
            return [param.grad.clone() for param in trained(model)]

    for whole, sliced in zip(gradients(), gradients(micro_batch_size=1), strict=True):
        torch.testing.assert_close(sliced, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["torchao int8", "bitsandbytes nf4"])
def test_what_the_user_writes_into_a_quantized_weight_is_what_runs(kind: str) -> None:
    with streamed(llama(kind), num_slots=3) as model:
        before = logits(model)
        weight = model.model.layers[1].mlp.up_proj.base.weight
        with torch.no_grad():
            weight.copy_(_zeros_like(weight) if kind.startswith("torchao") else torch.zeros_like(weight))
        written = logits(model)
        assert not torch.equal(written, before)
        assert torch.equal(logits(copy.deepcopy(model)), written)


@pytest.mark.parametrize("kind", ["torchao int8", "bitsandbytes nf4", "bitsandbytes int8"])
def test_a_quantized_weight_that_was_given_other_memory_is_refused(kind: str) -> None:
    with streamed(llama(kind), num_slots=3) as model:
        logits(model)
        weight = model.model.layers[1].mlp.up_proj.base.weight
        name, had = ("qdata", weight.qdata) if kind.startswith("torchao") else ("data", weight.data)
        setattr(weight, name, had.clone())
        with pytest.raises(ValueError, match=r"up_proj\.base\.weight.*was replaced after"):
            logits(model)
        setattr(weight, name, had)


def _zeros_like(weight: Any) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    nn.init.zeros_(linear.weight)
    quantize_(linear, Int8WeightOnlyConfig())
    return linear.weight


class Codes(nn.Module):
    """As checkpoints in fp8 with block scales have it (DeepSeek, Qwen): plain parameters, dequantized in
    forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        weight = torch.randn(width, width) / width**0.5
        blocks = weight.view(width // 16, 16, width // 16, 16)
        scale = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).view(width, width)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scale, requires_grad=False)
        self.counts = nn.Parameter(torch.arange(4), requires_grad=False)
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.weight_scale_inv.repeat_interleave(16, 0).repeat_interleave(16, 1)
        return x + F.linear(x, (self.weight.float() * scale).to(x.dtype)) * self.gain


@pytest.mark.parametrize("policy", ["recompute", "keep"])
def test_codes_with_block_scales_in_plain_parameters(policy: str) -> None:
    torch.manual_seed(0)
    model = Layers(lambda: Codes(32))
    reference = copy.deepcopy(model)
    for block in reference.layers:
        block.gain.data = block.gain.data.bfloat16()
    x = torch.randn(4, 32).bfloat16()
    reference(x).sum().backward()
    streamer.wrap(model, layers="layers", device="cpu", dtype=torch.bfloat16, activations=policy)
    model(x).sum().backward()
    for mine, plain in zip(model.layers, reference.layers, strict=True):
        # neither codes nor scales are rounded to the dtype that is asked for
        assert (mine.weight.dtype, mine.weight_scale_inv.dtype) == (torch.float8_e4m3fn, torch.float32)
        assert torch.equal(mine.gain.grad, plain.gain.grad)
    streamer.unwrap(model)
    assert torch.equal(model.layers[0].weight.float(), reference.layers[0].weight.float())
    assert torch.equal(model.layers[0].counts, torch.arange(4))


def refused(model: nn.Module, match: str, **options: Any) -> None:
    before = [(param, param.device, type(param)) for param in model.parameters()]
    with pytest.raises(ValueError, match=match):
        streamer.wrap(model, **{"layers": LAYERS, "device": "cpu", **options})
    assert [(param, param.device, type(param)) for param in model.parameters()] == before


@pytest.mark.parametrize("kind", ["torchao int8", "torchao nf4"])
def test_quantized_weights_are_not_trained(kind: str) -> None:
    model = llama(kind)
    model.model.layers[0].mlp.up_proj.base.weight.requires_grad_(True)
    refused(model, r"parameter '.*up_proj\.base\.weight' is a \w+, which .* cannot be trained: freeze it")


@pytest.mark.parametrize("kind", ["bitsandbytes nf4", "bitsandbytes int8"])
def test_weights_of_bitsandbytes_that_are_not_quantized_yet(kind: str) -> None:
    import bitsandbytes as bnb

    model = llama(kind)
    layer = (
        bnb.nn.Linear4bit(64, 128, bias=False)
        if kind.endswith("nf4")
        else bnb.nn.Linear8bitLt(64, 128, bias=False, has_fp16_weights=False)
    )
    model.model.layers[1].mlp.up_proj.base = layer
    refused(model, r"up_proj\.base\.weight' of bitsandbytes is not quantized yet: call model\.to\('cpu'\)")


def of_cut_rows() -> nn.Linear:
    return quantize(nn.Linear(96, 96, bias=False), "bitsandbytes fp4")


@pytest.mark.parametrize("go_on", [True, False])
def test_weights_that_the_library_reads_wrong_on_this_cpu(
    monkeypatch: pytest.MonkeyPatch, go_on: bool
) -> None:
    monkeypatch.setattr("streamer.quantized.bitsandbytes.blocks_go_on_in_rows", lambda: go_on)
    model = Layers(lambda: nn.Sequential(of_cut_rows(), quantize(nn.Linear(64, 64), "bitsandbytes fp4")))
    names = r"layers\.0\.0\.weight, layers\.1\.0\.weight, layers\.2\.0\.weight"
    told = pytest.warns(UserWarning, match=f"wrong on this CPU .* here {names}, also without streamer")
    with nullcontext() if go_on else told:
        streamer.wrap(model, layers="layers", device="cpu")
    streamer.unwrap(model)


def test_another_dtype_than_that_of_the_quantized_weights() -> None:
    match = (
        r"is a Int8Tensor for inputs of torch\.float32, which dtype=torch\.bfloat16 cannot change: quantize"
    )
    refused(llama("torchao int8"), match, dtype=torch.bfloat16)


class Opaque(nn.Parameter):
    """As weights in GGUF files are: codes in a class of their own, which does not tell what it is made of."""


def test_a_class_that_does_not_tell_its_parts() -> None:
    model = Layers(lambda: nn.Linear(4, 4))
    model.layers[1].weight = torch.Tensor._make_subclass(Opaque, torch.zeros(4, 4, dtype=torch.uint8), False)
    refused(model, r"'layers\.1\.weight' is a Opaque of torch\.uint8, which does not say", layers="layers")
