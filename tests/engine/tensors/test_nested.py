"""Tensors out of nested values and back in."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutputWithPast

from streamer.engine.tensors import flatten, reachable


class Pair(NamedTuple):
    left: Any
    right: Any


Plain = namedtuple("Plain", ["left", "right"])


@dataclasses.dataclass
class Record:
    value: Any
    note: Any = "unchanged"


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any
    note: Any = "unchanged"


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    value: Any
    note: Any = "unchanged"


class Opaque:
    """A value that is not looked into, such as a cache."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = list(tensors)


def new(count: int) -> list[torch.Tensor]:
    return [torch.full((2,), float(i)) for i in range(count)]


A, B, C = new(3)
SAME_VALUES = A.clone()
NOTE = object()


@pytest.mark.parametrize(
    ("value", "tensors"),
    [
        (A, [A]),
        ((A, 1, B), [A, B]),
        ([A, [B, "text"], ()], [A, B]),
        ({"b": B, "a": A, "n": None}, [B, A]),
        (Pair(A, 5), [A]),
        (Plain(1, A), [A]),
        (Record((A, B), NOTE), [A, B]),
        (Frozen((A, B), NOTE), [A, B]),
        (Slotted({"a": A}, NOTE), [A]),
        (OrderedDict(z=A, n=1, a=B), [A, B]),
        (defaultdict(list, a=[A]), [A]),
        (((A, {"x": [B, Pair(C, Frozen(A))]}), Record([A])), [A, B, C]),
        (torch.sort(A), None),
        ((A, SAME_VALUES), [A, SAME_VALUES]),
        (None, []),
        ("text", []),
    ],
)
def test_tensors_come_out_once_in_order_and_others_take_their_places(
    value: object, tensors: list[torch.Tensor] | None
) -> None:
    taken, rebuild = flatten(value)
    if tensors is not None:
        assert list(map(id, taken)) == list(map(id, tensors))
    for others in (new(len(taken)), new(len(taken))):
        result = rebuild(others)
        assert type(result) is type(value)
        assert list(map(id, flatten(result)[0])) == list(map(id, others))
        assert outline(result) == outline(value)
    assert list(map(id, flatten(value)[0])) == list(map(id, taken)), "what it was built from is left alone"


def outline(value: Any) -> Any:
    """What stands in ``value`` beside tensors, by name."""
    if dataclasses.is_dataclass(value):
        return outline({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, dict):
        return [(name, outline(item)) for name, item in value.items()]
    if isinstance(value, list | tuple):
        return [type(value), *map(outline, value)]
    return torch.Tensor if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize(
    "box",
    [
        lambda t: t,
        lambda t: (1, [t]),
        lambda t: {"a": {"b": t}},
        lambda t: Record(t),
        lambda t: Frozen([t]),
        lambda t: Opaque(t),
        lambda t: BaseModelOutputWithPast(last_hidden_state=t),
        lambda t: cache_of(t),
    ],
)
def test_a_tensor_in_any_object_is_reached(box: Callable[[torch.Tensor], object]) -> None:
    tensor = torch.zeros(2, requires_grad=True)
    assert any(found is tensor for found in reachable(((box(tensor),), {})))


def cache_of(tensor: torch.Tensor) -> Any:
    """The shape of a key/value cache: an object with a list of objects with tensors."""
    cache = Opaque()
    cache.layers = [Opaque(A), Opaque(tensor)]  # type: ignore[attr-defined]
    return cache
