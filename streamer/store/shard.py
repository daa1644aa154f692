"""A unit's host memory: streamed weights, the rest of their fp32 masters, gradients, optimizer state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch

import streamer_native as native
from streamer.store.layout import Layout, Slice, Stretch
from streamer.store.on_disk import Allocate, Chunk, StateOnDisk
from streamer.store.purposes import (
    DIVIDED,
    GRADIENTS,
    MASTERS,
    REMAINDERS,
    SUMS,
    WEIGHTS,
    Purpose,
)
from streamer.store.shares import Division, Owned, Share, places_of, within
from streamer.store.weights_on_disk import WeightsOnDisk

#: Added to the bits of a master before they are split: see streamer_native.bfloat16.
HALF_OF_LAST_PLACE = 0x8000


def streamed(masters: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 ``masters`` as they are streamed in ``dtype``: see [Note: split master] for bf16."""
    if dtype != torch.bfloat16:
        return masters.to(dtype)
    bits = masters.nan_to_num(math.nan, math.inf, -math.inf).contiguous().view(torch.int32)
    # wraps around, as the kernel's unsigned arithmetic does
    return (bits + HALF_OF_LAST_PLACE >> 16).to(torch.int16).view(torch.bfloat16)


@cache
def _nothing(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype)


class HostShard:
    """All host buffers of one unit, as flat tensors by the name of their purpose. Ranks share them, and each
    updates its ``share``; a single process updates all.

    [Note: masters]
    Every trained element has an fp32 master. It keeps its master while its streamed bits stay the same.
    Writes need not be noticed, since the kernels, checkpoints and `unwrap` read the weight as it is:

    - bf16: the master is the present weight joined with the remainder. See [Note: split master] in
      `streamer_native/bfloat16.py`;
    - fp16: the stored master is valid if it rounds to the weight. If not, the weight was written, and is the
      master;
    - fp32: the weight is the master.

    Values in fp32 that are copied into a parameter (``copy_``, ``load_state_dict``) are the masters exactly:
    `load`.

    If several machines divide the state, each rank updates a part of its share. For `DIVIDED` purposes the
    machine holds only the ``parts`` of its ranks, one after the other.

    ``weight`` and ``gradient`` are uint8, laid out by ``layout``; remainders (uint16, of bf16 weights),
    masters (fp32, of fp16 weights) and ``sums`` (fp32, of gradients in bf16 or fp16) have one element per
    trainable parameter element, padding included. Tensors that the unit does not hold are empty.
    """

    def __init__(self, layout: Layout, owned: Owned, disk: StateOnDisk) -> None:
        """Without memory. ``disk`` has the optimizer's state that is on disk."""
        self.layout = layout
        self.owned = owned
        self.held: dict[str, torch.Tensor] = {}
        self.disk = disk
        #: the weights that are, or were, on disk
        self.weights_on_disk = WeightsOnDisk()
        #: a copy in memory of weights on disk (flat uint8, padded for the disk), empty if there is none
        self.weight_copy = _nothing(torch.uint8)
        #: called before weights or state change, by an update for instance
        self.before_change: Callable[[], None] | None = None

    def __getitem__(self, purpose: Purpose) -> torch.Tensor:
        """The piece for ``purpose`` in memory, empty if the unit holds none."""
        assert not self.is_on_disk(purpose), "to be read by `part`"
        return self.held.get(purpose.name, _nothing(purpose.dtype))

    @property
    def weight(self) -> torch.Tensor:
        """The weights in memory."""
        assert not self.is_out, "they are on disk"
        return self[WEIGHTS]

    @property
    def gradient(self) -> torch.Tensor:
        return self[GRADIENTS]

    @property
    def sums(self) -> torch.Tensor:
        return self[SUMS]

    @property
    def share(self) -> Share:
        """The share that this rank writes on its machine."""
        return self.owned.share

    @property
    def updated(self) -> Share:
        """The part that this rank updates."""
        return self.owned.parts[self.owned.rank]

    @property
    def is_divided(self) -> bool:
        """Whether machines divide the state, so that this one has a part of it."""
        return self.owned.is_divided

    @property
    def uses_disk(self) -> bool:
        """Whether some of the unit's weights or state belong on disk."""
        return bool(self.disk.purposes()) or not self.weights_on_disk.is_empty

    @property
    def is_out(self) -> bool:
        """Whether the weights are on disk and nowhere else."""
        return not self.weights_on_disk.is_empty and WEIGHTS.name not in self.held

    def own(self, stretches: Iterable[Stretch]) -> list[Stretch]:
        """The parts of ``stretches`` in the share."""
        return [own for stretch in stretches if (own := within(stretch, self.share.elements)).numel]

    def has(self, purpose: Purpose) -> bool:
        """Whether ``purpose`` is allocated, in its dtype."""
        if purpose.name in self.held:
            return self.held[purpose.name].dtype == purpose.dtype
        return self.disk.purposes().get(purpose.name) == purpose

    def is_on_disk(self, purpose: Purpose) -> bool:
        """Whether the unit's piece for ``purpose`` is on disk."""
        return purpose.name not in self.held and purpose.name in self.disk.purposes()

    def part(self, purpose: Purpose, slice: Slice) -> torch.Tensor:
        """A parameter's part of the piece for ``purpose``: a view, or a copy of what is on disk."""
        assert not (self.is_divided and purpose.name in DIVIDED), "to be read by way of all machines"
        if not self.is_on_disk(purpose):
            return purpose.part(slice, self[purpose])
        return self.disk.read(purpose, purpose.range(slice)).view(purpose.shape(slice))

    def set_part(self, purpose: Purpose, slice: Slice, values: torch.Tensor, *, alone: bool = False) -> None:
        """Set a parameter's part of the optimizer's state for ``purpose``, as far as this machine holds it,
        to ``values``, or all of it to one value. All ranks call it, unless this one does so ``alone`` for its
        machine. Until the next exchange, other ranks may read the old values."""
        wanted = purpose.range(slice)
        values = values.expand(purpose.shape(slice)).reshape(-1)
        if self.is_on_disk(purpose):
            self.disk.write(purpose, wanted, values.to(purpose.dtype), alone=alone)
            return
        for held, places in self.here(purpose, wanted):
            held.copy_(values[places])

    def here(self, purpose: Purpose, wanted: range) -> Iterator[tuple[torch.Tensor, slice]]:
        """The ``wanted`` elements (or blocks) of the unit's state that are on this machine, and their places
        among the wanted ones: views, or copies of state on disk."""
        is_on_disk = self.is_on_disk(purpose)
        for start, stop, at in places_of(self.owned.parts, purpose, wanted):
            if is_on_disk:
                held = self.disk.read(purpose, range(start, stop))
            else:
                held = self[purpose][at : at + stop - start]
            yield held, slice(start - wanted.start, stop - wanted.start)

    def weight_of(self, slice: Slice) -> torch.Tensor:
        """A parameter's weight: a view, or a copy of what is on disk."""
        return self.weights_on_disk.read(slice) if self.is_out else slice.view(self.weight)

    def fetch_copy(self, allocate: Allocate, *, read: bool = True) -> None:
        """Copy weights on disk to ``weight_copy``. Without ``read`` only allocate it: the caller sets all of
        them."""
        self.weight_copy = allocate(self.weights_on_disk.padded_bytes)
        if read:
            self.weights_on_disk.fetch(self.weight_copy)
        self.held[WEIGHTS.name] = self.weight_copy[: self.layout.nbytes].data

    def release_copy(self, *, write: bool) -> None:
        """Release the copy of `fetch_copy`, and write it to disk first if ``write``."""
        if write:
            self.weights_on_disk.store(self.weight_copy)
        self.weight_copy = _nothing(torch.uint8)
        del self.held[WEIGHTS.name]

    def with_whole(self, pieces: Mapping[str, torch.Tensor]) -> HostShard:
        """A shard of the same weights with the complete state in ``pieces``, by purpose; this one has a part
        of it."""
        whole = HostShard(self.layout, Division().owned(self.layout), self.disk)
        whole.weights_on_disk = self.weights_on_disk
        whole.held = {name: piece for name, piece in self.held.items() if name == WEIGHTS.name} | dict(pieces)
        return whole

    def load(self, slice: Slice, values: torch.Tensor) -> None:
        """Set the weight and, if the parameter is trained, its fp32 master to ``values``. One rank of each
        machine does so for all. [Note: masters]"""
        weight = slice.view(self.weight)
        if not slice.param.trainable or slice.dtype == torch.float32:
            weight.copy_(values)
            return
        if values.dtype == slice.dtype:
            # not through fp32, which would take the memory of all values again
            weight.copy_(values)
            self._be_own_master(slice)
            return
        exact = values.to(torch.float32).contiguous()
        if weight.dtype == torch.bfloat16:
            is_apart = self.is_on_disk(REMAINDERS) or self.is_divided
            remainder = (
                torch.empty(slice.param.shape, dtype=torch.uint16)
                if is_apart
                else slice.state(self[REMAINDERS])
            )
            native.split(array(exact), array(weight), array(remainder))
            if is_apart:
                self.set_part(REMAINDERS, slice, remainder, alone=True)
        else:
            self.set_part(MASTERS, slice, exact, alone=True)
            weight.copy_(exact)

    def _be_own_master(self, slice: Slice) -> None:
        """Make the master of a parameter equal to its weight."""
        if slice.dtype == torch.float16:
            self.set_part(MASTERS, slice, slice.view(self.weight), alone=True)
        else:
            exact = torch.tensor(HALF_OF_LAST_PLACE, dtype=torch.int32).to(torch.uint16)
            self.set_part(REMAINDERS, slice, exact, alone=True)

    def exact(self, slice: Slice) -> torch.Tensor:
        """A copy of the parameter in full precision: the fp32 master if it is trained, else the weight."""
        weight = self.weight_of(slice)
        if not slice.param.trainable or weight.dtype == torch.float32:
            return weight.clone()
        if weight.dtype == torch.float16:
            master = self.part(MASTERS, slice)
            is_kept = master.to(torch.float16).view(torch.int16) == weight.view(torch.int16)
            return torch.where(is_kept, master, weight.to(torch.float32))
        exact = torch.empty(slice.param.shape, dtype=torch.float32)
        native.join(array(weight), array(self.part(REMAINDERS, slice)), array(exact))
        return exact

    def joined(self, slice: Slice) -> torch.Tensor:
        """`exact` in PyTorch: slower, but may run on any thread, while kernels run only on the HOST lane."""
        if slice.dtype != torch.bfloat16 or not slice.param.trainable:
            return self.exact(slice)
        weight = self.weight_of(slice)
        high = weight.contiguous().view(torch.int16).to(torch.int32) << 16
        low = self.part(REMAINDERS, slice).view(torch.int16).to(torch.int32) & 0xFFFF
        # wraps around, as the kernel's unsigned arithmetic does
        master = ((high | low) - HALF_OF_LAST_PLACE).view(torch.float32)
        return torch.where(weight == 0, weight.to(torch.float32), master)

    def values(self, slice: Slice, dtype: torch.dtype) -> torch.Tensor:
        """A copy of the parameter in ``dtype``: the weight if that is its dtype, else the master, rounded."""
        exact = self.weight_of(slice).clone() if dtype == slice.dtype else self.exact(slice)
        return exact.to(dtype)

    def give_up(self) -> None:
        """Free everything, in memory and on disk."""
        self.held.clear()
        self.disk.drop_all()
        self.weights_on_disk = WeightsOnDisk()

    def about_to_change(self) -> None:
        """Called before a write: a reader in the background (a checkpoint) finishes first."""
        if self.before_change is not None:
            self.before_change()

    @property
    def range(self) -> range:
        """The elements of the unit's state that an update of this shard covers."""
        return self.updated.elements

    def begin(self, purpose: Purpose) -> int:
        """The number of the unit's element (or block) that corresponds to index 0 of the piece for
        ``purpose``."""
        if purpose.name not in DIVIDED:
            return 0
        before = sum(len(part.range(purpose)) for part in self.owned.parts[: self.owned.rank])
        return self.updated.range(purpose).start - before


class Window(HostShard):
    """A shard with state or weights on disk, for an update: ``pieces``, by the name of their purpose, are
    temporarily in memory. Pieces of state are those of one ``chunk``. The rest is that of ``whole``."""

    def __init__(
        self, whole: HostShard, pieces: Mapping[str, torch.Tensor], chunk: Chunk | None = None
    ) -> None:
        super().__init__(whole.layout, whole.owned, whole.disk)
        self.held = {**whole.held, **pieces}
        self._whole, self._chunk, self._pieces = whole, chunk, pieces

    def about_to_change(self) -> None:
        self._whole.about_to_change()

    @property
    def range(self) -> range:
        return super().range if self._chunk is None else range(self._chunk.start, self._chunk.stop)

    def begin(self, purpose: Purpose) -> int:
        if self._chunk is None or purpose.name not in self._pieces:
            return super().begin(purpose)
        return self._chunk.range(purpose).start


def with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous ``tensor`` in host memory, with a storage and a version counter of its own: they tell
    whether user code holds it, and whether it was written."""
    if tensor.numel() and tensor.device.type == "cpu":
        in_bytes = torch.from_numpy(tensor.view(-1).view(torch.uint8).numpy())
        return in_bytes.view(tensor.dtype).view(tensor.shape).data
    return tensor.data


def array(tensor: torch.Tensor) -> Any:
    """A contiguous tensor as the flat NumPy array that the kernels take: bf16 as its bits in uint16."""
    flat = tensor.view(-1)
    return flat.view(torch.uint16).numpy() if flat.dtype == torch.bfloat16 else flat.numpy()
