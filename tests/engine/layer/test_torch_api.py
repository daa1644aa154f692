"""What PyTorch offers around a model works on a wrapped one as on a plain one, or is refused in a line."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.functional import jacobian
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import streamer
from streamer.backends.thread import ThreadBackend
from tests.models import Stack
from tests.reference import (
    POLICIES,
    assert_as_plain,
    assert_parity,
    assert_refused,
    gradients,
    in_turn,
    streamed,
    train_plain,
    train_streamed,
    unwrapping,
)

D = 8
Use = Callable[[nn.Module], Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up = nn.Linear(D, 2 * D)
        self.down = nn.Linear(2 * D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def Net() -> Stack:  # noqa: N802
    return Stack(Block, width=D, head=True)


def inputs(seed: int = 0, size: int = 4) -> torch.Tensor:
    return torch.randn(size, D, generator=torch.Generator().manual_seed(seed))


def assert_same(use: Use, activations: str, model: nn.Module | None = None, **options: Any) -> None:
    """``use`` returns the same tensors of a plain and of a wrapped model, to the bit."""
    assert_as_plain(model or Net(), use, layers="blocks", activations=activations, **options)


def loss(model: nn.Module, x: torch.Tensor | int = 0) -> torch.Tensor:
    return model(inputs(x) if isinstance(x, int) else x).square().mean()


# --- gradients by torch.autograd.grad and for some tensors only -----------------------------------------


def test_data_parallel_modules_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", object())
    match = "DistributedDataParallel is not notified.*process_group="
    assert_refused(Net(), loss, match, RuntimeError, layers="blocks")


def grad_of(*names: str) -> Use:
    """Gradients of the inputs and of these parameters; ``p.grad`` stays as it is."""

    def use(model: nn.Module) -> Any:
        x = inputs().requires_grad_()
        wanted = [x, *(model.get_parameter(name) for name in names)]
        return torch.autograd.grad(loss(model, x), wanted), gradients(model)

    return use


def backward_for(*names: str) -> Use:
    """Two backwards for these parameters alone."""

    def use(model: nn.Module) -> Any:
        for seed in range(2):
            loss(model, seed).backward(inputs=[model.get_parameter(name) for name in names])
        return gradients(model)

    return use


def grad_then_backward(model: nn.Module) -> Any:
    value = loss(model)
    first = torch.autograd.grad(value, [model.embed.weight, model.head.bias], retain_graph=True)
    value.backward(retain_graph=True)
    once = gradients(model)
    value.backward()
    return first, once, gradients(model)


GRADS = [
    grad_of(),
    grad_of("embed.weight", "head.bias"),
    grad_then_backward,
    backward_for("head.weight"),
    lambda model: jacobian(model, inputs(size=2)),
]


@POLICIES
@pytest.mark.parametrize("use", GRADS)
def test_gradients_of_some_tensors(use: Use, activations: str) -> None:
    assert_same(use, activations)


# --- around the model -----------------------------------------------------------------------------------


def trained_in(context: Callable[[], AbstractContextManager[Any]], model: nn.Module) -> Any:
    with context():
        loss(model).backward()
    return gradients(model)


def trained_after_inference(model: nn.Module) -> Any:
    with torch.inference_mode():
        before = model(inputs())
    loss(model).backward()
    return before.clone(), gradients(model)


def backward_in_a_thread(model: nn.Module) -> Any:
    thread = threading.Thread(target=loss(model).backward)
    thread.start()
    thread.join()
    return gradients(model)


AROUND = {
    "save_on_cpu": partial(trained_in, torch.autograd.graph.save_on_cpu),
    "inference before": trained_after_inference,
    "a thread": backward_in_a_thread,
}


@POLICIES
@pytest.mark.parametrize("around", AROUND)
def test_around_the_model(around: str, activations: str) -> None:
    assert_same(AROUND[around], activations)


# --- hooks on modules -----------------------------------------------------------------------------------


def doubled(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
    return 2 * out


def halved_backward(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
    return tuple(0.5 * gradient for gradient in grad_input)


def with_module_hook(place: str, register: Callable[[nn.Module, list[Any]], Any], model: nn.Module) -> Any:
    heard: list[Any] = []
    register(model.get_submodule(place), heard)
    loss(model).backward()
    return gradients(model), heard


MODULE_HOOKS: dict[str, Callable[[nn.Module, list[Any]], Any]] = {
    "forward": lambda module, heard: module.register_forward_hook(doubled),
    "forward_pre": lambda module, heard: module.register_forward_pre_hook(
        lambda module, args: (2 * args[0],)
    ),
    "forward_pre, to a keyword": lambda module, heard: module.register_forward_pre_hook(
        lambda module, args, kwargs: ((), {"x" if isinstance(module, Block) else "input": 2 * args[0]}),
        with_kwargs=True,
    ),
    "full_backward": lambda module, heard: module.register_full_backward_hook(halved_backward),
    "full_backward, heard": lambda module, heard: module.register_full_backward_hook(
        lambda module, grad_input, grad_output: heard.extend([*grad_input, *grad_output])
    ),
    "full_backward_pre": lambda module, heard: module.register_full_backward_pre_hook(
        lambda module, grad_output: (3 * grad_output[0],)
    ),
    "on the output": lambda module, heard: module.register_forward_hook(
        lambda module, args, out: out.register_hook(lambda gradient: 0.5 * gradient) and None
    ),
}


@pytest.mark.parametrize(
    ("hook", "place", "activations"),
    in_turn([*MODULE_HOOKS] * 2, ["blocks.1", "blocks.1.up"], ["recompute", "keep", "keep", "recompute"]),
)
def test_module_hooks(hook: str, place: str, activations: str) -> None:
    assert_same(partial(with_module_hook, place, MODULE_HOOKS[hook]), activations)


def test_hooks_inside_of_a_recomputed_layer_run_with_it() -> None:
    """As with PyTorch's own checkpoints."""

    def calls(model: nn.Module, run: Callable[[], torch.Tensor]) -> list[str]:
        heard: list[str] = []
        for place in ("blocks.1", "blocks.1.up"):
            module = model.get_submodule(place)
            module.register_forward_hook(lambda *_, place=place: heard.append(place))
        run().sum().backward()
        return heard

    plain = Net()
    inside = calls(plain, lambda: checkpoint(plain.blocks[1], inputs(), use_reentrant=False))
    assert inside.count("blocks.1.up") == 2
    with streamed(Net(), layers="blocks") as model:
        assert calls(model, partial(model, inputs())) == ["blocks.1.up", "blocks.1", "blocks.1.up"]
    with streamed(Net(), layers="blocks", activations="keep") as model:
        assert calls(model, partial(model, inputs())) == ["blocks.1.up", "blocks.1"]


WEIGHT = "blocks.1.up.weight"


# --- weights in other memory ----------------------------------------------------------------------------


def by_data(model: nn.Module) -> None:
    model.get_parameter(WEIGHT).data = torch.zeros(2 * D, D)


def by_data_of_the_root(model: nn.Module) -> None:
    model.head.weight.data = torch.zeros(D, D)


def by_set(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter(WEIGHT).set_(torch.zeros(2 * D, D))


def by_vector(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(torch.zeros_like(vector), model.parameters())


def by_swapping(model: nn.Module) -> None:
    torch.utils.swap_tensors(model.get_parameter(WEIGHT), nn.Parameter(torch.zeros(2 * D, D)))


@pytest.mark.parametrize("change", [by_data, by_data_of_the_root, by_set, by_vector, by_swapping])
def test_other_memory_is_noticed_and_is_there_after_unwrap(change: Callable[[nn.Module], None]) -> None:
    plain = Net()
    change(plain)
    with streamed(Net(), layers="blocks") as model:
        optimizer = streamer.AdamW(model.parameters())
        loss(model).backward()
        change(model)
        uses = [partial(streamer.synchronize, model)]
        if change is not by_data_of_the_root:  # which is what runs, until it is to be updated
            uses.append(partial(model, inputs()))
        if change is not by_swapping:  # which makes another parameter of it
            uses.append(optimizer.step)
        for use in uses:
            with pytest.raises(ValueError, match="was replaced after streamer.wrap.*param.copy_"):
                use()
    assert torch.equal(model(inputs()), plain(inputs()))


def test_a_forward_that_a_layer_has_of_its_own_outlives_wrap() -> None:
    """As those who patch modules put it there; `torch.compile(layer)` is a module with such a one."""
    model = Net()
    model.blocks[1].forward = partial(torch.mul, 2)
    expected = model(inputs())
    with streamed(model, layers="blocks") as wrapped:
        assert torch.equal(wrapped(inputs()), expected)
        assert torch.equal(copy.deepcopy(wrapped)(inputs()), expected)
    assert torch.equal(wrapped(inputs()), expected)


# --- copies ---------------------------------------------------------------------------------------------


class Tied(Stack):
    """A tie, a buffer, hooks of the user's, and a parameter that a list holds too."""

    def __init__(self) -> None:
        super().__init__(Block, width=D, head=True)
        self.head.weight = self.embed.weight
        self.alias = [self.blocks[1].up.weight]
        self.blocks[0].register_buffer("mask", torch.ones(D))
        self.blocks[2].up.weight.requires_grad_(False)
        self.embed.register_forward_hook(doubled)
        parametrizations.weight_norm(self.blocks[2].down)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_deep_copy_is_a_plain_model_with_the_exact_weights(dtype: torch.dtype) -> None:
    model = Tied()
    plain = copy.deepcopy(model)
    before = {name: sorted(vars(module)) for name, module in plain.named_modules()}
    with unwrapping(streamer.wrap(model, layers="blocks", device="cpu", dtype=dtype)):
        optimizer = streamer.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
        loss(model, inputs().to(dtype)).backward()
        optimizer.step()
        duplicate, part = copy.deepcopy(model), copy.deepcopy(model.blocks[0])
        inside = copy.deepcopy({"model": model, "alias": model.alias})
        values = copy.deepcopy(duplicate.state_dict())
        optimizer.zero_grad()
        loss(model, inputs().to(dtype)).backward()
        optimizer.step()
        assert all(torch.equal(v, values[n]) for n, v in duplicate.state_dict().items()), "it is apart"
        last = copy.deepcopy(model)
        loss(model, inputs().to(dtype)).backward()  # the wrapped one still works
    assert all(torch.equal(v, model.state_dict()[n]) for n, v in last.state_dict().items())
    assert all(torch.equal(v, values[f"blocks.0.{n}"]) for n, v in part.state_dict().items())
    for each in (duplicate, inside["model"]):
        assert {name: sorted(vars(module)) for name, module in each.named_modules()} == before
        assert [(n, p.dtype, p.requires_grad) for n, p in each.named_parameters()] == [
            (n, p.dtype, p.requires_grad) for n, p in plain.named_parameters()
        ]
        assert each.head.weight is each.embed.weight
        assert each.alias[0] is each.blocks[1].up.weight
        assert [bool(module._state_dict_hooks) for module in each.modules()].count(True) == 0
    assert inside["alias"] is inside["model"].alias
    expected = train_plain(duplicate, loss_of=loss, steps=2)
    assert_parity(train_streamed(duplicate, loss_of=loss, steps=2, layers="blocks"), expected)


def test_a_copy_for_which_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    with streamed(Net(), layers="blocks") as model:
        nbytes = sum(param.nbytes for param in model.parameters())
        monkeypatch.setattr(ThreadBackend, "host_available", lambda self: nbytes - 1)
        with pytest.raises(MemoryError, match=rf"and has {nbytes - 1} bytes.*\(1 byte too few\): write"):
            copy.deepcopy(model)
        assert "__deepcopy__" in vars(model), "the model is what it was"
        monkeypatch.undo()


def test_parameters_are_not_pickled_with_the_engine() -> None:
    with streamed(Net(), layers="blocks") as model:
        for name in (WEIGHT, "head.weight"):
            param = model.get_parameter(name)
            for pickled in (pickle.dumps, lambda param: torch.save(param, io.BytesIO())):
                with pytest.raises(
                    RuntimeError, match=f"'{name}' belongs to a wrapped model and cannot be pickled"
                ):
                    pickled(param)
            assert torch.equal(copy.deepcopy(param), param)
            assert not hasattr(copy.deepcopy(param), "_streamer_home")


@pytest.mark.parametrize("options", [{"activations": "recompute+offload"}, {"micro_batch_size": 2}])
def test_a_default_device_of_the_users_changes_nothing(options: dict[str, Any]) -> None:
    def losses(device: str) -> list[float]:
        x, found = torch.randn(4, D, generator=torch.Generator().manual_seed(0)), []
        with streamed(Stack(Block, width=D), layers="blocks", **options) as model:
            optimizer = streamer.AdamW(model.parameters(), lr=1e-2)
            with torch.device(device):
                for _ in range(3):
                    loss = model(x).square().sum()
                    loss.backward()
                    streamer.clip_grad_norm_(model, 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    found.append(loss.item())
        return found

    assert losses("meta") == losses("cpu")


# --- recorded code --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.trace_method:DeprecationWarning")
@pytest.mark.parametrize(("part", "grad"), [("model", True), ("layer", False)])
def test_a_trace_is_refused_in_a_line(part: str, grad: bool) -> None:
    """Not by printing weights; and never recorded, since it would be with what is in the slots."""
    x = torch.randn(3, D)
    with streamed(Stack(Block, width=D)) as model:
        traceable = model if part == "model" else model.blocks[0]
        refusal = r"torch\.jit\.trace .* cannot record .* streamer\.unwrap\(model\) first[^\n]*$"
        with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=refusal):
            torch.jit.trace(traceable, (x,))
        model(x).sum().backward()
        traced = torch.jit.trace(copy.deepcopy(model), (x,))
        torch.testing.assert_close(traced(x), model(x))
