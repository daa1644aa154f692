"""Parts of a unit in host memory: the masters and gradients of adjacent parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

import streamer_native as native
from streamer.engine.paging.host_gradient import is_summed
from streamer.engine.unit import Unit
from streamer.optim.replay.rules import Memory, Rule, rule_of
from streamer.optim.replay.shadow import StandIns
from streamer.store.layout import ALIGN, Slice
from streamer.store.purposes import BF16, FP16, FP32, MASTERS, REMAINDERS
from streamer.store.shard import HostShard, array

#: Elements of a part at most, unless it is a single parameter.
PART_ELEMENTS = 1 << 22
#: Elements of a piece at most: its masters, gradients and state fit in a processor's cache.
PIECE_ELEMENTS = 1 << 19
#: Bytes of an element in the scratch: a master and a gradient.
SCRATCH_BYTES = 2 * FP32.itemsize


class Kind(NamedTuple):
    """The properties that the parameters of a part share. Those that a rule updates are of one group."""

    dtype: torch.dtype
    distance: int
    #: whether gradients are the fp32 sums of several
    summed: bool
    rule: Rule | None
    group: int


class Part:
    """Adjacent parameters of one kind in a unit, with their slices. Their masters and gradients are in the
    scratch from element ``start`` on."""

    def __init__(self, members: Sequence[tuple[Slice, nn.Parameter]], kind: Kind) -> None:
        self.slices = [slice for slice, _ in members]
        self.params = [param for _, param in members]
        self.dtype, self.kind = kind.dtype, kind
        self.start = 0
        #: whether it is updated in pieces, of which the scratch holds one
        self.in_pieces = False

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.slices[-1].index + self.slices[-1].padded - self.slices[0].index

    def takes(self, each: Slice) -> bool:
        """Whether there is room for a slice that follows the part's last one."""
        begin, last = self.slices[0].index, self.slices[-1]
        return last.index + last.padded == each.index and each.index + each.padded - begin <= PART_ELEMENTS

    @property
    def stop(self) -> int:
        """The first element of the scratch after the part. A rule needs no scratch."""
        if self.kind.rule is not None:
            return self.start
        return self.start + (min(self.numel, PIECE_ELEMENTS) if self.in_pieces else self.numel)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that an update of the part reads and writes, without the optimizer's state."""
        return self.numel * (3 * self.dtype.itemsize + 2 * SCRATCH_BYTES)


class OnShard:
    """The masters and gradients of a part in a host shard."""

    def __init__(
        self,
        part: Part,
        shard: HostShard,
        scratch: torch.Tensor,
        scale: float | None,
        gradient: torch.Tensor | None = None,
    ) -> None:
        """``gradient`` (flat uint8) replaces the shard's gradient, unless it is None. Gradients are
        multiplied by ``scale``; None for a part without gradients."""
        self.params, self._part, self._scale = part.params, part, scale
        self._scratch = scratch[:, part.start : part.stop]
        first = part.slices[0]
        places = slice(first.offset, first.offset + part.numel * first.dtype.itemsize)
        elements = slice(first.index, first.index + part.numel)
        # .data has version counters of its own, so that our writes are not mistaken for the user's
        self._weight = shard.weight.data[places].view(part.dtype)
        if scale is not None:
            source = shard.gradient if gradient is None else gradient
            self._gradient = (
                shard.sums.data[elements] if part.kind.summed else source.data[places].view(part.dtype)
            )
        self._shard, self._elements = shard, range(elements.start, elements.stop)
        #: completes 16-bit weights to masters
        self._purpose = MASTERS if part.dtype == FP16 else REMAINDERS
        self._master_data = self._read_master_data() if part.dtype != FP32 else self._weight

    def load(self, stand_ins: StandIns) -> None:
        self._piece(self._part.slices, self.params).load(stand_ins)

    def store(self) -> None:
        self.split(range(self._part.numel))
        self.store_in_place()

    def store_in_place(self) -> None:
        if self._part.dtype != FP32 and self._shard.is_on_disk(self._purpose):
            self._shard.disk.write(self._purpose, self._elements, self._master_data)

    def pieces(self) -> Iterator[Piece]:
        """Adjacent small parameters together, and each large one in flat pieces of equal length."""
        small = list[tuple[Slice, nn.Parameter]]()
        for each, param in zip(self._part.slices, self.params, strict=True):
            if small and each.index + each.padded - small[0][0].index > PIECE_ELEMENTS:
                yield self._piece(*zip(*small, strict=True))
                small = []
            if each.padded <= PIECE_ELEMENTS:
                small.append((each, param))
                continue
            number = -(-each.numel // PIECE_ELEMENTS)
            length = -(-each.numel // (number * ALIGN)) * ALIGN
            for start in range(0, each.numel, length):
                elements = range(start, min(start + length, each.numel))
                begin = self._place(each).start + start
                yield Piece(
                    self, [param], [range(begin, begin + len(elements))], [(len(elements),)], elements
                )
        if small:
            yield self._piece(*zip(*small, strict=True))

    def _piece(self, slices: Sequence[Slice], params: Sequence[nn.Parameter]) -> Piece:
        """Whole adjacent parameters."""
        return Piece(self, params, [*map(self._place, slices)], [each.param.shape for each in slices], None)

    def _place(self, each: Slice) -> range:
        """The elements of the part that are those of a parameter."""
        begin = each.index - self._elements.start
        return range(begin, begin + each.numel)

    def each(self) -> Iterator[Memory]:
        """The memory of each parameter."""
        assert self._scale is not None, "rules are for steps"
        for each in self._part.slices:
            place = _slice(self._place(each))
            tensors = self._weight[place], self._master_data[place], self._gradient[place]
            yield Memory(*tensors, self._scale, torch.Size(each.param.shape))

    def join(self, elements: range) -> torch.Tensor:
        """The masters of these elements of the part, in the scratch or in their own place."""
        weight, rest = self._weight[_slice(elements)], self._master_data[_slice(elements)]
        if self._part.dtype == FP32:
            return weight
        if self._part.dtype == FP16:
            # a weight that differs from its rounded master was written by the user's code: [Note: masters]
            is_kept = rest.to(FP16).view(torch.int16) == weight.view(torch.int16)
            return rest.copy_(torch.where(is_kept, rest, weight.to(FP32)))
        into = self._scratch[0, : len(elements)]
        native.join(array(weight), array(rest), array(into))
        return into

    def gradients(self, elements: range) -> torch.Tensor | None:
        """The fp32 gradients of these elements, in the scratch or in their own place."""
        if self._scale is None:
            return None
        gradient, into = self._gradient[_slice(elements)], self._scratch[1, : len(elements)]
        if gradient.dtype == BF16:
            native.widen(array(gradient), array(into), self._scale)
        elif gradient.dtype == FP32 and self._part.dtype == FP32 and self._scale == 1:
            return gradient
        else:
            into.copy_(gradient).mul_(self._scale)
        return into

    def split(self, elements: range) -> None:
        """Write the masters of these elements back, in memory."""
        weight, rest = self._weight[_slice(elements)], self._master_data[_slice(elements)]
        if self._part.dtype == FP16:
            weight.copy_(rest)
        elif self._part.dtype == BF16:
            native.split(array(self._scratch[0, : len(elements)]), array(weight), array(rest))

    def _read_master_data(self) -> torch.Tensor:
        if self._shard.is_on_disk(self._purpose):
            return self._shard.disk.read(self._purpose, self._elements)
        # if machines divide the state, the shard has a piece
        begin = self._elements.start - self._shard.begin(self._purpose)
        return self._shard[self._purpose].data[begin : begin + len(self._elements)]


@dataclass(frozen=True)
class Piece:
    """Elements of a part: adjacent parameters, or ``elements`` of one parameter as a flat vector."""

    part: OnShard
    params: Sequence[nn.Parameter]
    #: the elements of the part that are those of each parameter
    places: Sequence[range]
    shapes: Sequence[Sequence[int]]
    elements: range | None

    @property
    def _all(self) -> range:
        return range(self.places[0].start, self.places[-1].stop)

    def load(self, stand_ins: StandIns) -> None:
        masters, gradients = self.part.join(self._all), self.part.gradients(self._all)
        for param, place, shape in zip(self.params, self.places, self.shapes, strict=True):
            here = slice(place.start - self._all.start, place.stop - self._all.start)
            stand_in = stand_ins[id(param)]
            stand_in.data = masters[here].view(shape)
            stand_in.grad = None if gradients is None else gradients[here].view(shape)

    def store(self) -> None:
        self.part.split(self._all)


def _slice(elements: range) -> slice:
    return slice(elements.start, elements.stop)


#: A parameter and its place in its unit.
Member = tuple[Slice, nn.Parameter]


def members_of(optimizer: Optimizer, units: Iterable[Unit]) -> dict[int, list[Member]]:
    """The optimizer's parameters with room for a gradient, by unit, in the order of the unit's layout."""
    mine = {id(param) for group in optimizer.param_groups for param in group["params"]}
    found = {}
    for unit in units:
        every = zip(unit.layout.trainable, unit.trainable, strict=True)
        if members := [member for member in every if id(member[1]) in mine]:
            found[unit.index] = members
    return found


def parts_of(optimizer: Optimizer, members: Mapping[int, Sequence[Member]]) -> dict[int, list[Part]]:
    """``members`` by unit, in parts of at most `PART_ELEMENTS`, each of adjacent parameters."""
    group_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    found = dict[int, list[Part]]()
    for index, of_unit in members.items():
        parts = found[index] = []
        for each, param in of_unit:
            number = group_of[id(param)]
            rule = rule_of(type(optimizer), optimizer.param_groups[number], each.dtype)
            kind = Kind(each.dtype, each.distance, is_summed(param), rule, -1 if rule is None else number)
            if parts and parts[-1].kind == kind and parts[-1].takes(each):
                parts[-1].slices.append(each)
                parts[-1].params.append(param)
            else:
                parts.append(Part([(each, param)], kind))
    return found


def place(parts: Sequence[Part], *, together: bool, in_pieces: bool) -> None:
    """Set the place of each part in the scratch: one after another if all are there ``together``; a piece of
    it at a time if they are updated ``in_pieces``."""
    start = 0
    for part in parts:
        part.start, part.in_pieces = start, in_pieces
        if together:
            start = part.stop


def used_parts(parts: Iterable[Part], positions: Mapping[int, int], used: Sequence[bool]) -> list[Part]:
    """``parts`` without parameters that are not ``used``, by their ``positions`` in the unit."""
    found = list[Part]()
    for part in parts:
        begun: Part | None = None
        for each, param in zip(part.slices, part.params, strict=True):
            if not used[positions[id(param)]]:
                begun = None
            elif begun is None:
                begun = Part([(each, param)], part.kind)
                begun.start, begun.in_pieces = part.start, part.in_pieces
                found.append(begun)
            else:
                begun.slices.append(each)
                begun.params.append(param)
    return found
