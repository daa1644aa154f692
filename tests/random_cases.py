"""Random models, options and training loops for the property tests, as values that print as what they are."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import nn

from streamer.backends.base import Lane
from streamer.backends.thread import ThreadBackend

DIM, VOCAB, BATCH = 4, 7, 6
BRANCHES = ("a", "b", "ab", "")


def examples(count: int) -> settings:
    """``count`` examples, always the same ones; STREAMER_EXAMPLES=20 asks for 20 times as many, new ones."""
    times = os.environ.get("STREAMER_EXAMPLES")
    return settings(
        max_examples=count * int(times or 1),
        derandomize=times is None,
        deadline=None,  # the first example loads the kernels, and machines are shared
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


# ---- layers: from x [BATCH, DIM] and the names of the branches to use, to (x, penalty or None)


class Mlp(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, width), nn.Linear(width, DIM)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, which: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        return x + self.dropout(self.down(torch.tanh(self.up(x)))), None


class Tied(nn.Module):
    """One parameter under two names, and used twice."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(DIM, width), nn.Linear(DIM, width, bias=False)
        self.other.weight = self.one.weight
        self.down = nn.Linear(width, DIM, bias=False)

    def forward(self, x: torch.Tensor, which: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        return x + self.down(torch.tanh(self.one(x)) * torch.sigmoid(self.other(x))), None


class Branches(nn.Module):
    """Of two branches each call uses those it is told to: of a parameter that is unused there is no
    gradient, and of a call without branches none at all."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.a, self.b = Mlp(width, dropout), Mlp(width + 1, 0.0)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor, which: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        for name in which:
            x = x + self.scale * getattr(self, name)(x, which)[0]
        return x, None


class Statistics(nn.Module):
    """Buffers that forward writes: in place by PyTorch, in place, and by putting another one there."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(DIM))

    def forward(self, x: torch.Tensor, which: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.training:
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        y = self.linear(self.norm(x)) + 0.1 * self.mean
        return x + torch.tanh(y) / (1 + 0.1 * self.calls), None


class Penalised(nn.Module):
    """A second output, which the loss uses now and then."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, width), nn.GELU(), nn.Linear(width, DIM))

    def forward(self, x: torch.Tensor, which: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        y = self.inner(x)
        return x + y, y.square().mean()


LAYERS = {kind.__name__: kind for kind in (Mlp, Tied, Branches, Statistics, Penalised)}


# ---- models


@dataclass(frozen=True)
class LayerSpec:
    kind: str
    width: int
    dropout: float
    frozen: str  # "", "all" or "first": all parameters, or the first one


@dataclass(frozen=True)
class ModelSpec:
    layers: tuple[LayerSpec, ...]
    in_second_list: int  # so many of the layers
    root: str  # "none", "tied" or "untied" embedding and head
    frozen_embedding: bool
    seed: int

    @property
    def paths(self) -> list[str]:
        return [path for path, count in zip(("first", "second"), self.counts(), strict=True) if count]

    def counts(self) -> tuple[int, int]:
        return len(self.layers) - self.in_second_list, self.in_second_list


class Model(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(spec.seed)
            layers = [LAYERS[layer.kind](layer.width, layer.dropout) for layer in spec.layers]
            split = spec.counts()[0]
            self.first, self.second = nn.ModuleList(layers[:split]), nn.ModuleList(layers[split:])
            self.embedding = self.head = None
            if spec.root != "none":
                self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
                if spec.root == "tied":
                    self.head.weight = self.embedding.weight
                self.embedding.weight.requires_grad_(not spec.frozen_embedding)
        for layer, layer_spec in zip(layers, spec.layers, strict=True):
            params = list(layer.parameters())
            for param in {"": [], "first": params[:1], "all": params}[layer_spec.frozen]:
                param.requires_grad_(False)

    def forward(self, calls: tuple[tuple[int, str], ...], seed: int) -> torch.Tensor:
        """The loss."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, VOCAB, (BATCH,), generator=generator)
        given = torch.randn(BATCH, DIM, generator=generator)
        layers = [*self.first, *self.second]
        x = self.embedding(tokens) if self.embedding is not None else given.to(dtype_of(layers[0]))
        penalties = []
        for index, which in calls:
            x, penalty = layers[index](x, which)
            if penalty is not None and which:
                penalties.append(penalty.float())
        if self.head is not None:
            loss = nn.functional.cross_entropy(self.head(x).float(), tokens.roll(1))
        else:
            loss = (x.float() - given.roll(1, 0)).square().mean()
        return loss + sum(penalties)


def dtype_of(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype


# ---- what a run does


@dataclass(frozen=True)
class Backward:
    calls: tuple[tuple[int, str], ...]  # layers in the order of their calls, with the branches used
    seed: int


@dataclass(frozen=True)
class Step:
    backwards: tuple[Backward, ...]
    evaluate_first: bool
    clip_before_last: bool  # also before the last backward
    zero_grad: bool  # after the update
    halve_gradient_of: int | None  # parameters by number, modulo how many there are
    drop_gradient_of: int | None
    write_weight_of: int | None


@dataclass(frozen=True)
class Loop:
    """A training loop; ``groups`` gives parameters, in turn, to groups, -1 to none."""

    steps: tuple[Step, ...]
    clip: tuple[float, float] | None  # largest norm, and which norm
    groups: tuple[int, ...]
    set_to_none: bool


GROUPS = ({"lr": 1e-2, "weight_decay": 0.1}, {"lr": 3e-3, "weight_decay": 0.0, "betas": (0.8, 0.95)}, {})
#: With the usual eps Adam makes a whole step of a gradient that is all rounding; with this one it does not.
EPS = 1e-2


def param_groups(model: nn.Module, loop: Loop) -> list[dict[str, Any]]:
    params: list[list[nn.Parameter]] = [[] for _ in GROUPS]
    for index, param in enumerate(model.parameters()):
        group = loop.groups[index % len(loop.groups)]
        if group >= 0:
            params[group].append(param)
    return [{**of_group, "params": mine} for of_group, mine in zip(GROUPS, params, strict=True) if mine]


@dataclass(frozen=True)
class Options:
    """Options of `wrap` that must not change any value, and how long the lanes dawdle."""

    num_slots: int | None
    device_memory: str | None
    activations: str
    host_threads: int | None
    delays: tuple[float, ...]  # the longest, in seconds, by lane
    seed: int

    def kwargs(self) -> dict[str, Any]:
        draw = random.Random(self.seed)
        delays = {
            lane: partial(draw.uniform, 0.0, most)
            for lane, most in zip(Lane, self.delays, strict=True)
            if most
        }
        return {
            "num_slots": self.num_slots,
            "device_memory": self.device_memory,
            "activations": self.activations,
            "host_threads": self.host_threads,
            "backend": ThreadBackend(delays=delays, poison=True),
        }


# ---- strategies

seeds = st.integers(0, 1000)
layer_specs = st.builds(
    LayerSpec,
    kind=st.sampled_from(sorted(LAYERS)),
    width=st.integers(1, 9),
    dropout=st.sampled_from([0.0, 0.2]),
    frozen=st.sampled_from(["", "", "", "first", "all"]),
)


@st.composite
def models(draw: st.DrawFn, *, batch_norm: bool = True) -> ModelSpec:
    specs = layer_specs if batch_norm else layer_specs.filter(lambda spec: spec.kind != "Statistics")
    layers = tuple(draw(st.lists(specs, min_size=1, max_size=5)))
    return ModelSpec(
        layers,
        in_second_list=draw(st.integers(0, len(layers) - 1)),
        root=draw(st.sampled_from(["untied", "tied", "none"])),
        frozen_embedding=draw(st.booleans()),
        seed=draw(seeds),
    )


@st.composite
def backwards(draw: st.DrawFn, layers: int, *, once: bool) -> Backward:
    """One that calls layers in any order, often in theirs; no layer twice if ``once``."""
    in_order = list(range(layers))
    any_order = st.lists(st.sampled_from(in_order), min_size=1, max_size=layers + 2, unique=once)
    order = draw(st.one_of(st.just(in_order), any_order))
    return Backward(tuple((index, draw(st.sampled_from(BRANCHES))) for index in order), draw(seeds))


@st.composite
def loops(draw: st.DrawFn, layers: int, *, update: str) -> Loop:
    """A training loop for a model of so many ``layers``.

    With update="backward" there is, as documented, no clipping, no accumulation, no gradient to write, and a
    layer takes part once in each backward.
    """
    in_backward = update == "backward"
    number = st.none() if in_backward else st.one_of(st.none(), st.none(), st.integers(0, 20))
    steps = st.builds(
        Step,
        backwards=st.lists(
            backwards(layers, once=in_backward), min_size=1, max_size=1 if in_backward else 3
        ).map(tuple),
        evaluate_first=st.booleans(),
        clip_before_last=st.booleans(),
        # documented: with update="backward" a step, and no gradient that stays, follows each backward
        zero_grad=st.just(True) if in_backward else st.sampled_from([True, True, False]),
        halve_gradient_of=number,
        drop_gradient_of=number,
        write_weight_of=st.one_of(st.none(), st.none(), st.integers(0, 20)),
    )
    clips = st.sampled_from([None, (0.05, 2.0), (1e9, 2.0), (0.01, float("inf")), (0.1, 1.0)])
    return Loop(
        steps=tuple(draw(st.lists(steps, min_size=1, max_size=4))),
        clip=None if in_backward else draw(clips),
        groups=tuple(draw(st.lists(st.sampled_from([0, 0, 1, 2, -1]), min_size=1, max_size=6))),
        # zeroed gradients of layers would be updated from: with update="backward" there are none to be zeroed
        set_to_none=in_backward or draw(st.booleans()),
    )


def options(layers: int) -> st.SearchStrategy[Options]:
    return st.builds(
        Options,
        num_slots=st.one_of(st.none(), st.integers(1, layers + 1)),
        device_memory=st.sampled_from([None, "1GiB"]),
        activations=st.sampled_from(["recompute", "keep"]),
        host_threads=st.sampled_from([None, 1]),
        delays=st.tuples(*[st.sampled_from([0.0, 0.0, 0.0005, 0.002])] * len(Lane)),
        seed=seeds,
    )
