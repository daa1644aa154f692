"""Layers that are too large for a slot: streamed in parts with the results of plain PyTorch, or refused."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import streamer
from streamer.backends.thread import ThreadBackend
from streamer.engine.wrapped.handle import wrapped
from streamer.simulate.backend import VirtualBackend
from streamer.simulate.machine import H200
from tests.reference import (
    VOCAB,
    assert_parity,
    assert_same,
    batch,
    language_loss,
    streamed,
    train_plain,
    train_streamed,
)

WIDTH = 16


class MLP(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.act = nn.ReLU(inplace=True)
        self.down = nn.Linear(hidden, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(self.act(self.up(x.to(self.up.weight.device, self.up.weight.dtype))))
        return self.drop(x.mul_(0.5))


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList([MLP(hidden), MLP(WIDTH)])
        self.gates = nn.ModuleDict({"near": nn.Linear(WIDTH, WIDTH, bias=False)})
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for expert in self.experts:
            x = x + expert(self.norm(x)) * self.gates["near"](x).sigmoid()
        return x


class Net(nn.Module):
    """The middle one of three blocks is wide."""

    def __init__(self, block: Callable[[int], nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(block(hidden) for hidden in (16, 256, 16))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def device_bytes(model: nn.Module, **options: Any) -> int:
    with streamed(model, **options) as wrapped_model:
        return sum(wrapped(wrapped_model).planned.device.values())


def least_bytes(model: nn.Module, **options: Any) -> int:
    """The device_memory that would do, as the refusal says."""
    with pytest.raises(MemoryError, match="device_memory=") as caught:
        streamer.wrap(copy.deepcopy(model), **({"device": "cpu", "device_memory": 1} | options))
    found = re.search(r"device_memory=(\d+) would do", str(caught.value))
    assert found is not None
    return int(found[1])


def unit_names(model: nn.Module) -> list[str]:
    return [unit.name for unit in wrapped(model).executor.units]


WHOLE = ["blocks.0", "blocks.1", "blocks.2"]
ONCE = ["blocks.0", "blocks.1.experts.0", "blocks.1.experts.1", "blocks.1.gates.near", "blocks.2"]
TWICE = [ONCE[0], "blocks.1.experts.0.up", "blocks.1.experts.0.down", *ONCE[2:]]


def test_only_what_is_too_large_is_split_and_only_as_far_as_needed(net: Net) -> None:
    whole = device_bytes(net)
    for device_memory, names in ((whole, WHOLE), (whole - 1, ONCE), (least_bytes(net), TWICE)):
        with streamed(net, device_memory=device_memory) as model:
            assert unit_names(model) == names
            assert sum(wrapped(model).planned.device.values()) <= device_memory
            held = streamer.stats(model).device_bytes
            assert sum(held.values()) == sum(wrapped(model).planned.device.values())


@pytest.mark.parametrize(
    "options", [{}, {"num_slots": 1}, {"num_slots": 4}, {"dtype": torch.bfloat16}], ids=str
)
def test_the_figure_of_the_refusal_is_exact(options: dict[str, Any]) -> None:
    """For models with random widths, containers, and frozen parts."""
    choose = random.Random(0)

    def made(depth: int) -> nn.Module:
        if depth and choose.random() < 0.6:
            return nn.Sequential(*(made(depth - 1) for _ in range(choose.randint(1, 3))))
        layer = nn.Linear(choose.randint(1, 9), choose.randint(1, 200))
        return layer.requires_grad_(choose.random() < 0.7)

    for _ in range(3):
        model = nn.Sequential(*(made(2) for _ in range(choose.randint(1, 4))))
        model.append(nn.Linear(3, 3))
        options = {"layers": "", "device": "cpu"} | options
        least = least_bytes(model, **options)
        with pytest.raises(MemoryError, match=f"device_memory={least} would do"):
            streamer.wrap(model, device_memory=least - 1, **options)
        with streamed(model, device_memory=least, **options) as fits:
            assert sum(streamer.stats(fits).device_bytes.values()) == least


def test_fewer_slots_are_named_where_they_would_do(net: Net) -> None:
    one = least_bytes(net, num_slots=1)
    with pytest.raises(
        MemoryError, match=r"'blocks.1.experts.0.up' takes 17\d+ bytes, a slot may take \d+ "
    ) as e:
        streamer.wrap(net, device="cpu", device_memory=one, num_slots=4)
    assert "(it is a Linear with a parameter of its own ('weight'))" in str(e.value)
    assert "would do, or lower num_slots to 1" in str(e.value)
    with pytest.raises(MemoryError, match=r"would do(;|\n)"):
        streamer.wrap(net, device="cpu", device_memory=one - 1, num_slots=4)


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("num_slots", [1, 2, 5])
def test_parity(net: Net, activations: str, num_slots: int) -> None:
    expected = train_plain(net, steps=3)
    options: dict[str, Any] = {"activations": activations, "num_slots": num_slots}
    whole = train_streamed(net, steps=3, **options)
    for device_memory in (device_bytes(net, num_slots=num_slots) - 1, least_bytes(net, num_slots=num_slots)):
        backend = ThreadBackend(poison=True)
        options |= {"device_memory": device_memory, "backend": backend}
        actual = train_streamed(net, steps=3, **options)
        assert_parity(actual, expected)
        assert actual.losses[:2] == whole.losses[:2]


@pytest.mark.parametrize(("policy", "runs"), [("recompute", 2), ("keep", 1)])
def test_parts_are_kept_or_run_again_as_their_layer_is(net: Net, policy: str, runs: int) -> None:
    policies = ["recompute" if policy == "keep" else "keep"] * 3
    policies[1] = policy
    seen: list[int] = []
    with streamed(net, device_memory=device_bytes(net) - 1, activations=policies) as model:
        assert unit_names(model) == ONCE
        model.blocks[1].experts[0].up.register_forward_hook(lambda *_: seen.append(1))
        language_loss(model, 0).backward()
    assert len(seen) == runs


def test_micro_batches_are_for_whole_layers(net: Net) -> None:
    whole = device_bytes(net)
    refusal = f"'blocks.1' is too large .* micro-batches: {whole} bytes of device memory would keep"
    with pytest.raises(ValueError, match=refusal):
        streamer.wrap(net, device="cpu", device_memory=whole - 1, micro_batch_size=2)
    with streamed(net, device_memory=whole, micro_batch_size=2) as model:
        assert unit_names(model) == WHOLE


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def labelled_loss(model: nn.Module, step: int) -> torch.Tensor:
    tokens = batch(step)
    return model(input_ids=tokens, labels=tokens).loss


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_hugging_face_model_trains_to_the_bit(reentrant: bool | None) -> None:
    """Its norms use their input three times: as units they would sum gradients in another order."""
    model = llama().train()
    if reentrant is not None:
        for layer in model.model.layers:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=reentrant)
    expected = train_plain(model, steps=2, loss_of=labelled_loss)
    for device_memory in (device_bytes(model) - 1, least_bytes(model)):
        options = {"steps": 2, "loss_of": labelled_loss, "device_memory": device_memory}
        assert_parity(train_streamed(model, **options), expected)


def test_a_hugging_face_model_generates_with_its_cache(tmp_path: Path) -> None:
    plain = llama().eval()
    options = {"max_new_tokens": 6, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    expected = plain.generate(batch(0)[:, :5], **options)
    plain.save_pretrained(tmp_path)
    model = streamer.from_pretrained(tmp_path, device="cpu", device_memory=least_bytes(plain))
    assert "model.layers.0.mlp.up_proj" in unit_names(model)
    assert torch.equal(model.generate(batch(0)[:, :5], **options), expected)
    streamer.unwrap(model)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_adapters_in_parts() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2, lora_dropout=0.1, target_modules=["q_proj", "up_proj"], init_lora_weights=False
    )
    model = peft.get_peft_model(llama(), config)
    expected = train_plain(model, steps=2, loss_of=labelled_loss)
    options = {"steps": 2, "loss_of": labelled_loss, "device_memory": least_bytes(model)}
    assert_parity(train_streamed(model, **options), expected)


def test_updates_in_backward() -> None:
    net = Net(Wide)
    options = {"steps": 3, "clip": False, "update": "backward"}
    whole = train_streamed(net, **options)
    assert_same(train_streamed(net, device_memory=least_bytes(net, update="backward"), **options), whole)


def test_inference_hooks_and_copies(net: Net) -> None:
    net.eval()
    tokens = batch(0)
    with torch.no_grad():
        expected = net(tokens)
    keys = list(net.state_dict())
    model = streamer.wrap(copy.deepcopy(net), device="cpu", device_memory=least_bytes(net))
    seen: list[torch.Tensor] = []
    model.blocks[1].register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    with torch.no_grad():
        assert torch.equal(model(tokens), expected)
    assert len(seen) == 1 and list(model.state_dict()) == keys
    plain = copy.deepcopy(model)
    plain_block = copy.deepcopy(model.blocks[1])
    streamer.unwrap(model)
    assert all("forward" not in vars(module) for module in (*model.modules(), *plain.modules()))
    assert all("forward" not in vars(module) for module in plain_block.modules())
    with torch.no_grad():
        assert torch.equal(plain(tokens), expected) and torch.equal(model(tokens), expected)


def test_a_checkpoint_goes_on_whatever_was_split(net: Net, tmp_path: Path) -> None:
    least = least_bytes(net)

    def run(device_memory: int | None, load: Path | None, save: Path | None) -> dict[str, torch.Tensor]:
        with streamed(net, device_memory=device_memory) as model:
            optimizer = streamer.AdamW(model.parameters(), lr=1e-2)
            if load is not None:
                assert streamer.load(model, optimizer, load).step == 2
                optimizer.step()
                optimizer.zero_grad()
            for step in range(2):
                torch.manual_seed(step)
                language_loss(model, step).backward()
                if save is None or step == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            if save is not None:  # with the gradients of the second step
                streamer.save(model, optimizer, save, step=2)
            return {name: value.clone() for name, value in model.state_dict().items()}

    run(None, None, tmp_path / "whole")
    run(least, None, tmp_path / "parts")
    results = [run(memory, tmp_path / name, None) for memory in (None, least) for name in ("whole", "parts")]
    torch.testing.assert_close(results[1:], results[:1] * 3, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_for_a_model_on_the_meta_device(dtype: torch.dtype) -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.LayerNorm | nn.Linear | nn.Embedding):
            nn.init.constant_(module.weight, 0.1)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
        if isinstance(module, MLP):  # a parent's may come after its children have moved
            nn.init.constant_(module.down.weight, 0.2)
        if isinstance(module, Block):
            module.calls.zero_()

    with torch.device("meta"):
        model = Net()
    least = least_bytes(Net(), dtype=dtype)
    streamer.wrap(model, device="cpu", device_memory=least, dtype=dtype, init=init)
    assert unit_names(model) == TWICE
    language_loss(model, 0).backward()
    streamer.unwrap(model)
    expected = Net().apply(init).state_dict() | {"blocks.1.calls": torch.tensor(1.0)}
    for name in ("blocks.1.experts.0.up.weight", "blocks.1.norm.weight", "blocks.1.calls"):
        assert torch.equal(model.state_dict()[name], expected[name])
    # a write to a part that has moved to host memory already is rounded to the part's dtype, to half a unit
    # in the last place: [Note: masters]
    name = "blocks.1.experts.0.down.weight"
    half = torch.finfo(dtype).eps / 2 if dtype == torch.bfloat16 else 0.0
    rounded = expected[name].to(dtype).float()
    torch.testing.assert_close(model.state_dict()[name], rounded, rtol=half, atol=0)


def test_the_virtual_backend_splits_in_the_same_way(net: Net) -> None:
    least = least_bytes(net)
    with torch.device("meta"):
        shape = Net()
    streamer.wrap(shape, backend=VirtualBackend(H200), device_memory=least)
    with streamed(net, device_memory=least) as model:
        assert unit_names(shape) == unit_names(model)
        assert wrapped(shape).planned == wrapped(model).planned
    shape(torch.zeros(2, 8, dtype=torch.long, device="meta")).sum().backward()


def test_compiled_parts(net: Net) -> None:
    options = {"steps": 2, "device_memory": least_bytes(net)}
    net.eval()
    assert_same(train_streamed(net, compile="eager", **options), train_streamed(net, **options))


# --- what is refused ----------------------------------------------------------------------------------


#: What a forward may do with the weights of its parts.
USES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "nothing": lambda block, x: x,
    "function": lambda block, x: x + F.linear(F.linear(x, block.up.weight), block.down.weight),
    "operator": lambda block, x: x * block.up.weight[0],
    "list": lambda block, x: x + torch.stack([block.up.weight, block.up.weight]).mean(),
    "data": lambda block, x: x + block.up.weight.data.mean(),
    "deep": lambda block, x: x + block.inner[0].weight.mean(),
    "inner call": lambda block, x: block.inner[1](block.inner[0](x)) + x,
}


class Wide(nn.Module):
    def __init__(self, hidden: int, how: str = "nothing") -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 2 * hidden), nn.Linear(2 * hidden, WIDTH))
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return USES[self.how](self, x + self.down(self.up(x)) + self.inner(x))


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("function", {}),
        ("function", {"activations": "keep"}),
        ("function", {"compile": "eager"}),
        ("operator", {}),
        ("list", {}),
        ("data", {}),
        ("deep", {}),
    ],
    ids=str,
)
def test_a_layer_that_computes_with_the_weights_of_its_parts(how: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = Net(lambda hidden: Wide(hidden, how))
    name = r"blocks\.\d\.inner\.0\.weight" if how == "deep" else r"blocks\.\d\.up\.weight"
    refusal = rf"layer 'blocks\.\d' is too large for a slot .* but '{name}' is used outside of its part"
    for grad in (True, False):
        with streamed(net, device_memory=least_bytes(net), **options) as model:
            with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=refusal) as caught:
                model(batch(0)[:, :-1])
            assert _get_current_function_mode_stack() == []
    # with the device memory that the error names the layer runs
    needed = re.search(r": (\d+) bytes of device memory", str(caught.value))
    assert needed is not None
    actual = train_streamed(net, steps=1, device_memory=int(needed[1]), **options)
    assert_parity(actual, train_plain(net, steps=1))


def test_a_call_or_a_hook_inside_of_a_part() -> None:
    net = Net(partial(Wide, how="inner call"))
    with streamed(net, device_memory=device_bytes(net) - 1) as model:
        assert "blocks.1.inner" in unit_names(model)
        with pytest.raises(RuntimeError, match="'blocks.1.inner.0.weight' is used outside of its part"):
            model(batch(0)[:, :-1])
    expected = train_plain(net, steps=1)
    assert_parity(train_streamed(net, steps=1, device_memory=least_bytes(net)), expected)
    net = Net(Wide)
    with streamed(net, device_memory=least_bytes(net)) as model:
        model.blocks[1].up.register_forward_hook(lambda m, *_: m.weight.norm() and None)
        with pytest.raises(RuntimeError, match="'blocks.1.up.weight' is used outside of its part"):
            model(batch(0)[:, :-1])


class Uses(nn.Linear):
    """A part that calls another one, or computes with its weight."""

    other: nn.Linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.linear(x, self.weight)
        return super().forward(x + self.other(hidden) + F.linear(hidden, self.other.weight))


class UsesNeighbour(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), Uses(hidden, WIDTH)
        vars(self.down)["other"] = self.up  # not a child of it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x))


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_a_part_that_calls_another_one_is_refused(activations: str) -> None:
    net = Net(UsesNeighbour)
    match = (
        "'blocks.1.up' is called inside of layer 'blocks.1.down': call it outside of other streamed layers"
    )
    options = {"device_memory": least_bytes(net), "activations": activations}
    with streamed(net, **options) as model, pytest.raises(RuntimeError, match=match):
        model(batch(0)[:, :-1])


def changed(change: Callable[[Any], None]) -> Callable[[int], nn.Module]:
    def make(hidden: int) -> nn.Module:
        block = Wide(hidden)
        change(block)
        return block

    return make


def parametrized(hidden: int) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, hidden, bias=False))


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (
            changed(lambda block: setattr(block.inner[0], "weight", block.up.weight)),
            "its parts share a parameter",
        ),
        (
            changed(lambda block: setattr(block, "scales", nn.ParameterList([torch.ones(WIDTH)]))),
            "'blocks.1.scales' is a ParameterList, which is never called",
        ),
        (parametrized, "it is a ParametrizedLinear, which does not call its children as a plain module does"),
        (
            lambda hidden: nn.MultiheadAttention(hidden, 2),
            "it is a MultiheadAttention with a parameter of its own ('in_proj_weight')",
        ),
    ],
    ids=["tied", "ParameterList", "parametrized", "attention"],
)
def test_what_is_no_container(block: Callable[[int], nn.Module], reason: str) -> None:
    net = Net(block)
    with pytest.raises(MemoryError, match=re.escape(f"cannot be streamed in parts ({reason}); ")):
        streamer.wrap(
            net, layers="blocks", device="cpu", device_memory=device_bytes(net, layers="blocks") - 1
        )


def test_pytorchs_own_encoder_layer_takes_no_short_cut_past_its_parts() -> None:
    # in evaluation the layer hands all its weights to one function
    net = Net(lambda hidden: nn.TransformerEncoderLayer(WIDTH, 2, hidden, batch_first=True)).eval()
    with streamed(net, device_memory=device_bytes(net) - 1) as model, torch.no_grad():
        assert "blocks.1.self_attn" in unit_names(model)
        torch.testing.assert_close(model(batch(0)), net(batch(0)))
