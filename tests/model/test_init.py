"""A model built on the meta device gets its values a layer at a time, the same in whatever order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import streamer
from models.gpt2 import GPT
from tests.reference import VOCAB, assert_parity, train


def shape(layers: int = 3, **options: object) -> GPT:
    sizes = {"vocab_size": VOCAB, "block_size": 16, "n_head": 2, "n_embd": 32, "n_layer": layers}
    with torch.device("meta"):
        return GPT(**(sizes | options))


def given_values(model: nn.Module, **options: object) -> nn.Module:
    """``model``, given values by `streamer.wrap` and unwrapped."""
    usual = {"layers": "transformer.h", "device": "cpu", "init": getattr(model, "init_weights", None)}
    return streamer.unwrap(streamer.wrap(model, **(usual | options)))


def built(layers: int = 3, seed: int = 0, **options: object) -> GPT:
    model = shape(layers)
    torch.manual_seed(seed)
    return given_values(model, **options)


def test_the_seed_decides_and_the_number_of_layers_does_not() -> None:
    three, again, five, other = built(3), built(3), built(5), built(3, seed=1)
    for name, value in three.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
        if "c_proj.weight" not in name:  # is scaled by the depth
            assert torch.equal(five.state_dict()[name], value), name
        if value.dim() == 2:
            assert not torch.equal(other.state_dict()[name], value), name
    weights = [layer.attn.c_attn.weight for layer in five.transformer.h]
    assert not any(torch.equal(a, b) for a in weights for b in weights if a is not b)


def test_training_goes_on_from_the_values_as_from_any_others() -> None:
    plain, model = built(), shape()
    torch.manual_seed(0)
    streamer.wrap(model, layers="transformer.h", device="cpu", init=model.init_weights)
    actual = train(model, streamer.AdamW(model.parameters()), None, steps=3)
    streamer.unwrap(model)
    reference = torch.optim.AdamW(plain.parameters(), weight_decay=0.01)
    assert_parity(actual, train(plain, reference, None, steps=3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_masters_are_the_values_before_rounding(dtype: torch.dtype) -> None:
    expected = built().state_dict()
    assert not torch.equal(expected["lm_head.weight"].to(dtype).float(), expected["lm_head.weight"])
    actual = built(dtype=dtype).state_dict()
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)) + self.table


def init_with_buffers(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.BatchNorm1d):
        module.reset_parameters()
    if isinstance(module, WithBuffers):
        module.table = torch.arange(4.0)


def test_buffers_on_meta_get_values_too() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.ModuleList([WithBuffers(), WithBuffers()]))
    buffers = list(model.buffers())
    with pytest.raises(KeyError, match="in init"):
        streamer.wrap(model, layers="1", device="cpu", init=failing_at(model[0], init_with_buffers))
    assert all(new is old for new, old in zip(model.buffers(), buffers, strict=True))
    streamer.wrap(model, layers="1", device="cpu", init=init_with_buffers)
    layer = model[1][0]
    out = layer(torch.randn(8, 4))
    assert out.isfinite().all()
    assert layer.norm.num_batches_tracked == 1
    assert torch.equal(layer.table, torch.arange(4.0))
    streamer.unwrap(model)


def failing_at(place: nn.Module, init: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    def failing(module: nn.Module) -> None:
        if module is place:
            raise KeyError("in init")
        init(module)

    return failing


def test_each_module_is_given_once_children_first_on_the_device_without_gradients() -> None:
    model = shape(layers=2)
    seen: list[nn.Module] = []

    def init(module: nn.Module) -> None:
        assert not torch.is_grad_enabled()
        assert torch.empty(0).device.type == "cpu"
        seen.append(module)
        model.init_weights(module)

    given_values(model, init=init)
    assert len(seen) == len(set(seen)) == len(list(model.modules()))
    place = {module: index for index, module in enumerate(seen)}
    for parent in model.modules():
        for child in parent.children():
            if parent not in (model.transformer, model.transformer.h):
                assert place[child] < place[parent]
    # what is in no layer comes last, the model itself at the very end
    assert seen[-1] is model
    blocks = set(model.transformer.h.modules()) - {model.transformer.h}
    assert set(seen[: len(blocks)]) == blocks


# What is refused


Init = Callable[[nn.Module], None]


def forget_norms(init: Init, module: nn.Module) -> None:
    if not isinstance(module, nn.LayerNorm):
        init(module)


def replace_weights(init: Init, module: nn.Module) -> None:
    init(module)
    if isinstance(module, nn.Linear):
        module.weight = nn.Parameter(torch.zeros_like(module.weight))


def fail_at_the_end(init: Init, module: nn.Module) -> None:
    init(module)
    if isinstance(module, GPT):
        raise KeyError("in init")


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        (forget_norms, ValueError, r"init= has left parameter 'transformer\.h\.0\.ln_1\.weight' without"),
        (
            replace_weights,
            ValueError,
            r"init= has replaced parameter 'transformer\.h\.0\.attn\.c_attn\.weight': let it",
        ),
        (fail_at_the_end, KeyError, "in init"),
    ],
)
def test_an_init_that_goes_wrong_leaves_the_model_as_it_was(
    wrong: Callable[[Init, nn.Module], None], error: type[Exception], match: str
) -> None:
    model = shape()
    objects = list(model.parameters())
    with pytest.raises(error, match=match):
        given_values(model, init=partial(wrong, model.init_weights))
    assert all(new is old and new.is_meta for new, old in zip(model.parameters(), objects, strict=True))
    torch.manual_seed(0)
    given_values(model)
    expected = built().state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def in_part(model: GPT) -> None:
    model.transformer.h[1].ln_1.weight = nn.Parameter(torch.ones(32))


def with_hook(model: GPT) -> None:
    model.lm_head.weight.register_hook(lambda gradient: None)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (in_part, r"h\.1' is only partly on the meta device \('transformer\.h\.1\.ln_1\.bias' is"),
        (with_hook, r"parameter 'transformer\.wte\.weight' is on the meta device and has a hook"),
    ],
)
def test_what_cannot_be_given_values_is_named(change: Callable[[GPT], None], match: str) -> None:
    model = shape()
    change(model)
    with pytest.raises(ValueError, match=match):
        given_values(model)


def test_init_is_refused_where_there_is_nothing_to_do_and_where_it_is_no_function() -> None:
    with pytest.raises(ValueError, match="init= is for a model on the meta device, and this one has values"):
        streamer.wrap(built(), device="cpu", init=lambda module: None)
    with pytest.raises(ValueError, match="init='normal': it must be a function of a module"):
        streamer.wrap(shape(), device="cpu", init="normal")
