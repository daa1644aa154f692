"""A few elements of what both runs of a layer compute, held against each other.

[Note: samples]
A layer that runs again in backward must compute what it has computed in forward, or gradients are silently
wrong. Random state, attributes and buffers are put back for the second run; a generator or a counter that
the layer finds elsewhere, among global variables say, is not. So 256 elements are kept of some tensors that
the first run saves: of the last one, which depends on nearly all that was computed before it, and of one
before it, which is another one in each visit. The second run must bring the same.

"The same" leaves room for kernels that add up in no fixed order. They change the last bits, and what follows
in the layer makes more of that. So an element may differ by 16 steps of bfloat16, or 2^13 steps of fp32, of
its own magnitude and the mean magnitude of the sample, and one in 32 may differ by more (a number close to a
threshold). Other random numbers, or another branch, change most elements by about their magnitude. NaN equals
NaN.

On the CPU samples are bytes, compared at once: equal ones, as nearly all are, cost nothing more. On a GPU
they are small tensors, and are compared when backward ends, where the host waits for gradients anyway.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn

#: Elements of a tensor that are kept.
SIZE = 256
#: What may differ of that many elements, one in `FEW`, is taken for noise.
FEW = 32

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNSIGNED = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}
_SHORT = (torch.bfloat16, torch.float16)


@lru_cache(maxsize=1 << 10)
def _numbers(itemsize: int, count: int) -> type[ctypes.Array[Any]]:
    """So many numbers in memory, of ``itemsize`` bytes each."""
    kind: type[ctypes.Array[Any]] = _UNSIGNED[itemsize] * count
    return kind


class KnownGraph(NamedTuple):
    """A graph that a layer has made, and what was found in it."""

    #: where the tensors that it saves come from, by their number
    origins: Mapping[int, object]
    #: whether it keeps nothing else
    are_all: bool
    #: the tensors in which there is something to see
    numbers: Collection[int]


class Selection:
    """Chooses of which saved tensors a visit takes samples: of the last one, and of another one by turns."""

    def __init__(self) -> None:
        self._turn = 0
        #: the numbers of the tensors that this visit takes samples of; all, None, where it is not known in
        #: which of them there is something to see
        self.chosen: frozenset[int] | None = None
        self._known: deque[KnownGraph] = deque(maxlen=4)
        #: those of the graph that was met last
        self.origins: Mapping[int, Any] = {}

    def known(self, origins: Mapping[int, object]) -> KnownGraph | None:
        """What was found in an earlier graph with these origins, or None."""
        for graph in self._known:
            if graph.origins == origins:
                self.origins = graph.origins
                return graph
        return None

    def learn(self, origins: Mapping[int, object], numbers: Collection[int], *, are_all: bool) -> None:
        """Remember what was found in a graph: whether references are all that it keeps, and the
        ``numbers`` of the tensors that are worth comparing, as far as was looked."""
        if self.chosen is None:
            self.origins = origins
            self._known.append(KnownGraph(origins, are_all, numbers))
            self.end(numbers)
        else:
            self.chosen = None

    def end(self, numbers: Collection[int]) -> None:
        """End a visit whose graph has tensors ``numbers`` that are worth comparing."""
        *others, last = sorted(numbers) or [-1]
        self._turn += 1
        self.chosen = frozenset((last, others[self._turn % len(others)] if others else last))


class Sample(NamedTuple):
    """Elements of one tensor: bytes, or on a GPU a tensor of float64."""

    values: bytes | torch.Tensor
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> Sample | None:
        """Elements of ``tensor``; None if it has no values, or none that can be read in place."""
        numel = tensor.numel()
        if (
            type(tensor) not in (torch.Tensor, nn.Parameter)
            or tensor.layout != torch.strided
            or tensor.is_nested
            or tensor.is_meta
            or tensor.is_neg()
            or not numel
        ):
            return None
        dtype = tensor.dtype
        if tensor.is_contiguous():
            # an odd step goes through the columns of a matrix too
            size, step = numel, (numel // SIZE - 1) | 1 if numel > SIZE else 1
            if tensor.is_cpu and not dtype.is_complex:
                # several times in each visit, so without operations of PyTorch
                memory = memoryview(_numbers(dtype.itemsize, numel).from_address(tensor.data_ptr()))
                return Sample(memory[: SIZE * step : step].tobytes(), dtype)
        else:
            # what lies between the rows of a part may never have been written
            size, stride = max(zip(tensor.shape, tensor.stride(), strict=True))
            step = max(size // SIZE, 1) * stride
        if tensor.requires_grad:
            tensor = tensor.detach()
        line = (tensor.conj() if tensor.is_conj() else tensor).as_strided((min(size, SIZE),), (step,))
        if dtype.is_complex:
            line = torch.view_as_real(line).flatten()
        if line.is_cpu:
            return Sample(line.view(_BITS[line.itemsize]).numpy().tobytes(), line.dtype)
        return Sample(line.to(torch.float64, copy=True), line.dtype)

    def numbers(self) -> torch.Tensor:
        """The elements in float64."""
        if isinstance(self.values, torch.Tensor):
            return self.values
        return torch.frombuffer(bytearray(self.values), dtype=self.dtype).to(torch.float64)


class Pair(NamedTuple):
    """Samples of one tensor in the first run of a layer and in the second."""

    layer: str
    first: Sample
    again: Sample
    #: whether the layer computes with fewer bits than fp32 somewhere
    is_short: bool

    def is_equal(self) -> bool:
        """Whether they are told to be equal without a look at the device."""
        return isinstance(self.first.values, bytes) and self.first.values == self.again.values


class Samples:
    """Pairs of samples that are still to be compared. [Note: samples]"""

    def __init__(self) -> None:
        self._pairs: list[Pair] = []

    def add(self, layer: str, first: Sample, again: Sample, *, is_short: bool) -> None:
        """Compare ``first`` with ``again``: now if both are bytes, else in `finish`.

        Raises RuntimeError if they differ by more than noise.
        """
        is_short = is_short or first.dtype in _SHORT
        pair = Pair(layer, first, again, is_short)
        if pair.is_equal():
            return
        if isinstance(first.values, bytes):
            _check([pair])
        else:
            self._pairs.append(pair)

    def finish(self) -> None:
        """Compare what is left. Raises RuntimeError if a layer has computed something else."""
        pairs, self._pairs = self._pairs, []
        if pairs:
            _check(pairs)


def another_way(layer: str) -> RuntimeError:
    """The error for a layer that does not do the same in both runs."""
    return RuntimeError(
        f"layer '{layer}' did not do the same when it ran again in backward (does it depend on a global "
        "variable, a mode, or a random number generator of its own? were its weights written through .data "
        "since its forward?): let that be an attribute of the layer, write weights after backward, or wrap "
        "with activations='keep'"
    )


def _check(pairs: Sequence[Pair]) -> None:
    alike: dict[tuple[int, bool], list[Pair]] = {}
    for pair in pairs:
        first, again = pair.first.numbers(), pair.again.numbers()
        if first.shape != again.shape:
            raise another_way(pair.layer)
        alike.setdefault((len(first), pair.is_short), []).append(pair)
    found = [(group, _differ(group, is_short)) for (_, is_short), group in alike.items()]
    # one copy to the host for all
    flags = torch.cat([flags for _, flags in found]).tolist()
    layers: Iterable[str] = (pair.layer for group, _ in found for pair in group)
    for layer, differs in zip(layers, flags, strict=True):
        if differs:
            raise another_way(layer)


def _differ(pairs: Sequence[Pair], is_short: bool) -> torch.Tensor:
    """For each of ``pairs``, which are equally long, whether its samples differ by more than noise."""
    first = torch.stack([pair.first.numbers() for pair in pairs])
    again = torch.stack([pair.again.numbers() for pair in pairs])
    tolerance = 16 * 2**-8 if is_short else 2**13 * 2**-23
    size = torch.maximum(first.abs(), again.abs())
    mean = size.nan_to_num(0.0, 0.0, 0.0).mean(1, keepdim=True)
    differs = (first - again).abs() > tolerance * (size + mean)
    differs |= (first.isnan() != again.isnan()) | (first.isinf() != again.isinf())
    return differs.sum(1) > first.shape[1] // FEW
