"""Mixtures with experts in 4 bits, each a tensor of its own in the files, compared with the values that
bitsandbytes computes for each expert."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import Interleave, Transpose

import streamer
from streamer.engine.handle import wrapped
from streamer.quantized.parts import composite_of
from tests.model_folders import rewritten
from tests.pretrained.experts import (
    ATTENTION,
    STACKS,
    adapt,
    assert_planned,
    assert_same_experts,
    assert_saved,
    experts_of,
    streamed,
    trains_alike_on_disk,
    with_rules,
)
from tests.pretrained.test_quantize import four_bits, least_memory, take_adapters
from tests.quantized import (
    by_table,
    history,
    logits,
    nothing_is_packed,
    sizes,
    trained,
)
from tests.reference import assert_equal

__all__ = ["nothing_is_packed"]
bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:::(transformers|peft|torch|torchao|bitsandbytes)")

BF16 = torch.bfloat16
#: An expert's matrices are of 16,384 values: 256 blocks of 64, which are one block of scales.
OF_EXPERTS = {
    "mixtral": {"num_local_experts": 4, "intermediate_size": 256},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 256, "head_dim": 16},
}
#: Options of `quantize_4bit`.
KINDS: dict[str, dict[str, Any]] = {
    "nf4": {"quant_type": "nf4"},
    "fp4": {"quant_type": "fp4"},
    "nf4, scales in 8 bits": {"quant_type": "nf4", "compress_statistics": True},
    "fp4, scales in 8 bits": {"quant_type": "fp4", "compress_statistics": True},
    "nf4 in blocks of 32, stored as bf16": {"quant_type": "nf4", "blocksize": 32, "quant_storage": BF16},
}
NESTED = "nf4, scales in 8 bits"


def written(folder: Path, name: str, *, layers: int = 2, **more: int) -> Path:
    """A mixture in bf16, whose experts differ in the size of their values, as scales and offsets do then."""
    torch.manual_seed(0)
    shape = sizes(64, layers) | {"num_experts_per_tok": 2} | OF_EXPERTS[name] | more
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **shape)).to(BF16)
    with torch.no_grad():
        for param_name, param in model.named_parameters():
            if any(stack in param_name for stack in STACKS):
                for number, values in enumerate(param):
                    values.mul_(1 + number)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = getattr(request, "param", "mixtral")
    return written(tmp_path_factory.mktemp(name), name)


def is_of_expert(name: str) -> bool:
    return ".experts." in name  # one of them, or all


def in_4_bits(
    folder: Path, to: Path, of: Callable[[str], bool] = is_of_expert, values: Path | None = None, **kind: Any
) -> None:
    """``folder`` with each weight ``of`` whose name is true in 4 bits of this ``kind``, in the folder ``to``;
    and what bitsandbytes makes of the codes of experts in the folder ``values``."""
    tensors, exact = {}, {}
    for name, value in load_file(folder / "model.safetensors").items():
        tensors[name] = exact[name] = value
        if of(name):
            tensors[name], state = bnb.functional.quantize_4bit(value, **kind)
            tensors |= {f"{name}.{key}": part for key, part in state.as_dict(packed=True).items()}
            exact[name] = by_table(tensors[name], state)
    card = json.loads((folder / "config.json").read_text())
    for path, held in ((to, tensors), (values, exact)):
        if path is not None:
            path.mkdir(exist_ok=True)
            save_file(held, path / "model.safetensors", metadata={"format": "pt"})
            (path / "config.json").write_text(json.dumps(card))
        card["quantization_config"] = None
    card["quantization_config"] = four_bits(bnb_4bit_quant_type=kind["quant_type"]).to_dict()
    (to / "config.json").write_text(json.dumps(card))


def plain(folder: Path, dtype: torch.dtype = BF16) -> Any:
    """As transformers loads what is not quantized."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def are_in_4_bits(model: nn.Module) -> None:
    for experts in experts_of(model):
        for key in STACKS:
            weight = experts.parametrizations[key].original
            assert type(weight).__name__ == "Params4bit" and not weight.requires_grad


@pytest.mark.parametrize(
    ("mixture", "kind", "activations"),
    [
        ("mixtral", "nf4", "recompute"),
        ("mixtral", "fp4, scales in 8 bits", "keep"),
        ("qwen3_moe", NESTED, "recompute"),
        ("qwen3_moe", "nf4 in blocks of 32, stored as bf16", "keep"),
    ],
    indirect=["mixture"],
)
def test_they_train_as_their_values(mixture: Path, kind: str, activations: str, tmp_path: Path) -> None:
    in_4_bits(mixture, tmp_path / "4", values=tmp_path / "values", **KINDS[kind])
    reference = adapt(plain(tmp_path / "values")).train()
    torch.manual_seed(1)
    model = streamed(tmp_path / "4", activations=activations)
    take_adapters(reference, model)
    assert_equal(history(model), history(reference))
    copied = copy.deepcopy(model)
    streamer.unwrap(model)
    expected = logits(reference)
    for each in (model, copied):
        are_in_4_bits(each)
        assert_same_experts(each, reference)
        for mine, theirs in zip(trained(each), trained(reference), strict=True):
            mine.data = theirs.data  # the masters have more bits
        assert torch.equal(logits(each), expected)


def test_linear_modules_are_in_4_bits_too(mixture: Path, tmp_path: Path) -> None:
    """As a whole model is published."""
    in_4_bits(
        mixture,
        tmp_path / "4",
        lambda name: is_of_expert(name) or "self_attn" in name,
        values=tmp_path / "values",
        **KINDS[NESTED],
    )
    reference = plain(tmp_path / "values")
    held = load_file(tmp_path / "4" / "model.safetensors")
    for name, module in [*reference.named_modules()]:
        if name.rpartition(".")[2] in ATTENTION:
            linear = bnb.nn.Linear4bit(
                module.in_features, module.out_features, bias=False, compute_dtype=BF16, quant_type="nf4"
            )
            stats = {key: held[key] for key in held if key.startswith(f"{name}.weight.")}
            linear.weight = bnb.nn.Params4bit.from_prequantized(held[f"{name}.weight"], stats, device="cpu")
            reference.set_submodule(name, linear)
    reference.requires_grad_(False)
    reference = adapt(reference).train()
    model = streamed(tmp_path / "4")
    take_adapters(reference, model)
    assert_equal(history(model), history(reference))
    streamer.unwrap(model)
    are_in_4_bits(model)


@pytest.mark.filterwarnings("ignore:bitsandbytes computes wrong")  # on some CPUs, and the same in both
@pytest.mark.filterwarnings("ignore:no direct I/O")
@pytest.mark.parametrize(("kind", "disk"), [("nf4", None), (NESTED, True)])
def test_a_stack_that_is_one_tensor_in_its_file(kind: str, disk: bool | None, tmp_path: Path) -> None:
    """As `bitsandbytes.nn.parametrize` writes it, with scales that are no whole number of blocks."""
    exact = written(tmp_path / "exact", "mixtral", layers=6, intermediate_size=88)
    stacks = plain(exact).state_dict()
    card = (exact / "config.json").read_text()
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "config.json").write_text(card)
    save_file(stacks, tmp_path / "whole" / "model.safetensors", metadata={"format": "pt"})
    in_4_bits(tmp_path / "whole", tmp_path / "4", values=tmp_path / "values", **KINDS[kind])
    reference = adapt(plain(tmp_path / "values")).train()
    options: dict[str, Any] = {}
    if disk:
        options = {"disk": True, "host_memory": least_memory(tmp_path / "4", adapt=adapt, disk=True)}
    model = streamed(tmp_path / "4", **options)
    take_adapters(reference, model)
    assert any(shard.is_out for shard in wrapped(model).executor.store.shards) == bool(disk)
    assert_equal(history(model), history(reference))
    streamer.unwrap(model)
    are_in_4_bits(model)
    assert_same_experts(model, reference)


def test_a_plan_has_every_byte(mixture: Path, tmp_path: Path) -> None:
    in_4_bits(mixture, tmp_path, **KINDS[NESTED])
    # attention, its adapters and the router are exact, in bf16, two norms and some tables are small
    exact = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 4 * 64)
    experts = 3 * 4 * 64 * 256 * (0.5 + 1 / 64)
    assert exact + experts < assert_planned(tmp_path) < exact + experts + 12_000


@pytest.mark.filterwarnings("ignore:no direct I/O")
def test_they_are_read_where_they_lie(tmp_path: Path) -> None:
    deep = written(tmp_path / "deep", "mixtral", layers=6)
    in_4_bits(deep, tmp_path / "4", **KINDS[NESTED])

    def look(shard: Any) -> None:
        parts = {
            slice.param.name.rpartition(".")[2]
            for slice in shard.layout.slices
            if ".experts." in slice.param.name and shard.weights_on_disk.is_stored(slice)
        }
        assert parts == {"codes", "absmax", "quant_map", "nested_absmax", "nested_quant_map"}

    trains_alike_on_disk(tmp_path / "4", True, look)


OTHERWISE: dict[str, tuple[Any, Callable[[torch.Tensor], torch.Tensor]]] = {
    "interleaved": (
        Interleave(dim=1),
        lambda stack: stack.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2),
    ),
    "turned": (Transpose(1, 2), lambda stack: stack.transpose(1, 2)),
}
WHY = {
    "interleaved": r"the model transposes or interleaves them",
    "turned": r"the model transposes or interleaves them",
    "some exact": r"others that are in one tensor with them here are not quantized",
    "two kinds": r"they are one tensor here, and are not quantized alike",
    "blocks": r"a matrix of 1056 values is not a whole number of blocks of 64",
    "blocks of scales": r"a matrix of 4096 values is not a whole number of blocks of 16384",
}


@pytest.mark.parametrize("why", WHY)
def test_those_that_are_no_stack_of_codes_are_dequantized(
    why: str, mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a warning that names the reason, and with the same values. The others stay in 4 bits."""
    folder, four, values = mixture, tmp_path / "4", tmp_path / "values"
    if why == "blocks":
        folder = written(tmp_path / "odd", "mixtral", hidden_size=48, intermediate_size=22)
    if why == "blocks of scales":
        folder = written(tmp_path / "odd", "mixtral", intermediate_size=64)
    if why == "turned":  # gates and ups of which that is as wide as high
        folder = written(tmp_path / "square", "mixtral", hidden_size=128, intermediate_size=64)

    def of(name: str) -> bool:
        return is_of_expert(name) and not (why == "some exact" and "experts.1.w3" in name)

    in_4_bits(folder, four, of, values=values, **KINDS[NESTED if why == "blocks of scales" else "nf4"])
    if why == "two kinds":
        of_one = lambda name: "experts.2.w1" in name  # noqa: E731
        in_4_bits(folder, tmp_path / "fp4", of_one, values=tmp_path / "fp4 values", **KINDS["fp4"])
        for path, other in ((four, tmp_path / "fp4"), (values, tmp_path / "fp4 values")):
            changed = {n: v for n, v in load_file(other / "model.safetensors").items() if of_one(n)}
            rewritten(path / "model.safetensors", partial(replace, changed=changed))
    reference = plain(values)
    if why in OTHERWISE:
        operation, by_hand = OTHERWISE[why]
        with_rules(monkeypatch, operation)
        for experts in experts_of(reference):
            experts.gate_up_proj.data = by_hand(experts.gate_up_proj.detach())
    with pytest.warns(UserWarning, match="and dequantized during reading, since") as warned:
        model = streamer.from_pretrained(four, device="cpu")
    streamer.unwrap(model)
    (warning,) = (str(each.message) for each in warned if "dequantized" in str(each.message))
    assert_same_experts(model, reference)
    for experts in experts_of(model):
        parametrized = getattr(experts, "parametrizations", {})
        assert ("down_proj" in parametrized) != why.startswith("blocks")
        assert "gate_up_proj" not in parametrized
    assert re.search(WHY[why], warning) and re.search(r"layers\.0\..*experts\.0\.w1\.weight", warning)
    assert ("w2" in warning) == why.startswith("blocks")


def replace(held: dict[str, torch.Tensor], changed: dict[str, torch.Tensor]) -> None:
    for name in [name for name in held if any(name.startswith(each) for each in changed)]:
        del held[name]
    held.update(changed)


def test_a_checkpoint_the_adapters_and_a_state_dict(mixture: Path, tmp_path: Path) -> None:
    in_4_bits(mixture, tmp_path / "4", **KINDS[NESTED])
    model, held = assert_saved(tmp_path / "4", tmp_path)
    with pytest.raises(
        ValueError, match="no files for experts that are one quantized tensor: save only adapters"
    ):
        model.get_base_model().save_pretrained(tmp_path / "whole")  # type: ignore[operator, union-attr]
    assert not (tmp_path / "whole").exists()
    # the codes and all that they are dequantized by
    name = "base_model.model.model.layers.1.mlp.experts.down_proj"
    of_stack = experts_of(model)[1].parametrizations["down_proj"]
    composite = composite_of("down_proj", of_stack.original, [of_stack])
    assert composite is not None and len(composite.names) == 6
    for part, value in zip(composite.names, composite.parts(), strict=True):
        assert torch.equal(held[name if part == "codes" else f"{name}.{part}"], value)
    assert f"{name.rpartition('.')[0]}.parametrizations.down_proj.original" not in held
