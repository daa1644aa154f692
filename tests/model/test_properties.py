"""Whatever the model, the options and the training loop: the result is that of plain PyTorch.

``STREAMER_EXAMPLES=50 pytest tests/model/test_properties.py`` tries fifty times as many,
other ones each time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import streamer
from tests.random_cases import (
    EPS,
    Backward,
    Loop,
    Model,
    ModelSpec,
    Options,
    Step,
    examples,
    loops,
    models,
    options,
    param_groups,
)


@dataclass
class Seen:
    """What a run shows of itself; ``gradients`` are those of the first step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    with_gradient: list[list[str]] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


class Run:
    """A training loop, one piece at a time, with plain PyTorch or with streamer."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loop: Loop) -> None:
        self.model = model
        self.optimizer = optimizer
        self.loop = loop
        self.seen = Seen()

    def synchronize(self) -> None:
        """Before weights are written."""

    def clip(self, largest: float, kind: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), largest, kind)

    def pieces(self) -> list[Callable[[], None]]:
        """What the loop does, between any two of which it may be interrupted."""
        pieces: list[Callable[[], None]] = []
        for step in self.loop.steps:
            if step.evaluate_first:
                pieces.append(lambda step=step: self.evaluate(step.backwards[0]))
            pieces += [lambda backward=backward: self.backward(backward) for backward in step.backwards]
            if step.clip_before_last:
                pieces.insert(-1, self.clip_all)
            pieces.append(lambda step=step: self.update(step))
        return pieces

    @torch.no_grad()
    def evaluate(self, like: Backward) -> None:
        self.model.eval()
        self.seen.losses.append(self.model(like.calls, like.seed).item())
        self.model.train()

    def backward(self, backward: Backward) -> None:
        torch.manual_seed(backward.seed)
        loss = self.model(backward.calls, backward.seed)
        if loss.requires_grad:
            loss.backward()
        self.seen.losses.append(loss.item())

    def update(self, step: Step) -> None:
        named = dict(self.model.named_parameters())
        held = {name: param.grad for name, param in named.items() if param.grad is not None}
        if not self.seen.with_gradient:
            self.seen.gradients = {name: grad.clone() for name, grad in held.items()}
        self.seen.with_gradient.append(list(held))
        params = list(named.values())
        with torch.no_grad():
            if (number := step.halve_gradient_of) is not None:
                grad = params[number % len(params)].grad
                if grad is not None:
                    grad.mul_(0.5)
            if (number := step.drop_gradient_of) is not None:
                params[number % len(params)].grad = None
        self.clip_all()
        self.optimizer.step()
        if step.zero_grad:
            # and by the model, for parameters that are in no group
            self.optimizer.zero_grad(self.loop.set_to_none)
            self.model.zero_grad(self.loop.set_to_none)
        if (number := step.write_weight_of) is not None:
            self.synchronize()
            with torch.no_grad():
                params[number % len(params)].mul_(0.9)
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.9

    def clip_all(self) -> None:
        if self.loop.clip is not None:
            self.seen.norms.append(self.clip(*self.loop.clip).item())

    def finish(self) -> Seen:
        self.synchronize()
        self.seen.weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        return self.seen


class Streamed(Run):
    def synchronize(self) -> None:
        streamer.synchronize(self.model)

    def clip(self, largest: float, kind: float) -> torch.Tensor:
        return streamer.clip_grad_norm_(self.model, largest, kind)


def run_plain(spec: ModelSpec, loop: Loop) -> Seen:
    model = Model(spec)
    run = Run(model, torch.optim.AdamW(param_groups(model, loop), eps=EPS), loop)
    for piece in run.pieces():
        piece()
    return run.finish()


@contextmanager
def streamed(
    spec: ModelSpec, loop: Loop, chosen: Options, *, state_dtype: Any = torch.float32, **more: Any
) -> Iterator[Streamed]:
    model = streamer.wrap(Model(spec), layers=spec.paths, **chosen.kwargs(), **more)
    try:
        optimizer = streamer.AdamW(param_groups(model, loop), eps=EPS, state_dtype=state_dtype)
        yield Streamed(model, optimizer, loop)
    finally:
        streamer.unwrap(model)


def has_optimizable(spec: ModelSpec, loop: Loop) -> bool:
    """Whether the loop's optimizer has a parameter, without which there is none."""
    return bool(param_groups(Model(spec), loop))


@dataclass(frozen=True)
class Case:
    model: ModelSpec
    loop: Loop
    update: str
    options: Options
    grad_dtype: torch.dtype | None


@st.composite
def cases(draw: st.DrawFn) -> Case:
    model = draw(models())
    layers = len(model.layers)
    update = draw(st.sampled_from(["step", "step", "backward"]))
    loop = draw(loops(layers, update=update).filter(lambda loop: has_optimizable(model, loop)))
    grad_dtype = draw(st.sampled_from([torch.float32, None]))
    return Case(model, loop, update, draw(options(layers)), grad_dtype)


@given(cases())
@examples(18)
def test_streamed_training_is_plain_training(case: Case) -> None:
    expected = run_plain(case.model, case.loop)
    more = {"update": case.update, "grad_dtype": case.grad_dtype}
    with streamed(case.model, case.loop, case.options, **more) as run:
        for piece in run.pieces():
            piece()
        actual = run.finish()
    in_layers = ("first.", "second.")
    if case.update == "backward":
        # the gradients of layers are gone when backward ends
        expected.with_gradient = [
            [name for name in names if not name.startswith(in_layers)] for names in expected.with_gradient
        ]
        expected.gradients = {name: expected.gradients[name] for name in expected.with_gradient[0]}
    assert actual.with_gradient == expected.with_gradient
    first = case.loop.steps[0]
    until_first_step = len(first.backwards) + first.evaluate_first
    assert actual.losses[:until_first_step] == expected.losses[:until_first_step]
    for name, gradient in expected.gradients.items():
        is_clipped = first.clip_before_last and case.loop.clip is not None
        if not is_clipped and is_added_in_the_same_order(name, case):
            assert torch.equal(actual.gradients[name], gradient), name
        else:
            assert_near(actual.gradients[name], gradient, name)
    assert_near(torch.tensor(actual.losses), torch.tensor(expected.losses), "losses")
    assert_near(torch.tensor(actual.norms), torch.tensor(expected.norms), "norms")
    assert list(actual.weights) == list(expected.weights)
    for name, weight in expected.weights.items():
        assert_near(actual.weights[name], weight, name)


def is_added_in_the_same_order(name: str, case: Case) -> bool:
    """Whether the first step's gradient of a parameter is a sum in the order of PyTorch's.

    PyTorch adds up all uses in one backward, and adds the sum to what there is. Streamer adds up the uses in
    one call of a layer, and adds that to what there is. With one use in a call both are the same in the first
    backward, and with one call in each backward they always are.
    """
    if not name.startswith(("first.", "second.")):
        return True
    path, number = name.split(".")[:2]
    layer = int(number) + (case.model.counts()[0] if path == "second" else 0)
    first, *others = [
        sum(index == layer for index, _ in backward.calls) for backward in case.loop.steps[0].backwards
    ]
    is_used_once = case.model.layers[layer].kind not in ("Tied", "Branches")
    return (first <= 1 or is_used_once) and all(count <= 1 for count in others)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Apart by no more than a few roundings of fp32 (6e-8) relative to the largest element, which batch
    normalisation and four steps amplify."""
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=1e-5 * max(largest, 1e-3), msg=lambda text: f"{what}: {text}"
    )


@dataclass(frozen=True)
class Interrupted:
    model: ModelSpec
    loop: Loop
    at: int  # piece of the loop before which it is interrupted, modulo how many there are
    numeric: tuple[tuple[str, Any], ...]  # options that may change values, the same in all runs
    update: tuple[str, str, str]
    options: tuple[Options, Options, Options]  # of the whole run, until and after the interruption
    other_seed: int


@st.composite
def interrupted(draw: st.DrawFn) -> Interrupted:
    dtype = draw(st.sampled_from([None, torch.bfloat16, torch.float16]))
    # PyTorch's batch normalisation refuses 16-bit weights beside fp32 statistics
    model = draw(models(batch_norm=dtype is None))
    layers = len(model.layers)
    # documented: update="backward" refuses float16, which needs a loss scale to be checked before any update
    update = "step" if dtype is torch.float16 else draw(st.sampled_from(["step", "step", "backward"]))
    state_dtypes = [torch.float32, torch.bfloat16, "int8"] if dtype is torch.bfloat16 else [torch.float32]
    numeric = {
        "dtype": dtype,
        "grad_dtype": draw(st.sampled_from([torch.float32, None])),
        "state_dtype": draw(st.sampled_from(state_dtypes)),
    }
    # documented: update="backward" has no room for gradients that were saved between backward and step
    both = [("step", "step"), ("backward", "step"), ("backward", "backward")]
    until_and_after = draw(st.sampled_from(both if update == "backward" else both[:1]))
    return Interrupted(
        model,
        draw(loops(layers, update=update).filter(lambda loop: has_optimizable(model, loop))),
        draw(st.integers(0, 20)),
        tuple(numeric.items()),
        (update, *until_and_after),
        draw(st.tuples(*[options(layers)] * 3)),
        draw(st.integers(1001, 2000)),
    )


@given(interrupted())
@examples(12)
def test_a_run_that_goes_on_from_a_checkpoint_ends_as_an_undisturbed_one(case: Interrupted) -> None:
    def run_with(number: int, spec: ModelSpec) -> Any:
        more = {"update": case.update[number], **dict(case.numeric)}
        return streamed(spec, case.loop, case.options[number], **more)

    with run_with(0, case.model) as whole:
        pieces = whole.pieces()
        for piece in pieces:
            piece()
        expected = whole.finish()
    at = case.at % (len(pieces) + 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        with run_with(1, case.model) as first:
            for piece in first.pieces()[:at]:
                piece()
            streamer.save(first.model, first.optimizer, path, step=at)
        with run_with(2, replace(case.model, seed=case.other_seed)) as second:
            assert streamer.load(second.model, second.optimizer, path).step == at
            second.seen = first.seen
            for piece in second.pieces()[at:]:
                piece()
            actual = second.finish()
    if len(set(case.update)) == 1:
        assert actual.with_gradient == expected.with_gradient
    assert actual.losses == expected.losses
    assert actual.norms == expected.norms
    assert list(actual.weights) == list(expected.weights)
    for name, weight in expected.weights.items():
        assert torch.equal(actual.weights[name], weight), name
