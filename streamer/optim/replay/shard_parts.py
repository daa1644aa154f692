"""Parts of a unit in host memory: the masters and gradients of adjacent parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

import streamer_native as native
from streamer.engine.paging.host_gradient import is_summed
from streamer.engine.unit import Unit
from streamer.optim.replay.rules import Memory, Rule, rule_of
from streamer.optim.replay.shadow import StandIns
from streamer.store.layout import Slice
from streamer.store.purposes import BF16, FP16, FP32, MASTERS, REMAINDERS
from streamer.store.shard import HostShard, array

#: Elements of a part at most, unless it is a single parameter.
PART_ELEMENTS = 1 << 22
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
        return self.start + (self.numel if self.kind.rule is None else 0)

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
        masters, gradients = self._masters(), self._gradients()
        first = self._part.slices[0].index
        for each, param in zip(self._part.slices, self.params, strict=True):
            place = slice(each.index - first, each.index - first + each.numel)
            stand_in = stand_ins[id(param)]
            stand_in.data = masters[place].view(each.param.shape)
            stand_in.grad = None if gradients is None else gradients[place].view(each.param.shape)

    def _masters(self) -> torch.Tensor:
        if self._part.dtype == FP32:
            return self._weight
        if self._part.dtype == FP16:
            # a weight that differs from its rounded master was written by the user's code: [Note: masters]
            is_kept = self._master_data.to(FP16).view(torch.int16) == self._weight.view(torch.int16)
            return self._master_data.copy_(torch.where(is_kept, self._master_data, self._weight.to(FP32)))
        native.join(array(self._weight), array(self._master_data), array(self._scratch[0]))
        return self._scratch[0]

    def _gradients(self) -> torch.Tensor | None:
        into = self._scratch[1]
        if self._scale is None:
            return None
        if self._gradient.dtype == BF16:
            native.widen(array(self._gradient), array(into), self._scale)
        elif self._gradient.dtype == FP32 and self._part.dtype == FP32 and self._scale == 1:
            return self._gradient
        else:
            into.copy_(self._gradient).mul_(self._scale)
        return into

    def each(self) -> Iterator[Memory]:
        """The memory of each parameter."""
        assert self._scale is not None, "rules are for steps"
        first = self._part.slices[0].index
        for each in self._part.slices:
            place = slice(each.index - first, each.index - first + each.numel)
            tensors = self._weight[place], self._master_data[place], self._gradient[place]
            yield Memory(*tensors, self._scale, torch.Size(each.param.shape))

    def store(self) -> None:
        if self._part.dtype == FP16:
            self._weight.copy_(self._master_data)
        elif self._part.dtype == BF16:
            native.split(array(self._scratch[0]), array(self._weight), array(self._master_data))
        self.store_in_place()

    def store_in_place(self) -> None:
        if self._part.dtype != FP32 and self._shard.is_on_disk(self._purpose):
            self._shard.disk.write(self._purpose, self._elements, self._master_data)

    def _read_master_data(self) -> torch.Tensor:
        if self._shard.is_on_disk(self._purpose):
            return self._shard.disk.read(self._purpose, self._elements)
        # if machines divide the state, the shard has a piece
        begin = self._elements.start - self._shard.begin(self._purpose)
        return self._shard[self._purpose].data[begin : begin + len(self._elements)]


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


def place(parts: Sequence[Part], *, together: bool) -> None:
    """Set the place of each part in the scratch: one after another if all are there ``together``."""
    start = 0
    for part in parts:
        part.start = start
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
                begun.start = part.start
                found.append(begun)
            else:
                begun.slices.append(each)
                begun.params.append(param)
    return found
