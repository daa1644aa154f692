"""`layers=` as globs: parts of layers are streamed with the results of plain PyTorch, or refused."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import streamer
from streamer.backends.thread import ThreadBackend
from streamer.backends.virtual import VirtualBackend
from streamer.engine.handle import wrapped
from streamer.model.layers import find_layers
from streamer.planner.machine import H200
from tests.reference import (
    VOCAB,
    assert_parity,
    batch,
    gradients,
    hugging_face,
    language_loss,
    streamed,
    tiny_gpt,
    train_plain,
    train_streamed,
)

WIDTH = 16
MLPS, ATTENTIONS = "transformer.h.*.mlp", "transformer.h.*.attn"
EXPERTS, GATES = "blocks.*.experts.*", "blocks.*.gates.near"


class Expert(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.act = nn.ReLU(inplace=True)
        self.down = nn.Linear(hidden, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.down(self.act(self.up(x))).mul_(0.5))


class Block(nn.Module):
    """A mixture: each token runs through one of four experts, of which the last is never chosen."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList(Expert(hidden) for _ in range(4))
        self.gates = nn.ModuleDict({"near": nn.Linear(WIDTH, WIDTH, bias=False)})
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores = self.gates["near"](self.norm(x))[..., :3].softmax(-1)
        chosen = scores.argmax(-1)
        # the third is chosen in every second call only
        chosen = torch.where((chosen == 2) & (self.calls % 2 == 1), 0, chosen)
        out = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            where = chosen == index
            out[where] = self.experts[index](self.norm(x[where])) * scores[where][:, index, None]
        return x + out


class Net(nn.Module):
    def __init__(self, block: Callable[[int], nn.Module] = Block, hidden: Sequence[int] = (64,) * 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(map(block, hidden))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net(*args: Any) -> Net:
    torch.manual_seed(0)
    return Net(*args)


def unit_names(model: nn.Module) -> list[str]:
    return [unit.name for unit in wrapped(model).executor.units]


# --- what is found ------------------------------------------------------------------------------------


HEADS = [f"transformer.h.{index}.{part}" for index in range(3) for part in ("attn", "mlp")]


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        (MLPS, HEADS[1::2]),
        ("*.h.1.*", ["transformer.h.1.ln_1", HEADS[2], "transformer.h.1.ln_2", HEADS[3]]),
        # of several globs the layers are in the model's order
        ([MLPS, ATTENTIONS], HEADS),
        ([MLPS, MLPS, "transformer.h.0.*lp"], HEADS[1::2]),
    ],
    ids=str,
)
def test_what_a_glob_matches(layers: Any, names: list[str]) -> None:
    assert [name for name, _ in find_layers(tiny_gpt(), layers)] == names


def test_globs_beside_paths_and_a_module_in_two_places() -> None:
    model = net()
    model.blocks[2].experts[3] = model.blocks[0].experts[0]
    model.more = nn.ModuleList([nn.Linear(2, 2)])
    layers = ["more", "blocks.0.experts.*", "blocks.2.experts.3", "blocks.*.gates.*"]
    with pytest.raises(ValueError, match=r"'blocks\.2\.experts\.3' is a Expert; it must be an .* or a glob"):
        find_layers(model, layers)
    layers[2] = "blocks.2.experts.[3]"
    gates = [f"blocks.{index}.gates.near" for index in range(3)]
    experts = [f"blocks.0.experts.{index}" for index in range(4)]
    assert [name for name, _ in find_layers(model, layers)] == [*experts, *gates, "more.0"]
    alone = find_layers(model, "blocks.2.experts.[3]")
    assert alone == [("blocks.2.experts.3", model.blocks[0].experts[0])]


KNOWN = "Found in this model: 'blocks' (3 x Block), "
NEVER = "which has no forward and is never called: "


@pytest.mark.parametrize(
    ("layers", "told"),
    [
        ("layers.*.mlp", f"layers='layers.*.mlp' matches no module. {KNOWN}"),
        ("blocks.*.experts", f"'blocks.0.experts' is a ModuleList, {NEVER}set layers='blocks.*.experts.*', "),
        # no wildcard crosses a dot
        ("blocks.*.up", f"layers='blocks.*.up' matches no module. {KNOWN}"),
        (
            "blocks.*.experts.*.drop",
            f"layers='blocks.*.experts.*.drop' matches no module with parameters. {KNOWN}",
        ),
        (
            ["blocks.*.*.*", "blocks.*.*.*.up"],
            "has 'blocks.0.experts.0' and 'blocks.0.experts.0.up', which is inside it: leave one of them",
        ),
    ],
    ids=str,
)
def test_what_is_refused(layers: Any, told: str) -> None:
    model = net()
    with pytest.raises(ValueError, match=re.escape(told)) as caught:
        streamer.wrap(model, device="cpu", layers=layers)
    assert "\n" not in str(caught.value)
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_list_of_activations_has_one_for_each_part() -> None:
    with pytest.raises(ValueError, match="has 3 entries, and there are 6 layers"):
        streamer.wrap(tiny_gpt(), device="cpu", layers=[MLPS, ATTENTIONS], activations=["keep"] * 3)


# --- results ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "num_slots", "activations"),
    [
        (MLPS, 1, "recompute"),
        (MLPS, 2, "keep"),
        ([ATTENTIONS, MLPS], 2, "recompute+offload"),
        ([ATTENTIONS, MLPS], 6, "recompute"),
        ("transformer.h.*", 1, "keep"),
    ],
    ids=str,
)
def test_parts_of_a_gpt_train_to_the_bit(layers: Any, num_slots: int, activations: str) -> None:
    model = tiny_gpt(dropout=0.1)
    options = {"num_slots": num_slots, "activations": activations, "backend": ThreadBackend(poison=True)}
    assert_parity(train_streamed(model, steps=3, layers=layers, **options), train_plain(model, steps=3))


def frozen(model: Net) -> None:
    for index, block in enumerate(model.blocks):
        block.experts[index].requires_grad_(False)
        block.experts[0].up.requires_grad_(False)


def tied(model: Net) -> None:
    """A module with two names in a layer, layers in two blocks, and weights outside of layers."""
    model.blocks[0].experts[0].other = model.blocks[0].experts[0].up
    model.blocks[1].experts = model.blocks[0].experts
    model.head.weight = model.embed.weight


@pytest.mark.parametrize(
    ("change", "num_slots", "activations"),
    [
        (lambda model: None, 1, "recompute"),
        (lambda model: None, 3, "keep"),
        (frozen, 3, "recompute"),
        (tied, 1, "keep"),
    ],
    ids=["one slot", "kept", "frozen", "tied"],
)
def test_experts_of_which_some_are_called_train_to_the_bit(
    change: Callable[[Net], None], num_slots: int, activations: str
) -> None:
    model = net()
    change(model)
    called: list[set[str]] = []

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        names = {name for name, _ in model.named_modules() if re.fullmatch(r"blocks\.\d\.experts\.\d", name)}
        seen: set[str] = set()
        handles = [
            model.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.add(name))
            for name in names
        ]
        loss = language_loss(model, step)
        for handle in handles:
            handle.remove()
        called.append(seen)
        return loss

    expected = train_plain(model, steps=4, loss_of=loss_of)
    plain, called = called, []
    options = {"num_slots": num_slots, "activations": activations, "backend": ThreadBackend(poison=True)}
    actual = train_streamed(model, steps=4, loss_of=loss_of, layers=[EXPERTS, GATES], **options)
    assert called == plain and plain[0] != plain[1]
    assert not any("blocks.2.experts.3" in names for names in plain)
    assert_parity(actual, expected)


def test_micro_batches_of_parts() -> None:
    """Attention is cut along the batch as the MLP is, unless ``batch_dims`` has its glob."""
    plain = tiny_gpt()
    language_loss(plain, 0).backward()
    for batch_dims, runs in ((None, 2), ({ATTENTIONS: None}, 1), ({"transformer.h": None}, 1)):
        options = {"micro_batch_size": 2, "batch_dims": batch_dims, "layers": [MLPS, ATTENTIONS]}
        with streamed(tiny_gpt(), activations="keep", **options) as model:
            seen = {"attn": 0, "mlp": 0}

            def count(name: str, *_: object, seen: dict[str, int] = seen) -> None:
                seen[name] += 1

            for name in seen:
                layer = model.transformer.h[2].get_submodule(name)
                layer.c_proj.register_forward_hook(partial(count, name))
            language_loss(model, 0)
            # the first call of a kind of layer is checked by runs on the side
            seen.update(attn=0, mlp=0)
            language_loss(model, 0).backward()
            assert seen == {"attn": runs, "mlp": 1 if batch_dims == {"transformer.h": None} else 2}
            expected = {name: param.grad for name, param in plain.named_parameters()}
            torch.testing.assert_close(gradients(model), expected, rtol=1e-4, atol=1e-6)


# --- the life of a model ------------------------------------------------------------------------------


def test_a_checkpoint_goes_on_with_other_layers(tmp_path: Path) -> None:
    def run(layers: Any, load: Path | None, save: Path | None) -> dict[str, torch.Tensor]:
        with streamed(tiny_gpt(), layers=layers) as model:
            optimizer = streamer.AdamW(model.parameters(), lr=1e-2)
            if load is not None:
                assert streamer.load(model, optimizer, load).step == 2
                optimizer.step()
                optimizer.zero_grad()
            for step in range(2):
                language_loss(model, step).backward()
                if save is None or step == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            if save is not None:  # with the gradients of the second step
                streamer.save(model, optimizer, save, step=2)
            return {name: value.clone() for name, value in model.state_dict().items()}

    ways = {"whole": "transformer.h", "parts": [MLPS, ATTENTIONS]}
    for name, layers in ways.items():
        run(layers, None, tmp_path / name)
    results = [run(layers, tmp_path / name, None) for layers in ways.values() for name in ways]
    torch.testing.assert_close(results[1:], results[:1] * 3, rtol=0, atol=0)


def test_a_plan_has_the_bytes_that_wrap_takes() -> None:
    layers = [MLPS, ATTENTIONS]
    with torch.device("meta"):
        shape = tiny_gpt()
    plan = streamer.plan(tiny_gpt(), batch(0)[:, :-1], layers=layers)
    streamer.wrap(shape, backend=VirtualBackend(H200), layers=layers)
    with streamed(tiny_gpt(), layers=layers) as model:
        held = streamer.stats(model).device_bytes
        assert unit_names(shape) == unit_names(model) == HEADS
        assert wrapped(shape).planned == wrapped(model).planned
        assert {owner: plan.device_bytes[owner] for owner in held} == held
    shape(torch.zeros(2, 8, dtype=torch.long, device="meta")).sum().backward()


def test_pytorchs_own_encoder_layer_takes_no_short_cut_past_its_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def short_cut(*_: object) -> torch.Tensor:
        raise AssertionError("one function was given all weights of the layer")

    model = net(partial(nn.TransformerEncoderLayer, WIDTH, 2, batch_first=True)).eval()
    with torch.no_grad():
        expected = model(batch(0))
        monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", short_cut)
        with pytest.raises(AssertionError, match="one function was given all weights"):
            model(batch(0))
        with streamed(model, layers=["blocks.*.self_attn", "blocks.*.linear?"]) as parts:
            torch.testing.assert_close(parts(batch(0)), expected)


# --- libraries ----------------------------------------------------------------------------------------


llama = partial(hugging_face, hidden_size=WIDTH, num_hidden_layers=2)
LLAMA = ["model.layers.*.self_attn", "model.layers.*.mlp"]


def labelled_loss(model: nn.Module, step: int) -> torch.Tensor:
    tokens = batch(step)
    return model(input_ids=tokens, labels=tokens).loss


@pytest.mark.parametrize(
    ("layers", "reentrant"), [("model.layers.*.*.*_proj", False), (LLAMA, True)], ids=str
)
def test_a_hugging_face_model_trains_to_the_bit(layers: Any, reentrant: bool | None) -> None:
    model = llama().train()
    if reentrant is not None:
        for layer in model.model.layers:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=reentrant)
    expected = train_plain(model, steps=2, loss_of=labelled_loss)
    assert_parity(train_streamed(model, steps=2, loss_of=labelled_loss, layers=layers), expected)


# --- layers that are too large ------------------------------------------------------------------------


def device_bytes(model: nn.Module, **options: Any) -> int:
    with streamed(model, **options) as wrapped_model:
        return sum(wrapped(wrapped_model).planned.device.values())


def refusal(model: nn.Module, device_memory: int, **options: Any) -> str:
    """The line of the error with so much memory."""
    options = {"device": "cpu", "device_memory": device_memory, **options}
    with pytest.raises(MemoryError) as caught:
        streamer.wrap(copy.deepcopy(model), **options)
    return str(caught.value).partition("\n")[0]


def advised(message: str) -> list[str] | None:
    found = re.search(r"stream its parts: layers=(\[.*?\])(?:$|, )", message)
    return None if found is None else json.loads(found[1])


WIDE: dict[str, tuple[Any, ...]] = {
    # what makes the model, its list of layers, the globs that are advised where they do not fit, and those
    # where these do not
    "gpt": (
        tiny_gpt,
        "transformer.h",
        [ATTENTIONS, MLPS],
        ["transformer.h.*.mlp.c_fc", "transformer.h.*.mlp.c_proj", ATTENTIONS],
    ),
    "experts": (
        partial(net, Block, (32, 64, 48)),
        "blocks",
        [EXPERTS, GATES],
        ["blocks.*.experts.*.up", "blocks.*.experts.*.down", GATES],
    ),
    "hugging face": (
        llama,
        "model.layers",
        LLAMA,
        [*(f"{LLAMA[1]}.{name}_proj" for name in ("gate", "up", "down")), LLAMA[0]],
    ),
}


@pytest.mark.parametrize("name", WIDE)
def test_the_globs_that_are_advised_fit_and_train(name: str) -> None:
    make, path, *advices = WIDE[name]
    layers: Any = path
    for advice in advices:
        memory = device_bytes(make(), layers=layers) - 1
        message = refusal(make(), memory, layers=layers)
        needed = f"the device needs {memory + 1} bytes and has {memory} bytes (1 byte too few)"
        sizes = {n: sum(p.nbytes for p in layer.parameters()) for n, layer in find_layers(make(), layers)}
        largest = f"the largest layer, '{max(sizes, key=sizes.__getitem__)}', takes "
        assert message.startswith(f"not enough memory for the model: {needed}: {largest}")
        assert f"bytes; device_memory={memory + 1} would do, or " in message
        assert advised(message) == advice
        loss_of = labelled_loss if name == "hugging face" else language_loss
        actual = train_streamed(make(), steps=2, loss_of=loss_of, layers=advice, device_memory=memory)
        assert_parity(actual, train_plain(make(), steps=2, loss_of=loss_of))
        layers = advice


def test_the_globs_that_are_advised_go_as_deep_as_is_needed() -> None:
    deep = WIDE["gpt"][3]
    memory = device_bytes(tiny_gpt(), layers=deep)
    assert advised(refusal(tiny_gpt(), memory, layers="transformer.h")) == deep
    assert advised(refusal(tiny_gpt(), memory, layers=None)) == deep
    assert advised(refusal(tiny_gpt(), memory // 2, layers="transformer.h")) is None


def changed(change: Callable[[Any], None]) -> Callable[[int], nn.Module]:
    def make(hidden: int) -> nn.Module:
        block = Block(hidden)
        change(block)
        return block

    return make


@pytest.mark.parametrize(
    "block",
    [
        changed(lambda block: setattr(block, "scales", nn.ParameterList([torch.ones(WIDTH, 64)]))),
        lambda hidden: parametrizations.weight_norm(nn.Linear(WIDTH, hidden, bias=False)),
        lambda hidden: nn.MultiheadAttention(hidden, 2),
    ],
    ids=["ParameterList", "parametrized", "attention"],
)
def test_no_globs_are_advised_for_parts_that_cannot_be_layers(block: Callable[[int], nn.Module]) -> None:
    model = net(block)
    memory = device_bytes(model, layers="blocks") - 1
    assert advised(refusal(model, memory, layers="blocks", num_slots=2)) is None
