"""Tensors out of nested values and back in."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutputWithPast

from streamer.engine.tensors.nested import fingerprint, flatten


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
X, Y, Z = (torch.full((3,), 10.0 + i) for i in range(3))


@pytest.mark.parametrize(
    ("value", "tensors"),
    [
        (A, [A]),
        ((A, 1, B), [A, B]),
        ([A, [B, "text"], ()], [A, B]),
        ({"b": B, "a": A, "n": None}, [B, A]),
        (Pair(A, B), [A, B]),
        (Plain(1, A), [A]),
        (Record(A), [A]),
        (Frozen((A, B)), [A, B]),
        (Slotted({"a": A}), [A]),
        (OrderedDict(z=A, a=B), [A, B]),
        (defaultdict(list, a=[A]), [A]),
        (((A, {"x": [B, Pair(C, Frozen(A))]}), Record([A])), [A, B, C]),
        (torch.sort(torch.zeros(2)), None),
        (BaseModelOutputWithPast(last_hidden_state=A, hidden_states=(B, C)), [A, B, C]),
        (None, []),
        ("text", []),
    ],
)
def test_flatten_takes_each_tensor_once_in_order(value: object, tensors: list[torch.Tensor] | None) -> None:
    taken, rebuild = flatten(value)
    if tensors is not None:
        assert [id(tensor) for tensor in taken] == [id(tensor) for tensor in tensors]
    again, _ = flatten(rebuild(taken))
    assert [id(tensor) for tensor in again] == [id(tensor) for tensor in taken]
    assert type(rebuild(taken)) is type(value)


def rebuilt(value: object, *replacements: torch.Tensor) -> Any:
    tensors, rebuild = flatten(value)
    assert len(tensors) == len(replacements)
    return rebuild(replacements)


def test_tuples_and_lists() -> None:
    value = (A, [B, 3], "text")
    result = rebuilt(value, X, Y)
    assert result == (X, [Y, 3], "text")
    assert value[0] is A and value[1] == [B, 3], "what it was built from is left alone"


def test_named_tuples() -> None:
    for kind in (Pair, Plain):
        result = rebuilt(kind(A, 5), X)
        assert type(result) is kind
        assert result.left is X and result.right == 5


def test_torch_return_types() -> None:
    result = rebuilt(torch.sort(torch.zeros(2)), X, Y)
    assert type(result) is torch.return_types.sort
    assert result.values is X and result.indices is Y


def test_dicts_keep_their_order_and_class() -> None:
    result = rebuilt(OrderedDict(z=1, b=A, a=B), X, Y)
    assert type(result) is OrderedDict
    assert list(result.items()) == [("z", 1), ("b", X), ("a", Y)]
    default = rebuilt(defaultdict(list, a=A), X)
    assert default["a"] is X and default["new"] == []


@pytest.mark.parametrize("kind", [Record, Frozen, Slotted])
def test_dataclasses(kind: Callable[..., Any]) -> None:
    note = object()
    value = kind((A, B), note)
    result = rebuilt(value, X, Y)
    assert type(result) is kind
    assert result.value[0] is X and result.value[1] is Y and result.note is note
    assert value.value == (A, B), "what it was built from is left alone"


def test_model_output() -> None:
    value = BaseModelOutputWithPast(last_hidden_state=A, hidden_states=(B, C))
    result = rebuilt(value, X, Y, Z)
    assert type(result) is BaseModelOutputWithPast
    assert result.last_hidden_state is X and result["last_hidden_state"] is X and result[0] is X
    assert result.hidden_states[0] is Y and result["hidden_states"][1] is Z
    assert list(result) == ["last_hidden_state", "hidden_states"]
    assert result.past_key_values is None
    assert value.last_hidden_state is A and value["last_hidden_state"] is A


def test_identity_of_repeated_tensors() -> None:
    tensors, rebuild = flatten(((A, A), {"query": A, "key": B}))
    assert tensors == [A, B]
    (first, second), named = rebuild([X, Y])
    assert first is X and second is X and named["query"] is X and named["key"] is Y


def test_equal_tensors_stay_two() -> None:
    tensors, _ = flatten((A, A.clone(), A[:]))
    assert len(tensors) == 3


def test_untouched_values_are_the_same_objects() -> None:
    inner, opaque = [1, {"a": None}], Opaque(A)
    kept = (inner, Frozen("value"), {"b": ()}, torch.Size([1, 2]), opaque, Record, int)
    assert rebuilt(kept) is kept
    result = rebuilt((A, kept), X)
    assert result[1] is kept
    assert opaque.tensors == [A]


def test_rebuild_may_be_called_again() -> None:
    tensors, rebuild = flatten([A, [B]])
    first, second = rebuild([X, Y]), rebuild([Y, Z])
    assert first == [X, [Y]] and second == [Y, [Z]]
    assert first is not second and first[1] is not second[1]
    assert len(tensors) == 2


def changed(value: object, change: Callable[[], object]) -> bool:
    before = fingerprint(value)
    assert before == fingerprint(value), "looking changes nothing"
    change()
    return fingerprint(value) != before


def test_fingerprint_of_untouched_values() -> None:
    value = (new(1)[0], [new(1)[0], {"a": Opaque(*new(2))}], Frozen(new(1)[0]), 1, None, "text")
    assert not changed(value, lambda: value[0] + 1)
    assert not changed(value, lambda: value[0].detach().view(1, 2))


@pytest.mark.parametrize("write", [lambda t: t.add_(1), lambda t: t.zero_(), lambda t: t[:1].fill_(3)])
@pytest.mark.parametrize(
    "box",
    [
        lambda t: t,
        lambda t: (t,),
        lambda t: (1, [t]),
        lambda t: {"a": {"b": t}},
        lambda t: Record(t),
        lambda t: Frozen([t]),
        lambda t: Opaque(t),
        lambda t: BaseModelOutputWithPast(last_hidden_state=t),
    ],
)
def test_fingerprint_sees_in_place_writes(
    box: Callable[[torch.Tensor], object], write: Callable[[torch.Tensor], object]
) -> None:
    tensor = torch.zeros(2)
    assert changed(((box(tensor),), {}), lambda: write(tensor))


def test_fingerprint_sees_writes_through_a_detached_view() -> None:
    tensor = torch.zeros(2, requires_grad=True)
    assert changed([tensor], lambda: tensor.detach().add_(1))


def test_fingerprint_sees_appends_and_exchanges() -> None:
    kept = [A]
    assert changed(((kept,), {}), lambda: kept.append(B))
    assert changed(((kept,), {}), lambda: kept.pop())
    empty: list[torch.Tensor] = []
    assert changed(((), {"collected": empty}), lambda: empty.append(A))
    named = {"a": A}
    assert changed((named,), lambda: named.update(a=B))
    assert changed((named,), lambda: named.update(b=B))


def test_fingerprint_sees_a_changed_opaque_object() -> None:
    opaque = Opaque(A)
    assert changed(((opaque,), {}), lambda: opaque.tensors.append(B))
    assert changed(((opaque,), {}), lambda: setattr(opaque, "keys", C))
    assert changed(((), {"cache": opaque}), lambda: setattr(opaque, "keys", A))


def test_fingerprint_sees_into_a_cache_of_layers() -> None:
    """The shape of a key/value cache: an object with a list of objects with tensors."""
    cache = Opaque()
    cache.layers = [Opaque(A), Opaque(B)]  # type: ignore[attr-defined]
    assert changed(((A, cache), {}), lambda: cache.layers[1].tensors.append(C))  # type: ignore[attr-defined]


def test_fingerprint_ends_on_a_value_that_contains_itself() -> None:
    loop: list[object] = [A]
    loop.append(loop)
    assert set(fingerprint(loop)) == {(id(A), A._version)}


def test_fingerprint_of_inference_tensors() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(2)
    assert fingerprint((tensor,)) == [(id(tensor), 0)]
