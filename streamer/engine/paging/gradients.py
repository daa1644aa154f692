"""A layer's gradient from its backward to its update: fill, reduce, measure, copy out.

Layer 1 goes backward in weight slot 1 and gradient slot 0, as its ops print (unit, kind, slot):

    1B@1               fill, reduce and measure, on the device
    1OFFLOAD_GRAD@0    copy out, to host memory

- *Fill*: the layer's backward writes the gradients of its parameters into a gradient slot.
- *Reduce*: one process has the whole gradient already. Several ranks average theirs: [Note: ranks].
- *Measure*: the sum of squares is taken while the gradient is on the device: [Note: norms].
- *Copy out*: the gradient is copied to host memory, where it is ``p.grad`` until ``optimizer.step``. If there
  is one already, both are added up. With ``update="backward"`` there is no ``p.grad``: the gradient passes
  through a ring of a few host buffers, and the layer is updated from it at once. Host memory then holds a few
  layers' gradients whatever the depth.

Autograd computes the gradients of the root unit. When backward ends they are collected in a buffer on the
device, where they are ``p.grad``; ``optimizer.step`` copies them to the host.

Clipping multiplies nothing: `Gradients.factor` is the pending factor of the gradients. The update's kernel
multiplies by it in its pass, or `settle` does if user code accesses a gradient before that.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

import streamer_native as native
from streamer.engine.guard import Access, Kind, Tag, as_plain
from streamer.engine.paging.across_ranks import AcrossRanks, Reduced
from streamer.engine.paging.early_updates import EarlyUpdates
from streamer.engine.paging.host_gradient import Assigned, HostGradient, is_summed
from streamer.engine.paging.host_memory import HostMemory
from streamer.engine.paging.norms import Norms, Squares, sum_squares
from streamer.engine.paging.pager import Pager
from streamer.engine.schedule import op as ops
from streamer.engine.schedule.hazards import Issuer
from streamer.engine.schedule.op import ROOT
from streamer.engine.unit import Unit
from streamer.errors import warn
from streamer.store.host import HostStore
from streamer.store.layout import Stretch
from streamer.store.ledger import num_grad_slots, require
from streamer.store.purposes import FP32, GRADIENTS, STAGING, STAGING_BUFFERS, SUMS, host_bytes
from streamer.store.shard import array
from streamer.torch_private import storage_id

#: The number of steps with gradients of one layer kept, from which on a warning states their memory.
MANY = 4


class GradientSlots:
    """``count`` device buffers of ``nbytes``, used in rotation."""

    def __init__(self, count: int, nbytes: int, allocate: Callable[[int], torch.Tensor]) -> None:
        self.buffers = [allocate(nbytes) for _ in range(count)]
        self._next = 0
        self._taken: set[int] = set()

    @contextmanager
    def taken(self) -> Iterator[int]:
        """The least recently used slot that is not taken; it is taken inside the block."""
        count = len(self.buffers)
        in_turn = ((self._next + step) % count for step in range(count))
        slot = next(slot for slot in in_turn if slot not in self._taken)
        self._next = (slot + 1) % count
        self._taken.add(slot)
        try:
            yield slot
        finally:
            self._taken.discard(slot)


class _OfLayer:
    """Gradients of a layer, in host memory."""

    def __init__(self, unit: Unit, store: HostStore, gradients: Gradients) -> None:
        self._shard = store.shards[unit.index]
        self._unit = unit
        self._store = store
        self._gradients = gradients

    @property
    def is_shared(self) -> bool:
        return self._store.is_shared

    def gradient(self) -> torch.Tensor:
        return self._shard.gradient

    def sums(self) -> torch.Tensor:
        return self._gradients.sums(self._unit)

    def exchange(self, memory: torch.Tensor | None, *, summed: bool) -> torch.Tensor:
        purpose = SUMS if summed else GRADIENTS
        if memory is None:
            self._gradients.check_kept(self._unit, host_bytes([self._shard.layout], [purpose]))
        return self._store.exchange(self._shard, purpose, memory)


class _OfRoot:
    """Gradients of the root unit, on the device."""

    is_shared = False

    def __init__(self, root: Unit, issuer: Issuer, gradients: Gradients) -> None:
        self._root = root
        self._buffer = issuer.backend.device_buffer
        self._gradients = gradients
        self.held = {False: self._buffer(root.layout.grad_nbytes), True: self._buffer(0)}

    def gradient(self) -> torch.Tensor:
        return self.held[False]

    def sums(self) -> torch.Tensor:
        self._gradients.sums(self._root)  # their host copies need room, too
        self.held[True] = self._buffer(4 * self._root.layout.state_numel).view(FP32).data
        return self.held[True]

    def exchange(self, memory: torch.Tensor | None, *, summed: bool) -> torch.Tensor:
        was = self.held[summed]
        self.held[summed] = self._buffer(was.nbytes).view(was.dtype).data if memory is None else memory
        return self.held[summed]


class Gradients:
    """The gradients of all units: their slots on the device, and the tensors of ``p.grad``.

    With ``sum_in_fp32`` several gradients of a shorter dtype are added up in fp32: see [Note: sums].
    Gradients ``are_kept`` until the step, unless ``early`` updates layers in backward.
    """

    def __init__(
        self,
        issuer: Issuer,
        units: Sequence[Unit],
        root: Unit,
        store: HostStore,
        pager: Pager,
        across: AcrossRanks,
        memory: HostMemory,
        *,
        num_slots: int,
        sum_in_fp32: bool,
        in_backward: bool,
        access: weakref.ref[Access],
    ) -> None:
        self._issuer = issuer
        self._units = units
        self._root = root
        self._store = store
        self._pager = pager
        self._across = across
        self._memory = memory
        self._nbytes = max(unit.layout.grad_nbytes for unit in units)
        self.slots = GradientSlots(num_grad_slots(num_slots), self._nbytes, issuer.backend.device_buffer)
        self.are_kept = not in_backward
        self.early = EarlyUpdates()
        #: the pending factor of the gradients in ``p.grad``
        self.factor = 1.0
        self._of_root = _OfRoot(root, issuer, self)
        is_planned = issuer.backend.device.type == "meta"
        self.held = {
            unit.index: HostGradient(
                unit,
                self._of_root if unit is root else _OfLayer(unit, store, self),
                None if is_planned else Tag(access, Kind.GRADIENT, unit.index),
                sums_in_fp32=sum_in_fp32,
            )
            for unit in (*units, root)
        }
        self.norms = Norms(issuer, units, root, self.held)
        #: host buffers of gradients that are consumed on arrival
        self._staging: list[torch.Tensor] = (
            store.staging(STAGING_BUFFERS, self._nbytes) if in_backward else []
        )
        self._next = 0
        #: by unit, the sums of squares of gradients that were added up on the host, one for each part
        self._added: dict[int, list[float]] = {}
        #: units with a gradient that was not waited for: a backward is running, or has failed
        self._under_way: set[int] = set()
        #: whether autograd has added to gradients of the root since they were last collected, and whether
        #: user code has written them since then
        self._root_is_added_to = self._root_is_written = False
        self._has_warned = False

    def check(self, unit: Unit) -> None:
        """Raise RuntimeError if a gradient of ``unit`` cannot be taken now."""
        if not self.are_kept:
            self.early.check(unit)

    # a layer's backward

    def slot_for(self, unit: Unit) -> AbstractContextManager[int | None]:
        """A gradient slot for ``unit`` inside the block; None for one that trains nothing."""
        self.settle()
        return self.slots.taken() if unit.layout.grad_nbytes else nullcontext()

    def in_slot(self, slot: int | None) -> torch.Tensor:
        """Gradient slot ``slot`` (flat uint8), which a backward is about to fill; an empty one for None."""
        if slot is None:
            return self._of_root.gradient()[:0]
        gradient = self.slots.buffers[slot]
        if self._issuer.backend.poison:
            # bytes of ones are NaN in every floating-point format
            gradient.fill_(255)
        return gradient

    def measure(self, unit: Unit, gradient: torch.Tensor, used: Sequence[bool]) -> torch.Tensor:
        """The sum of squares of ``gradient``, for the trainable parameters that are ``used``. With several
        ranks it is taken after the average. Part of the unit's backward."""
        if self._across.ranks.is_alone:
            return sum_squares(unit.layout, gradient, used)
        for slice, is_used in zip(unit.layout.trainable, used, strict=True):
            if not is_used:
                slice.view(gradient).zero_()
        return gradient[:0]

    @as_plain
    def copy_out(
        self, unit: Unit, slot: int | None, gradient: torch.Tensor, used: Sequence[bool], squares: Squares
    ) -> bool:
        """Reduce ``gradient``, in gradient slot ``slot``, and copy it to the host. Returns whether the unit's
        update was issued."""
        if slot is None:
            return False
        reduced = None
        if not self._across.ranks.is_alone:
            if self.are_kept:
                # once the other ranks have this rank's gradient, their shares may overwrite the last gradient
                self._make_room(unit, [param.grad is None for param in unit.trainable])
            squares = reduced = self._across.reduce(unit, slot, gradient, used)
            used = reduced.wanted
        if not any(used):
            return False
        if not self.are_kept:
            self._update(unit, slot, used, reduced)
            return True
        self._under_way.add(unit.index)
        if any(param.grad is not None for param in unit.trainable):
            self._add(unit, slot, used, squares)
        else:
            self._make_room(unit, used)
            share = self._store.shards[unit.index].share.gradient
            source, into = self.slots.buffers[slot][share], self._gradient(unit)[share]
            op = ops.offload_grad(unit.index, slot, ops.gradient(unit.index), source.numel())
            self._issuer.issue(op, lambda: self._issuer.backend.copy(into, source))
            self.held[unit.index].set_grads(used)
            self.norms.keep(unit, squares)
        return False

    def _make_room(self, unit: Unit, selected: Sequence[bool], *, summed: bool = False) -> None:
        held = self.held[unit.index]
        if any(selected) and held.is_kept():
            # running work also holds the memory
            self._issuer.wait((ops.gradient(unit.index),), to_write=True)
        held.make_room(selected, summed=summed)

    def _update(self, unit: Unit, slot: int, used: Sequence[bool], reduced: Reduced | None) -> None:
        """Copy the gradient in ``slot`` to the ring, and update the unit from it."""
        # call all optimizers before anything is issued: if one raises, the layer is unchanged
        updates = self.early.ask(unit, used)
        self._pager.parameters.begin_flight(unit)
        number, self._next = self._next, (self._next + 1) % len(self._staging)
        share = self._store.shards[unit.index].updated.gradient
        staged, source = self._staging[number], self.slots.buffers[slot][share]
        offload = ops.offload_grad(unit.index, slot, ops.staging(number), source.numel())
        self._issuer.issue(offload, lambda: self._issuer.backend.copy(staged[share], source))
        for update in updates:
            update.begin()
            work = partial(update.work, gradient=staged, reduced=reduced)
            self._pager.update(unit, work, update.nbytes, ops.staging(number))
        self._across.after_update(unit)

    @as_plain
    def _add(self, unit: Unit, slot: int, used: Sequence[bool], squares: Squares) -> None:
        """Add the gradient in ``slot`` to the present gradients, in one pass over each."""
        held = self.held[unit.index]
        if held.assigned():
            self.take_in()
        params = unit.trainable
        has_grad = [param.grad is not None for param in params]
        both = [is_used and has for is_used, has in zip(used, has_grad, strict=True)]
        summed = [is_summed(param) for param in params]
        begin = [b and held.sums_in_fp32(p) and not s for b, p, s in zip(both, params, summed, strict=True)]
        add_to_sum = [b and already for b, already in zip(both, summed, strict=True)]
        in_place = [b and not x and not y for b, x, y in zip(both, begin, add_to_sum, strict=True)]
        new = [is_used and not has for is_used, has in zip(used, has_grad, strict=True)]

        self._make_room(unit, new)
        self._make_room(unit, begin, summed=True)
        staged = self._stage(unit, slot)
        gradient = self._gradient(unit)
        sums = self.sums(unit).data if any(begin) or any(add_to_sum) else gradient
        layout, own = unit.layout, self._store.shards[unit.index].own
        found = self._added[unit.index] = list[float]()

        def accumulate() -> None:
            for s in own(layout.stretches(begin)):
                found.append(native.add(array(s.state(sums)), *_arrays(s, gradient, staged)))
            for s in own(layout.stretches(add_to_sum)):
                found.append(native.accumulate(array(s.state(sums)), *_arrays(s, staged)))
            for s in own(layout.stretches(in_place)):
                found.append(native.accumulate(*_arrays(s, gradient, staged)))
            for s in own(layout.stretches(new)):
                s.view(gradient).copy_(s.view(staged))

        # reads the staged gradient and the host gradient, writes the latter
        self._issuer.issue(ops.accumulate(unit.index, slot, 3 * layout.grad_nbytes), accumulate)
        held.set_grads(begin, summed=True)
        held.set_grads(new)
        is_all = both == has_grad and not any(new)
        self.norms.keep(unit, (lambda: sum(found)) if is_all else None)

    def _stage(self, unit: Unit, slot: int) -> torch.Tensor:
        """Copy ``slot`` to the staging buffer of the same number."""
        if not self._staging:
            self._check_sums({STAGING: len(self.slots.buffers) * self._nbytes})
            self._staging = self._store.staging(len(self.slots.buffers), self._nbytes)
        share = self._store.shards[unit.index].share.gradient
        staged, source = self._staging[slot], self.slots.buffers[slot][share]
        op = ops.offload_grad(unit.index, slot, ops.staging(slot), source.numel())
        self._issuer.issue(op, lambda: self._issuer.backend.copy(staged[share], source))
        return staged

    # the end of a backward

    def finish_backward(self) -> None:
        """Block until the gradients of all layers are in host memory, and collect the root's."""
        self._across.check_backward()
        self._issuer.wait(ops.gradient(unit.index) for unit in self._units if unit.layout.grad_nbytes)
        self._under_way.clear()
        self._across.finish_backward(self.held, self.norms, self._added)
        self._added.clear()
        self.norms.arrived()
        self._collect_root()
        self.early.finish_backward()

    @as_plain
    def _collect_root(self) -> None:
        """Collect the root's gradients in their buffer."""
        self._root_is_added_to = self._root_is_written = False
        self.norms.keep(self._root, None)
        root = self.held[ROOT]
        if assigned := root.assigned():
            self.before_write(self._root)
            root.take_in(self._apart(assigned))

    @as_plain
    def before_adding(self, unit: Unit, position: int) -> None:
        """Autograd is about to add to the gradient of a parameter itself: one of the root, or one that was
        used outside of its layer. Raises RuntimeError if there is no room for that."""
        held = self.held[unit.index]
        held.place(position, summed=False)
        self._root_is_added_to |= unit is self._root
        self.settle()
        self.norms.keep(unit, None)
        if unit.params[position].grad is not None:
            self._wait_to_write(unit)
            held.widen(position)

    @as_plain
    def narrow(self, params: Container[torch.Tensor]) -> None:
        """Convert gradients of ``params`` to the dtypes of the parameters, as optimizers other than ours
        expect."""
        for unit in (*self._units, self._root):
            for position, param in enumerate(unit.trainable):
                if param in params and is_summed(param):
                    self._wait_to_write(unit)
                    self.held[unit.index].narrow(position)

    # the step

    @as_plain
    def take_in(self) -> None:
        """Copy gradients that the user has assigned (``p.grad = x``) into our buffers. All are read first,
        since two layers' gradients may be swapped."""
        assigned = {index: self._apart(held.assigned()) for index, held in self.held.items()}
        of_layers = [each for index, found in assigned.items() for each in found if index != ROOT]
        if of_layers:
            self._across.ranks.exchange("taking over gradients that were put in place of ours")
        for index, found in assigned.items():
            if found:
                unit = self._root if index == ROOT else self._units[index]
                self.before_write(unit)
                self.held[index].take_in(found)
                self.norms.keep(unit, None)

    def _apart(self, assigned: Sequence[Assigned]) -> list[Assigned]:
        """``assigned``, with copies of gradients that are in another parameter's place, which may be written
        first."""
        ours = (
            {storage_id(memory) for held in self.held.values() for memory in held.memories()}
            if assigned
            else ()
        )
        return [
            each._replace(grad=each.grad.clone()) if storage_id(each.grad) in ours else each
            for each in assigned
        ]

    def offload_root(self) -> None:
        """Copy the root's gradient to the host."""
        self._issuer.mark(ops.collect())
        shard, memory = self._store.shards[ROOT], self._of_root.held
        share = shard.share.gradient
        pairs = [(shard.gradient[share], memory[False][share])]
        if any(is_summed(param) for param in self._root.params):
            elements = slice(shard.share.start, shard.share.stop)
            of_sums = shard.sums[elements], memory[True][elements]
            pairs.append((of_sums[0].view(torch.uint8), of_sums[1].view(torch.uint8)))

        def copy() -> None:
            for into, source in pairs:
                self._issuer.backend.copy(into, source)

        nbytes = sum(into.nbytes for into, _ in pairs)
        self._issuer.issue(ops.offload_grad(ROOT, ROOT, ops.gradient(ROOT), nbytes), copy)

    def are_finite(self) -> bool:
        """Whether all gradients are finite, and the factor."""
        return math.isfinite(self.factor) and self.norms.is_finite()

    def zero_grad(self) -> None:
        """Gradients are about to be dropped."""
        self._root_is_added_to = self._root_is_written = False
        self.early.zero_grad()
        self._across.forget()

    def rescale(self, factor: float) -> None:
        """Multiply all gradients by ``factor``, when they are next used."""
        self.factor *= factor
        # tensors that share their memory would hold the old values
        if self.aliased():
            self.settle()

    @as_plain
    def settle(self) -> None:
        """Multiply the gradients by `factor`: gradients without it are about to be added, or user code is
        about to access them.

        An update does not do so: as in PyTorch, gradients stay clipped until they are dropped.
        """
        factor, self.factor = self.factor, 1.0
        if factor == 1.0:
            return
        for unit in (*self._units, self._root):
            held = self.held[unit.index]
            held.copy_out(factor)
            if gradients := held.held():
                self.norms.written(unit, shrinks=abs(factor) <= 1)
                self._multiply(unit, gradients, factor)
        self._across.ranks.exchange("gradients are scaled")

    def _multiply(self, unit: Unit, gradients: Sequence[torch.Tensor], factor: float) -> None:
        self._wait_to_write(unit)
        if unit is self._root or self._across.ranks.is_alone:
            torch._foreach_mul_([*gradients], factor)
            return
        self._across.ranks.exchange(f"scaling gradients of '{unit.name}' by {factor}")
        shard = self._store.shards[unit.index]
        for place, param in self.held[unit.index].pairs():
            if any(param.grad is gradient for gradient in gradients):
                for own in shard.own([place]):
                    mine = own.state(shard.sums) if is_summed(param) else own.view(shard.gradient)
                    mine.mul_(factor)

    # user code

    def before_access(self, unit: Unit) -> None:
        """Return when user code may read and write the gradient of ``unit``."""
        self.settle()
        if unit.index in self._under_way or self._pager.parameters.of[unit.index].in_flight:
            self._wait_to_write(unit)
            self._under_way.discard(unit.index)

    def touched(
        self, unit: Unit, view: torch.Tensor, *, wrote: bool, is_aliased: bool, shrinks: bool
    ) -> None:
        """User code has got the memory of a gradient of ``unit``, or ``wrote`` it. ``shrinks`` means that it
        only multiplied the gradient by a number from -1 to 1."""
        if is_aliased:
            self.held[unit.index].note_alias(view)
        self.norms.written(unit, shrinks=shrinks)
        self._root_is_written |= wrote and unit is self._root

    def check_unwritten(self) -> None:
        """Raise RuntimeError if gradients were written since a backward that has already updated the
        layers."""
        if self.are_kept:
            return
        if self._root_is_written or (not self._root_is_added_to and self.held[ROOT].assigned()):
            raise RuntimeError(
                "gradients were written (by clip_grad_norm_?) between backward and step(), but "
                "update='backward' has updated the layers before: wrap with update='step' to clip or to "
                "write gradients"
            )

    def aliased(self) -> list[Unit]:
        """The units whose gradients user code holds in tensors other than ``p.grad``."""
        return [unit for unit in (*self._units, self._root) if self.held[unit.index].is_aliased()]

    def before_write(self, unit: Unit) -> None:
        """Return when the gradient of ``unit`` may be written by the caller's thread."""
        self.settle()
        self._wait_to_write(unit)

    def _wait_to_write(self, unit: Unit) -> None:
        if unit is self._root:
            # no need to block: the caller's work on the device runs after it
            self._issuer.mark(ops.sync((ops.grad_slot(ROOT),), to_write=True))
        else:
            self._issuer.wait((ops.gradient(unit.index),), to_write=True)

    # memory

    def device_bytes(self) -> tuple[int, int]:
        """Bytes on the device: of the slots, and of the root's gradients."""
        of_slots = sum(buffer.nbytes for buffer in self.slots.buffers)
        return of_slots, sum(memory.nbytes for memory in self._of_root.held.values())

    def sums(self, unit: Unit) -> torch.Tensor:
        """The fp32 sums of ``unit`` in host memory. The first call allocates them for all units. Raises
        MemoryError."""
        shard = self._store.shards[unit.index]
        if SUMS.name not in shard.held:
            # if layers have no gradients on the host, nothing is added to them either
            holders = [shard for shard in self._store.shards if shard.gradient.numel()]
            self._check_sums(host_bytes([shard.layout for shard in holders], [SUMS]))
            self._store.add([SUMS], only=holders)
        return shard.sums

    def _gradient(self, unit: Unit) -> torch.Tensor:
        # .data: a version counter of its own, so that our writes do not count as the user's
        return self._store.shards[unit.index].gradient.data

    def _check_sums(self, wanted: dict[str, int]) -> None:
        remedy = (
            "wrap with grad_dtype=None to add gradients up in the parameters' own dtype, or with a larger "
            "batch in place of several"
        )
        require(
            f"a second backward before the step ({', '.join(wanted)})",
            self._memory.room_of_all(wanted, remedy),
        )

    def check_kept(self, unit: Unit, wanted: dict[str, int]) -> None:
        """Raise MemoryError if there is no room for another buffer of gradients of ``unit``."""
        kept = [shard for shard, _, _ in self._store.exchanged() if shard is self._store.shards[unit.index]]
        if len(kept) == MANY and not self._has_warned:
            self._has_warned = True
            warn(
                f"tensors made from gradients of '{unit.name}' step after step (p.grad.detach(), .cpu(), "
                ".view(), .numpy()) each hold the memory of all its gradients: keep copies (.clone())"
            )
        room = self._memory.room_of_all(wanted, "keep copies of them (.clone())")
        require(f"kept gradients of '{unit.name}'", room)

    def release(self) -> None:
        """Release all gradients and their slots."""
        self.slots.buffers.clear()
        self._staging = []
        self._of_root.held.clear()
        self.held.clear()


def _arrays(stretch: Stretch, *buffers: torch.Tensor) -> list[Any]:
    """A stretch of each of these gradient buffers, in the form that the kernels take."""
    return [array(stretch.view(buffer)) for buffer in buffers]
