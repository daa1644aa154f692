"""Plain PyTorch beside streamer: the same model, data and random numbers through both."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import streamer
from models.gpt2 import GPT
from streamer.backends.base import Lane

VOCAB = 64
Case = TypeVar("Case")


def tiny_gpt(layers: int = 3, width: int = 32, **options: Any) -> GPT:
    """The same weights at every call; two heads, and 16 tokens at most."""
    torch.manual_seed(0)
    return GPT(vocab_size=VOCAB, block_size=16, n_layer=layers, n_head=2, n_embd=width, **options)


#: Of a model of Hugging Face that is made like Llama.
LLAMA_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}


def hugging_face(kind: str = "llama", **config: Any) -> Any:
    """A language model of a kind that is made like Llama: the same weights at every call."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    made = transformers.AutoConfig.for_model(kind, **(LLAMA_SIZES | config))
    return transformers.AutoModelForCausalLM.from_config(made)


@dataclass
class History:
    """What a training run leaves: losses, gradient norms, the gradients of the first step, final weights."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    first_gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def batch(step: int, *, size: int = 4, time: int = 16) -> torch.Tensor:
    """Tokens [size, time + 1] of one step."""
    return torch.randint(0, VOCAB, (size, time + 1), generator=torch.Generator().manual_seed(1000 + step))


def language_loss(model: nn.Module, step: int, *, size: int = 4) -> torch.Tensor:
    tokens = batch(step, size=size)
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def wide_loss(model: nn.Module, step: int) -> torch.Tensor:
    """The same over 16 times as many tokens: in bf16 each token's loss has a rounding error of its own."""
    return language_loss(model, step, size=64)


def attached(model: nn.Module) -> list[object]:
    """The attributes of all modules and parameters of ``model``; of a tied parameter under each name."""
    things = (*model.named_modules(), *model.named_parameters(remove_duplicate=False))

    def now(value: object) -> object:
        return copy.copy(value) if isinstance(value, dict) else value

    return [(name, {key: now(value) for key, value in vars(thing).items()}) for name, thing in things]


LossOf = Callable[[nn.Module, int], torch.Tensor]


def one_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, loss_of: LossOf = language_loss
) -> None:
    loss_of(model, step).backward()
    optimizer.step()
    optimizer.zero_grad()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies, on the CPU, of the gradients that there are."""
    found = {name: param.grad for name, param in model.named_parameters()}
    return {name: grad.cpu().clone() for name, grad in found.items() if grad is not None}


def random_delays(seed: int, *, seconds: float = 0.004) -> dict[Lane, Callable[[], float]]:
    """For each lane seconds that are drawn anew for each op: of some lanes up to ``seconds``."""
    draw = random.Random(seed)
    scale = {lane: draw.choice([0.0, seconds / 4, seconds]) for lane in Lane}
    return {lane: partial(lambda lane: draw.random() * scale[lane], lane) for lane in Lane}


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    clip: Callable[[], torch.Tensor] | None,
    *,
    steps: int,
    loss_of: LossOf = language_loss,
    schedule: Any = None,
) -> History:
    """The plain loop, which is the same for both."""
    history = History()
    for step in range(steps):
        torch.manual_seed(step)
        loss = loss_of(model, step)
        loss.backward()
        if step == 0:
            history.first_gradients = gradients(model)
        if clip is not None:
            history.norms.append(clip().item())
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        history.losses.append(loss.item())
    history.weights = {name: value.clone() for name, value in model.state_dict().items()}
    return history


def train_plain(
    model: nn.Module, *, steps: int = 10, max_norm: float = 1.0, lr: float = 1e-3, **kwargs: Any
) -> History:
    """A deep copy of ``model`` trained by PyTorch alone."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    clip = partial(torch.nn.utils.clip_grad_norm_, list(model.parameters()), max_norm)
    return train(model, optimizer, clip, steps=steps, **kwargs)


def train_streamed(
    model: nn.Module,
    *,
    steps: int = 10,
    max_norm: float = 1.0,
    lr: float = 1e-3,
    loss_of: LossOf = language_loss,
    clip: bool = True,
    **options: Any,
) -> History:
    """A deep copy of ``model``, wrapped with ``options`` and trained by streamer."""
    with streamed(model, **options) as wrapped:
        optimizer = streamer.AdamW(wrapped.parameters(), lr=lr, weight_decay=0.1)
        clips = partial(streamer.clip_grad_norm_, wrapped, max_norm) if clip else None
        return train(wrapped, optimizer, clips, steps=steps, loss_of=loss_of)


@contextmanager
def unwrapping(model: Any) -> Iterator[Any]:
    """``model`` inside the block, after which it is unwrapped."""
    try:
        yield model
    finally:
        streamer.unwrap(model)


def streamed(model: nn.Module, **options: Any) -> AbstractContextManager[nn.Module]:
    """A deep copy of ``model``, wrapped inside the block."""
    return unwrapping(streamer.wrap(copy.deepcopy(model), **({"device": "cpu"} | options)))


POLICIES = pytest.mark.parametrize("activations", ["recompute", "keep"])


def in_turn(*choices: Iterable[Any]) -> list[tuple[Any, ...]]:
    """As many combinations as the longest of ``choices`` is long, in which the others take turns."""
    lists = [list(each) for each in choices]
    return [tuple(each[number % len(each)] for each in lists) for number in range(max(map(len, lists)))]


def pairwise(
    make: Callable[..., Case], axes: Mapping[str, Sequence[Any]], is_possible: Callable[[Case], bool]
) -> list[Case]:
    """Possible cases, always the same, so that every two values that can meet do so in one of them: of random
    cases at each turn the one with most pairs that are new."""
    draw = random.Random(0)
    numbers: dict[tuple[Any, ...], int] = {}
    pairs: dict[Case, int] = {}
    for _ in range(3000):
        values = {name: draw.choice(of) for name, of in axes.items()}
        case = make(**values)
        if is_possible(case):
            met = itertools.combinations(values.items(), 2)
            pairs[case] = sum(1 << numbers.setdefault(pair, len(numbers)) for pair in met)
    left, chosen = (1 << len(numbers)) - 1, list[Case]()
    while left:
        chosen.append(max(pairs, key=lambda case: (pairs[case] & left).bit_count()))
        left &= ~pairs[chosen[-1]]
    return chosen


def flat(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    """Copies of the tensors in dicts and sequences, by their paths; None is left out."""
    if isinstance(value, dict):
        return {k: v for key, each in value.items() for k, v in flat(each, f"{path}/{key}").items()}
    if isinstance(value, list | tuple):
        return flat(dict(enumerate(value)), path)
    return {} if value is None else {path: torch.as_tensor(value).detach().clone()}


def assert_equal(actual: Any, expected: Any, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """The same tensors at the same places of dicts and sequences: to the bit, or within the tolerances."""
    mine, theirs = flat(actual), flat(expected)
    assert mine.keys() == theirs.keys()
    if rtol or atol:
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol)
    else:
        assert [path for path, value in theirs.items() if not torch.equal(mine[path], value)] == []


def assert_as_plain(
    model: nn.Module, use: Callable[[nn.Module], Any], *, rtol: float = 0.0, atol: float = 0.0, **options: Any
) -> None:
    """``use`` returns the same for a deep copy of ``model``, wrapped with ``options``, and for ``model``."""
    # the wrapped one first: TorchScript runs other code when it has run before
    with streamed(model, **options) as wrapped:
        torch.manual_seed(1)
        actual = flat(use(wrapped))
    assert actual
    torch.manual_seed(1)
    assert_equal(actual, flat(use(model)), rtol=rtol, atol=atol)


def assert_refused(
    model: nn.Module,
    use: Callable[[nn.Module], Any],
    match: str,
    error: type[Exception] = ValueError,
    **options: Any,
) -> None:
    """``use`` of a deep copy of ``model``, wrapped with ``options``, raises ``error``."""
    with streamed(model, **options) as wrapped, pytest.raises(error, match=match):
        use(wrapped)


def assert_trains_alike(
    model: nn.Module,
    loop: Callable[[nn.Module, Any, Callable[..., torch.Tensor]], Any],
    *,
    make: Callable[[nn.Module, Any], Any] | None = None,
    tolerance: float = 1e-6,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> None:
    """``loop``, given a model, its AdamW and what clips, returns the same for a deep copy of ``model`` and
    for one that is wrapped with ``options``, and leaves the same weights within ``tolerance``.

    ``make`` makes optimizers of a model, and of the AdamW to use, in place of one AdamW with ``settings``.
    """
    make = make or (lambda model, kind: kind(model.parameters(), **settings))
    plain = copy.deepcopy(model)
    clip = partial(torch.nn.utils.clip_grad_norm_, list(plain.parameters()))
    expected = loop(plain, make(plain, torch.optim.AdamW), clip)
    with streamed(model, **(options or {})) as mine:
        actual = loop(mine, make(mine, streamer.AdamW), partial(streamer.clip_grad_norm_, mine))
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)
        weights = dict(mine.state_dict()), dict(plain.state_dict())
        torch.testing.assert_close(*weights, rtol=0, atol=tolerance)


def assert_same(actual: History, expected: History) -> None:
    """Equal to the bit, all of it."""
    assert actual.losses == expected.losses
    assert actual.norms == expected.norms
    for mine, theirs in (
        (actual.first_gradients, expected.first_gradients),
        (actual.weights, expected.weights),
    ):
        assert list(mine) == list(theirs)
        assert [name for name in theirs if not torch.equal(mine[name], theirs[name])] == []


def assert_parity(actual: History, expected: History, *, tolerance: float = 1e-5) -> None:
    """First loss and first gradients to the bit; later losses and final weights within ``tolerance``."""
    assert actual.losses[0] == expected.losses[0]
    assert list(actual.first_gradients) == list(expected.first_gradients)
    for name, gradient in expected.first_gradients.items():
        assert torch.equal(actual.first_gradients[name], gradient), f"gradient of {name}"
    losses, norms = (actual.losses, expected.losses), (actual.norms, expected.norms)
    for mine, theirs in (losses, norms):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=tolerance, atol=0)
    assert list(actual.weights) == list(expected.weights)
    torch.testing.assert_close(actual.weights, expected.weights, rtol=0, atol=tolerance)
