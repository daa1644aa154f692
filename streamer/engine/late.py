"""A graph that saves nothing until backward needs it.

[Note: recomputation]
A layer that runs again in backward goes back through the graph of its first forward. That one has saved
empty places; the second forward brings the tensors for them, in the same order, and is left as soon as the
last has come: what a layer computes after that (the last product of a transformer's layer, a third of its
forward) does not run again. So does `torch.utils.checkpoint`, since PyTorch 2.1.

That takes a graph that holds nothing else. One that does is dropped, and backward builds it anew from the
whole of the forward:

- where the storage of the slot has more owners after the first run than before it, something keeps weights
  that the slot will not hold in backward (a context of a custom function, a closure);
- custom functions, and saved tensors that went to other hooks than ours (a checkpoint inside of the layer),
  may keep what the layer has computed, which is what running it again is to spare.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, saved_tensors_hooks

from streamer.engine.gate import Gate
from streamer.engine.saved import Saved

#: By the kinds of a graph's nodes and the number of our places in it, whether they are all that it saves.
_known: dict[tuple[tuple[type, ...], int], bool] = {}
MOST_KNOWN = 1000


class _Place:
    """Where a graph looks for a tensor that it has saved; gone as soon as the graph needs it no more."""

    __slots__ = ("__weakref__", "kind", "saved")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.kind = tensor.shape, tensor.dtype
        self.saved: Saved | None = None


class _AllSaved(BaseException):
    """Ends a forward that is only run for what it saves. Not an Exception: a layer may catch those."""


class LateTensors:
    """The tensors that the graph of one run saves. [Note: recomputation]"""

    def __init__(self, layer: str, gate: Gate) -> None:
        self._layer = layer
        self._gate = gate
        self._places: list[weakref.ref[_Place]] = []

    def expected(self) -> saved_tensors_hooks:
        """Inside the block, graphs save places only."""

        def pack(tensor: torch.Tensor) -> _Place:
            place = _Place(tensor)
            self._places.append(weakref.ref(place))
            return place

        return saved_tensors_hooks(pack, self._unpack)

    def refused(self) -> saved_tensors_hooks:
        """Inside the block, graphs save nothing."""
        return saved_tensors_hooks(lambda _: None, self._refuse)

    def are_all_of(self, outputs: Iterable[torch.Tensor]) -> bool:
        """Whether the graph of ``outputs`` keeps nothing but our places."""
        nodes = _nodes(outputs)
        shape = tuple(map(type, nodes)), len(self._wanted())
        if shape not in _known:
            if len(_known) >= MOST_KNOWN:
                _known.clear()
            _known[shape] = not any(map(_is_custom, nodes)) and shape[1] == sum(
                map(_is_defined, (saved for node in nodes for saved in _saved_by(node)))
            )
        return _known[shape]

    def bring(self, forward: Callable[[], object]) -> None:
        """Run ``forward`` for what it saves, and no further.

        Raises RuntimeError if it does not save what the first one has.
        """
        wanted = self._wanted()
        last = max(wanted, default=-1)
        count = 0

        def pack(tensor: torch.Tensor) -> None:
            nonlocal count
            place = wanted.get(count)
            if place is not None:
                if place.kind != (tensor.shape, tensor.dtype):
                    raise self._ran_another_way()
                place.saved = Saved.now(tensor.detach())
            count += 1
            if count > last:
                raise _AllSaved

        if not wanted:
            return
        try:
            with saved_tensors_hooks(pack, self._refuse):
                forward()
        except _AllSaved:
            return
        if count <= last:
            raise self._ran_another_way()

    def drop(self) -> None:
        """Let go of what `bring` has brought."""
        for place in self._wanted().values():
            place.saved = None

    def _wanted(self) -> dict[int, _Place]:
        """The places that a graph still has, by their number."""
        return {number: place for number, ref in enumerate(self._places) if (place := ref()) is not None}

    def _ran_another_way(self) -> RuntimeError:
        return RuntimeError(
            f"layer '{self._layer}' did not do the same when it ran again in backward (does it depend on a "
            "global variable, or on a random number generator of its own?): let that be an attribute of the "
            "layer, or wrap with activations='keep'"
        )

    def _unpack(self, place: _Place) -> torch.Tensor:
        self._gate.check()
        assert place.saved is not None, "the gate opens after they have come"
        return place.saved.unchanged()

    def _refuse(self, _: None) -> torch.Tensor:
        self._gate.check()
        raise AssertionError("nobody goes back through the graph of a second run")


def _nodes(outputs: Iterable[torch.Tensor]) -> list[Node]:
    """The nodes of the graph of ``outputs``."""
    found: dict[Node, None] = {}
    nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
    while nodes:
        node = nodes.pop()
        if node not in found:
            found[node] = None
            nodes.extend(before for before, _ in node.next_functions if before is not None)
    return list(found)


def _is_custom(node: Node) -> bool:
    kind: type = type(node)
    return issubclass(kind, BackwardCFunction) or kind.__name__ == "CppFunction"


@cache
def _names(kind: type[Node]) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _saved_by(node: Node) -> Iterator[Any]:
    for name in _names(type(node)):
        saved = getattr(node, name)
        if isinstance(saved, tuple):
            yield from saved
        elif saved is not None:
            yield saved


def _is_defined(saved: Any) -> bool:
    """Whether it stands for a tensor, and not for one that was not needed or not given (a bias)."""
    try:
        saved.register_hooks(torch.Tensor.detach, torch.Tensor.detach)
    except RuntimeError as error:
        return "with value None" not in str(error)
    return True
