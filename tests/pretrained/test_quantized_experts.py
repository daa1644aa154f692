"""Mixtures whose experts are quantized during reading, compared with the libraries' own quantization."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
from transformers.core_model_loading import Interleave

import streamer
from streamer.backends.base import Lane
from streamer.planner.step import ROUNDING
from streamer.quantized.schemes import SCHEMES
from tests.model_folders import rewritten
from tests.pretrained.experts import (
    ATTENTION,
    STACKS,
    adapt,
    assert_planned,
    assert_same_experts,
    assert_saved,
    experts_of,
    planned,
    streamed,
    trains_alike_on_disk,
    with_rules,
)
from tests.pretrained.test_quantize import CONFIGS, refused, stored_in_fp8, take_adapters
from tests.quantized import (
    history,
    logits,
    nothing_is_packed,
    sizes,
    trained,
)
from tests.reference import assert_equal

__all__ = ["nothing_is_packed"]
peft = pytest.importorskip("peft", reason="peft is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore:::(transformers|peft|torch|torchao|bitsandbytes)"),
    # on some CPUs, and the same in both of what is compared
    pytest.mark.filterwarnings("ignore:bitsandbytes computes wrong"),
]

BF16 = torch.bfloat16
WORDS = tuple(SCHEMES)
#: A row of an expert's second matrix is no whole number of blocks of 64. Those of gpt-oss are transposed, and
#: have biases.
OF_EXPERTS = {
    "mixtral": {"num_local_experts": 4, "intermediate_size": 96},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 96, "head_dim": 16},
    "gpt_oss": {"num_local_experts": 4, "intermediate_size": 96, "head_dim": 16},
}


@pytest.fixture(scope="module")
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in bf16."""
    name = getattr(request, "param", "mixtral")
    return written(tmp_path_factory.mktemp(name), name, layers=2)


def written(folder: Path, name: str, *, layers: int) -> Path:
    torch.manual_seed(0)
    shape = sizes(64, layers) | {"num_experts_per_tok": 2} | OF_EXPERTS[name]
    AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **shape)).to(BF16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in bf16 with more layers than the buffers take through which weights are read from disk."""
    return written(tmp_path_factory.mktemp("deep"), "mixtral", layers=6)


@pytest.fixture(params=WORDS)
def word(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def plain(folder: Path, word: str) -> nn.Module:
    """Linear modules as transformers quantizes them, experts as the library does."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=BF16, device_map={"": "cpu"}, quantization_config=CONFIGS[word]()
    )
    for experts in experts_of(model):
        for key in STACKS:
            if word == "nf4":
                from bitsandbytes.nn.parametrize import replace_parameter_4bit

                replace_parameter_4bit(experts, key, compress_statistics=True, quant_type="nf4")
            else:
                stack = getattr(experts, key)
                setattr(experts, key, nn.Parameter(in_8_bits(stack), requires_grad=False))
    return adapt(model).train()


def in_8_bits(stack: torch.Tensor) -> torch.Tensor:
    """The values that torchao makes of one matrix with the rows of all of ``stack``."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    matrix = nn.Linear(1, 1, bias=False)
    matrix.weight = nn.Parameter(stack.detach().reshape(-1, stack.shape[-1]), requires_grad=False)
    quantize_(matrix, Int8WeightOnlyConfig())
    return matrix.weight.dequantize().view_as(stack)  # type: ignore[operator]


OTHER_OPTIONS = ({"activations": "keep", "num_slots": 1},)


@pytest.mark.parametrize(
    ("mixture", "others"),
    [("mixtral", OTHER_OPTIONS), ("qwen3_moe", ()), ("gpt_oss", ())],
    indirect=["mixture"],
    ids=OF_EXPERTS,
)
def test_it_trains_as_a_model_quantized_by_the_library(
    word: str, mixture: Path, others: tuple[dict[str, Any], ...]
) -> None:
    reference = plain(mixture, word)
    first = None
    for options in ({}, *others):
        torch.manual_seed(1)
        model = streamed(mixture, quantize=word, **options)
        if first is None:
            take_adapters(reference, model)
            adapters = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
            first = history(reference)
        with torch.no_grad():
            for name, param in model.named_parameters():
                if param.requires_grad:
                    param.copy_(adapters[name])
        assert_equal(history(model), first)
        copied = copy.deepcopy(model)
        streamer.unwrap(model)
    expected = logits(reference)
    for each in (model, copied):
        assert_same_experts(each, reference)
        for mine, theirs in zip(trained(each), trained(reference), strict=True):
            mine.data = theirs.data
        assert torch.equal(logits(each), expected)


@pytest.mark.filterwarnings("ignore:no direct I/O")
def test_quantized_experts_lie_on_disk(word: str, deep: Path, tmp_path: Path) -> None:
    trains_alike_on_disk(deep, str(tmp_path), quantize=word)


def test_a_plan_has_every_byte(word: str, mixture: Path) -> None:
    codes = (3 * 4 * 64 * 96 + 4 * 64 * 64 - 2 * 32 * 64) * (1 if word == "int8" else 0.5)
    assert codes < assert_planned(mixture, quantize=word) < 1.4 * codes


def test_values_of_experts_are_in_a_plan(word: str, mixture: Path) -> None:
    """On the device, in addition to the codes, while a layer runs, or with its graph; and in its time. The
    peak of an exact layer, less its weights, may be at another moment."""
    stacks = 2 * 3 * 4 * 64 * 96
    for activations, graphs in (("recompute", 1), ("keep", 2)):
        exact, quantized = (planned(mixture, quantize=each, activations=activations) for each in (None, word))
        held = [sum(plan.device_bytes.values()) - plan.device_bytes[ROUNDING] for plan in (exact, quantized)]
        more = held[1] - held[0]
        slots = exact.device_bytes["weight slots"] - quantized.device_bytes["weight slots"]
        # and what a plan adds for kernels' temporaries
        assert 0.7 * graphs * stacks < more + slots < (graphs + 0.7) * stacks
        assert quantized.prediction.busy_seconds[Lane.COMPUTE] > exact.prediction.busy_seconds[Lane.COMPUTE]


@pytest.mark.parametrize("mixture", ["mixtral", "qwen3_moe"], indirect=True)
def test_experts_that_are_in_fp8_in_their_files(mixture: Path, tmp_path: Path) -> None:
    stored_in_fp8(mixture, tmp_path, block=32, of=("experts", "proj"))
    reference = plain_fp8(tmp_path)
    model = streamer.from_pretrained(tmp_path, adapt=adapt, device="cpu").train()
    of_experts = {type(p).__name__ for name, p in model.named_parameters() if "experts" in name}
    take_adapters(reference, model)
    assert_equal(history(model), history(reference))
    streamer.unwrap(model)
    assert of_experts == {"Float8Tensor"}
    with pytest.raises(ValueError, match="has no files for block-wise fp8"):
        model.get_base_model().save_pretrained(tmp_path / "whole")  # type: ignore[operator,union-attr]
    assert not (tmp_path / "whole").exists()
    assert experts_of(model)[0].parametrizations["down_proj"].original.block_size == [1, 32, 32]  # type: ignore[index]
    assert_same_experts(model, reference)


@pytest.mark.filterwarnings("ignore:no direct I/O")
@pytest.mark.parametrize("kind", ["fp8", "exact"])
def test_experts_are_read_where_they_lie(kind: str, deep: Path, tmp_path: Path) -> None:
    """One by one in the files, and several times as many tensors as the model has."""
    folder = deep
    if kind == "fp8":
        folder = tmp_path
        stored_in_fp8(deep, folder, block=32, of=("experts", "proj"))

    def look(shard: Any) -> None:
        parts = [slice for slice in shard.layout.slices if "experts" in slice.param.name]
        assert len(parts) == (4 if kind == "fp8" else 2)
        assert all(map(shard.weights_on_disk.is_stored, parts))

    trains_alike_on_disk(folder, True, look)


@pytest.mark.parametrize("why", ["interleaved", "not all in fp8", "scales of two dtypes"])
def test_experts_in_fp8_that_cannot_be_one_stack_of_codes_are_dequantized(
    why: str, mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales that are interleaved are so by whole blocks, which are not those of their codes."""

    def scales(held: dict[str, torch.Tensor], *, dtype: torch.dtype, of: str) -> None:
        for name in [name for name in held if of in name and name.endswith("_scale_inv")]:
            # powers of two, which are exact in all dtypes
            held[name] = held[name].log2().round().exp2().to(dtype)

    stored_in_fp8(mixture, tmp_path, block=32, of=("experts", "proj"))
    file = tmp_path / "model.safetensors"
    rewritten(file, partial(scales, dtype=torch.float32, of="experts"))
    expected = [experts.gate_up_proj.detach().clone() for experts in experts_of(plain_fp8(tmp_path))]
    if why == "interleaved":
        with_rules(monkeypatch, Interleave(dim=1))
        expected = [stack.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2) for stack in expected]
    elif why == "scales of two dtypes":
        rewritten(file, partial(scales, dtype=BF16, of="experts.2"))
    else:
        exact = AutoModelForCausalLM.from_pretrained(mixture, dtype=BF16)
        held = load_file(mixture / "model.safetensors")

        def some_exact(tensors: dict[str, torch.Tensor]) -> None:
            for name in [name for name in tensors if "experts.0" in name or "experts.3" in name]:
                del tensors[name]
                tensors |= {name: held[name]} if name in held else {}

        rewritten(file, some_exact)
        for stack, experts in zip(expected, experts_of(exact), strict=True):
            stack[[0, 3]] = experts.gate_up_proj.detach()[[0, 3]]  # type: ignore[index,operator]
    with pytest.warns(UserWarning, match=r"experts.* quantized in the files, and dequantized"):
        model = streamer.from_pretrained(tmp_path, device="cpu", disk=True)
    streamer.unwrap(model)
    assert all(map(torch.equal, [experts.gate_up_proj for experts in experts_of(model)], expected))


def plain_fp8(folder: Path) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=BF16, device_map={"": "cpu"}, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    return adapt(model).train()


def test_skipped_weights_stay_exact(word: str, mixture: Path) -> None:
    model = streamed(mixture, quantize=word, skip=[r"0\.mlp\.experts", "down_proj"])
    params = {name: param for name, param in model.named_parameters() if "mlp" in name and "lora" not in name}
    streamer.unwrap(model)
    base = "base_model.model.model.layers"
    assert {name: (type(param) is nn.Parameter, param.dtype) for name, param in params.items()} == {
        f"{base}.0.mlp.gate.weight": (True, BF16),
        f"{base}.0.mlp.experts.gate_up_proj": (True, BF16),
        f"{base}.0.mlp.experts.down_proj": (True, BF16),
        f"{base}.1.mlp.gate.weight": (True, BF16),
        f"{base}.1.mlp.experts.down_proj": (True, BF16),
        f"{base}.1.mlp.experts.parametrizations.gate_up_proj.original": (
            False,
            BF16 if word == "int8" else torch.uint8,
        ),
    }
    refused(r"'down_prj' matches the name of no linear .*experts", mixture, quantize=word, skip="down_prj")


def test_a_checkpoint_and_the_adapters(word: str, mixture: Path, tmp_path: Path) -> None:
    assert_saved(mixture, tmp_path, quantize=word)


def test_a_whole_model_is_not_saved_by_transformers(
    word: str, mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would fail halfway, or write what it cannot read. Adapters without peft's wrapper are saved."""
    model = streamed(mixture, quantize=word, adapt=None)
    copied = copy.deepcopy(model)
    for each in (model, copied, streamer.unwrap(model)):
        with pytest.raises(ValueError, match="for experts that are one quantized tensor: save only adapters"):
            each.save_pretrained(tmp_path / "whole")
    assert not (tmp_path / "whole").exists()
    # transformers asks for a newer peft than it needs here
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda min_version: None)
    copied.add_adapter(peft.LoraConfig(target_modules=ATTENTION, r=4))
    copied.save_pretrained(tmp_path / "adapters")
    freed = weakref.ref(copied)
    gc.disable()  # which would free what refers to itself
    del copied, each
    gc.enable()
    assert freed() is None
    assert [path.name for path in (tmp_path / "adapters").glob("*.safetensors")] == [
        "adapter_model.safetensors"
    ]
