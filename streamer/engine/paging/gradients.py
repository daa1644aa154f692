"""Gradients: filled in a slot on the device, paged out, added up on the host. ``p.grad`` shows places in the
buffers that hold a unit's gradients.

[Note: sums]
A gradient is held as it left the device. Where a second one is to be added to it, and its dtype is
bfloat16 or float16, both go into an fp32 sum: thousands of additions in eight bits of precision would lose
most of what is small. ``p.grad`` is then fp32, which PyTorch allows where ``Tensor.grad_dtype`` is None,
until it is dropped. A gradient that stays alone never takes those four bytes.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import nn

import streamer_native as native
from streamer.engine.paging.unit import Unit
from streamer.engine.schedule import op as ops
from streamer.engine.schedule.hazards import Issuer
from streamer.engine.schedule.op import ROOT
from streamer.engine.tensors.guarded import GUARD, Guard, GuardedTensor, as_plain
from streamer.errors import warn
from streamer.memory.host import HostShard, HostStore, array
from streamer.memory.layout import Slice, Stretch
from streamer.memory.purposes import FP32, GRADIENTS, STAGING, SUMS, Purpose, host_bytes
from streamer.memory.slots import GradientSlots, num_grad_slots
from streamer.memory.verdict import Tier, require
from streamer.torch_private import storage_id, storage_owners

#: From so many steps on of which a layer's gradients are kept a warning says what that takes.
MANY = 4

_ADDRESS = operator.methodcaller("data_ptr")
_GRAD = operator.attrgetter("grad")
_IS_CONTIGUOUS = operator.methodcaller("is_contiguous")

#: A parameter, its place, and a gradient for it.
Foreign = tuple[Slice, nn.Parameter, torch.Tensor]


class GradientViews:
    """The gradients of one unit: ``gradient`` (flat uint8, in the parameters' dtypes) and, once there is a
    use for them, the fp32 sums that ``make_sums`` returns, both laid out by the unit's layout. [Note: sums]
    """

    def __init__(
        self,
        unit: Unit,
        gradient: torch.Tensor,
        *,
        make_sums: Callable[[], torch.Tensor] | None,
        before_write: Callable[[], None],
        move_to: Callable[[Purpose, torch.Tensor | None], torch.Tensor] | None,
    ) -> None:
        """``move_to`` lets the unit have another buffer of gradients or sums, by default one that it makes,
        and returns that; None where others see the buffers too."""
        self._unit = unit
        self._gradient = gradient
        self._make_sums = make_sums
        #: returns when what the caller does next may write the gradients
        self.before_write = before_write
        self._move_to = move_to
        #: the ids of parameters of whose gradients, or of whose sums, the user has got the memory
        self._lent: dict[bool, set[int]] = {False: set(), True: set()}
        #: how many holders the storage of gradients, or of sums, has beside what shows a gradient
        self._holders: dict[bool, int] = {False: storage_owners(gradient)}
        #: the buffer of gradients, or of sums, that the unit had before it got another, and its holders
        self._homes: dict[bool, tuple[torch.Tensor, int]] = {}
        self._guard: Guard | None = None
        #: what ``p.grad`` has been, by the parameter's identity and whether it is a sum: it is the same at
        #: every step
        self._shown: dict[tuple[int, bool], torch.Tensor] = {}
        self._offsets = [slice.offset for slice in unit.layout.trainable]

    def guard_with(self, guard: Guard) -> None:
        """Let the user's code see gradients that ask ``guard`` first. [Note: what the user sees]"""
        self._guard = guard

    def pairs(self) -> Iterator[tuple[Slice, nn.Parameter]]:
        """Each trainable parameter and its place."""
        return zip(self._unit.layout.trainable, self._unit.params, strict=False)

    def sums_in_fp32(self, param: nn.Parameter) -> bool:
        """Whether a second gradient of ``param`` is to be added in fp32, beside its own dtype."""
        return self._make_sums is not None and param.dtype != FP32

    def place(self, slice: Slice, *, summed: bool) -> torch.Tensor:
        """The place of a parameter's gradient."""
        if slice.nbytes > self._gradient.numel():
            raise RuntimeError(
                f"'{slice.param.name}' has a gradient from outside of its layer, for which "
                "update='backward' has no room: wrap with update='step'"
            )
        if summed and self._make_sums is not None:
            sums = self._make_sums()
            self._holders.setdefault(True, storage_owners(sums))
            return slice.state(sums)
        return slice.view(self._gradient)

    def show(self, slice: Slice, param: nn.Parameter, *, summed: bool) -> None:
        """Set ``p.grad`` to the view of the parameter's gradient, or of its fp32 sum."""
        shown = self._shown.get((id(param), summed))
        # the user may have given it other memory (p.grad.data = ...)
        if shown is None or summed or shown.data_ptr() != self._gradient.data_ptr() + slice.offset:
            shown = self.place(slice, summed=summed)
            if self._guard is not None:
                shown = GuardedTensor.of(shown, self._guard)
            self._shown[id(param), summed] = shown
        param.grad = shown

    def show_all(self, which: Sequence[bool]) -> None:
        """`show`, for those ``which`` say, where there is no ``p.grad``."""
        # as in `show`, at once where nothing has changed since the last step
        known = [*self._shown.values()] if self._are_in_place() else [None] * len(which)
        for (slice, param), is_new, gradient in zip(self.pairs(), which, known, strict=True):
            if is_new and param.grad is None:
                if gradient is not None:
                    param.grad = gradient
                else:
                    self.show(slice, param, summed=False)

    @as_plain
    def copy_out_kept(self, scale: float, *, summed: bool = False) -> None:
        """A gradient of an earlier step, or its sum, that the user still references (``g = p.grad``) is
        copied to memory of its own, multiplied by ``scale``."""
        if max(map(sys.getrefcount, self._shown.values()), default=0) <= _REFERENCES_OF_EACH:
            return
        for _, param in self.pairs():
            key = id(param), summed
            if key not in self._shown or param.grad is self._shown[key]:
                continue
            if _references(self._shown, key) > _REFERENCES:
                kept = self._shown.pop(key)
                kept.data = kept.detach() * scale
                kept.__dict__.pop(GUARD, None)

    def lend(self, shown: torch.Tensor) -> None:
        """The user's code got something that shares memory with a gradient: ``p.grad.detach()``, say."""
        for (param, summed), each in self._shown.items():
            if each is shown:
                self._lent[summed].add(param)

    def is_lent(self) -> bool:
        """Whether the user may have something that shares memory with a gradient."""
        return any(self._lent.values())

    def still_lent(self) -> bool:
        """Whether the user has something that shares memory with a gradient; so may work that is running."""
        return any(lent and self._is_shared(summed=summed) for summed, lent in self._lent.items())

    def _is_shared(self, *, summed: bool) -> bool:
        """Whether anything but the library's own tensors shows the buffer of gradients, or of sums."""
        buffer = self._buffer(summed=summed)
        ours = self._holders[summed]
        for (_, of_sum), shown in self._shown.items():
            if of_sum == summed and storage_id(shown) == storage_id(buffer):
                # a view of another dtype is itself what the next view is a view of
                ours += 1 if shown._base is None or shown._base is buffer else 2
        return storage_owners(buffer) > ours

    def _buffer(self, *, summed: bool) -> torch.Tensor:
        return self._make_sums() if summed and self._make_sums is not None else self._gradient

    @as_plain
    def vacate(self, *, summed: bool = False) -> None:
        """Before gradients, or sums, are written where others were dropped: what of those the user still has
        keeps its values, as it would with PyTorch's new tensor for each gradient.

        What only shares memory with one (``p.grad.detach()``) cannot be given other memory, so the unit gets
        another buffer, and the one that it had before again when nobody holds that any more. Raises
        RuntimeError where that cannot be.
        """
        self.copy_out_kept(1.0, summed=summed)
        lent, home = self._lent[summed], self._homes.get(summed)
        if not lent and home is None:
            return
        self.before_write()
        if not self._is_shared(summed=summed):
            lent.clear()
        shown = {id(param) for slice, param in self.pairs() if self.is_ours(slice, param)}
        held = {id(param) for _, param in self.pairs() if id(param) in shown and is_summed(param) == summed}
        is_home_free = home is not None and storage_owners(home[0]) <= home[1]
        if not lent - held:
            if is_home_free and not held:
                self._move(summed=summed, home=True)
        elif held or self._move_to is None:
            raise RuntimeError(
                f"what was made of gradients of '{self._unit.name}' shares their memory (p.grad.detach(), "
                ".view(), .numpy()), which new gradients are about to take: keep copies (.clone())"
            )
        else:
            self._move(summed=summed, home=is_home_free)

    def _move(self, *, summed: bool, home: bool) -> None:
        """Let gradients, or sums, be in the buffer that they were in before, or in a new one."""
        assert self._move_to is not None, "nobody else sees the buffers"
        purpose = SUMS if summed else GRADIENTS
        if home:
            was, self._holders[summed] = self._homes.pop(summed)
            buffer = self._move_to(purpose, was)
        else:
            self._homes.setdefault(summed, (self._buffer(summed=summed), self._holders[summed]))
            buffer = self._move_to(purpose, None)
            self._holders[summed] = storage_owners(buffer)
        if not summed:
            self._gradient = buffer
        self._shown = {key: shown for key, shown in self._shown.items() if key[1] != summed}
        self._lent[summed].clear()

    def is_ours(self, slice: Slice, param: nn.Parameter) -> bool:
        """Whether ``p.grad`` is a view of this unit's buffer of gradients or of sums."""
        grad = param.grad
        if grad is None:
            return False
        # what `show` has set need only be asked for its memory
        if grad is not self._shown.get((id(param), False)) or not slice.numel:
            if grad.is_sparse:
                return False
            summed = is_summed(param)
            if summed or not slice.numel:
                place = self.place(slice, summed=summed)
                return (grad.data_ptr(), grad.stride()) == (place.data_ptr(), place.stride())
        return grad.data_ptr() == self._gradient.data_ptr() + slice.offset and grad.is_contiguous()

    def _are_in_place(self) -> bool:
        """Whether there are gradients that `show` has set of all parameters, in their order, and none has
        other memory since."""
        # asked several times a step, nearly always so: without a frame for each parameter
        shown, start = self._shown.values(), self._gradient.data_ptr()
        return (
            len(shown) == len(self._offsets)
            and [*map(_ADDRESS, shown)] == [start + offset for offset in self._offsets]
            and all(map(_IS_CONTIGUOUS, shown))
        )

    @as_plain
    def foreign(self) -> list[Foreign]:
        """Gradients that were put in place of ours (``p.grad = ...``), apart from our buffers."""
        grads = map(_GRAD, self._unit.trainable)
        if self._are_in_place() and all(map(operator.is_, grads, self._shown.values())):
            return []
        return [
            (slice, param, param.grad)
            for slice, param in self.pairs()
            if param.grad is not None and not self.is_ours(slice, param)
        ]

    @as_plain
    def adopt(self, foreign: Sequence[Foreign]) -> None:
        """Bring gradients into our buffers, where ``p.grad`` shows them again."""
        if foreign:
            self.before_write()
            for _, param, grad in foreign:
                param.grad = grad  # so that nobody but the user holds what shows our memory
            for summed in {is_summed(param) for _, param, _ in foreign}:
                self.vacate(summed=summed)
        for slice, param, grad in foreign:
            summed = is_summed(param)
            self.place(slice, summed=summed).copy_(grad)
            self.show(slice, param, summed=summed)

    @property
    def device(self) -> torch.device:
        """Where our buffers are."""
        return self._gradient.device

    def storages(self) -> set[int]:
        """The ids of the storages of our buffers."""
        apart = () if self._are_in_place() else self._shown.values()
        return {storage_id(shown) for shown in (self._gradient, *apart)}

    @as_plain
    def widen(self, slice: Slice, param: nn.Parameter) -> None:
        """Autograd is about to add to ``p.grad`` by itself: let it be fp32 where it is to be summed."""
        grad = param.grad
        if grad is None:
            return
        self.before_write()
        if self.sums_in_fp32(param) and not is_summed(param):
            self.vacate(summed=True)
            self.place(slice, summed=True).copy_(grad.to_dense() if grad.is_sparse else grad)
            self.show(slice, param, summed=True)

    @as_plain
    def narrow(self, params: Container[torch.Tensor]) -> None:
        """Let the gradients of ``params`` have the dtypes of those, as other optimizers than ours expect."""
        for slice, param in self.pairs():
            if param in params and is_summed(param):
                total = param.grad
                assert total is not None
                self.before_write()
                self.place(slice, summed=False).copy_(total)
                self.show(slice, param, summed=False)


def noticing_writes(
    unit: Unit, shard: HostShard, update: Callable[[HostShard], None]
) -> Callable[[HostShard], None]:
    """``update``, which raises RuntimeError if somebody has written the gradients in ``shard`` meanwhile."""
    before = shard.gradient._version, shard.sums._version

    def work(updated: HostShard) -> None:
        update(updated)
        if (shard.gradient._version, shard.sums._version) != before:
            raise RuntimeError(
                f"gradients of '{unit.name}' were written while its update was reading them, so that its "
                "weights are wrong: load a checkpoint, and call streamer.synchronize(model) between "
                "optimizer.step() and writing gradients (module.zero_grad(set_to_none=False))"
            )

    return work


def is_summed(param: torch.Tensor) -> bool:
    """Whether ``p.grad`` is an fp32 sum beside a parameter of a shorter dtype."""
    # asked several times a step for every parameter
    return param.dtype != FP32 and (grad := param.grad) is not None and grad.dtype == FP32


#: The sum of squares of a unit's gradient: on the device, or known when the gradient has landed.
Squares = torch.Tensor | Callable[[], float | torch.Tensor]


class Gradients:
    """The gradient slots of the layers, and the root unit's own gradient buffer.

    A layer's ``p.grad`` is a view of its host gradient, the root's of its buffer on the device. With
    ``sum_in_fp32`` several gradients of a shorter dtype are added up in fp32: see [Note: sums].
    """

    def __init__(
        self,
        issuer: Issuer,
        units: Sequence[Unit],
        root: Unit,
        store: HostStore,
        *,
        num_slots: int,
        sum_in_fp32: bool,
        host: Callable[[Mapping[str, int], str], Tier],
    ) -> None:
        self._nbytes = max(unit.layout.grad_nbytes for unit in units)
        self.slots = GradientSlots(num_grad_slots(num_slots), self._nbytes, issuer.backend.device_buffer)
        self.root_buffer = issuer.backend.device_buffer(root.layout.grad_nbytes)
        self.root_sums = issuer.backend.device_buffer(0)
        #: by unit, the sums of squares of gradients that were added up on the host, one for each part
        self.added: dict[int, list[float]] = {}
        #: what the held gradients of layers are still to be multiplied by
        self.scale = 1.0
        #: units with a gradient that nobody has waited for: a backward is running, or has failed
        self._under_way: set[int] = set()
        self._issuer = issuer
        self._units = units
        self._root = root
        self._store = store
        self._staging: list[torch.Tensor] = []
        self._host = host
        self._has_warned = False
        #: where other ranks see the gradients too: waits for them before all write. [Note: ranks]
        self.meet: Callable[[str], object] | None = None
        self.held = {
            unit.index: GradientViews(
                unit,
                store.shards[unit.index].gradient,
                make_sums=partial(self._sums, unit) if sum_in_fp32 else None,
                before_write=partial(self._before_write, unit),
                move_to=None if store.is_shared else partial(self._move_layer, unit),
            )
            for unit in units
        }
        self.held[ROOT] = GradientViews(
            root,
            self.root_buffer,
            make_sums=self._sums_of_root if sum_in_fp32 else None,
            before_write=self._before_writing_root,
            move_to=self._move_root,
        )

    def in_slot(self, slot: int | None) -> torch.Tensor:
        """Gradient slot ``slot`` (flat uint8), an empty buffer for None."""
        return self.root_buffer[:0] if slot is None else self.slots.buffers[slot]

    @as_plain
    def offload(self, unit: Unit, slot: int, used: Sequence[bool], squares: Squares) -> Squares | None:
        """Page out the gradient in ``slot``; ``used`` says which trainable parameters have one, ``squares``
        is its sum of squares.

        It becomes ``p.grad``, or is added to it where there is one already, as autograd would. Returns
        the sum of squares of what ``p.grad`` then is, or None where that is not known.
        """
        held = self.held[unit.index]
        self._under_way.add(unit.index)
        has_grad = [param.grad is not None for param in unit.trainable]
        if any(has_grad):
            if held.foreign():
                self.adopt_all()
            return self._accumulate(unit, slot, used, has_grad)
        held.vacate()
        share = self._store.shards[unit.index].share.gradient
        source, gradient = self.slots.buffers[slot][share], self._gradient(unit)[share]
        op = ops.offload_grad(unit.index, slot, ops.gradient(unit.index), source.numel())
        self._issuer.issue(op, lambda: self._issuer.backend.copy(gradient, source))
        self._show(unit, used)
        return squares

    def release(self) -> None:
        """Give up all gradients and their slots."""
        self.slots.buffers.clear()
        self.root_buffer = self.root_sums = torch.empty(0, dtype=torch.uint8)
        self._staging.clear()
        self.held.clear()

    @as_plain
    def offload_root(self) -> None:
        """Page out the root unit's gradient."""
        root = self.held[ROOT]
        root.adopt(self._apart(root.foreign()))
        self._issuer.mark(ops.collect())
        shard = self._store.shards[ROOT]
        share = shard.share.gradient
        pairs = [(shard.gradient[share], self.root_buffer[share])]
        if any(is_summed(param) for param in self._root.params):
            elements = slice(shard.share.start, shard.share.stop)
            pairs.append(
                (
                    shard.sums[elements].view(torch.uint8),
                    self.root_sums[elements].view(torch.uint8),
                )
            )

        def copy() -> None:
            for into, source in pairs:
                self._issuer.backend.copy(into, source)

        nbytes = sum(into.nbytes for into, _ in pairs)
        self._issuer.issue(ops.offload_grad(ROOT, ROOT, ops.gradient(ROOT), nbytes), copy)

    @as_plain
    def adopt_all(self) -> None:
        """`adopt` for all layers; all foreign gradients are read first, since two layers' may be swapped."""
        foreign = {unit.index: self._apart(self.held[unit.index].foreign()) for unit in self._units}
        if self.meet is not None and any(foreign.values()):
            values = [grad.cpu().contiguous() for found in foreign.values() for _, _, grad in found]
            checksum = crc32(b"".join(value.view(-1).view(torch.uint8).numpy().tobytes() for value in values))
            self.meet(f"taking over gradients that were put in place of ours (checksum {checksum:08x})")
        for index, gradients in foreign.items():
            self.held[index].adopt(gradients)

    @as_plain
    def rescale(self, factor: float) -> None:
        """Multiply all gradients by ``factor``: the root's at once, the layers' when they are next used.

        The root's cannot wait, since autograd adds to them before any layer's backward is asked for.
        """
        self.scale *= factor
        held = [param.grad for param in self._root.params if param.grad is not None]
        if held:
            self._before_writing_root()
        for gradient in held:
            gradient.mul_(factor)
        # what shares their memory shows them without asking
        if self.still_lent():
            self.settle_scale()

    def _apart(self, foreign: Sequence[Foreign]) -> list[Foreign]:
        """``foreign``, with a copy of what shows another parameter's place, which may be written first."""
        if not foreign:
            return []
        devices = {grad.device for _, _, grad in foreign}
        held = (views for views in self.held.values() if views.device in devices)
        ours = {storage for views in held for storage in views.storages()}
        return [
            (
                slice,
                param,
                grad.to_dense() if grad.is_sparse else grad.clone() if storage_id(grad) in ours else grad,
            )
            for slice, param, grad in foreign
        ]

    def is_lent(self, index: int) -> bool:
        """Whether the user may see the gradient of a unit through another tensor than ``p.grad``, or an
        array."""
        return self.held[index].is_lent()

    def still_lent(self) -> list[Unit]:
        """The units that the user sees gradients of through other tensors than ``p.grad``."""
        return [unit for unit in (*self._units, self._root) if self.held[unit.index].still_lent()]

    @as_plain
    def settle_scale(self) -> None:
        """Apply `scale` to the gradients that are held: others, unscaled, are about to join them.

        An update does not settle it: as in PyTorch, gradients stay clipped until they are dropped.
        """
        scale, self.scale = self.scale, 1.0
        if scale != 1.0:
            for unit in self._units:
                self.held[unit.index].copy_out_kept(scale)
        held = [
            param.grad
            for unit in (self._units if scale != 1.0 else ())
            for slice, param in self.held[unit.index].pairs()
            if param.grad is not None and self.held[unit.index].is_ours(slice, param)
        ]
        if held:
            self._issuer.wait((ops.gradient(unit.index) for unit in self._units), to_write=True)
            if self.meet is not None:
                self._scale_share(scale)
                return
            for gradient in held:
                gradient.mul_(scale)

    def _scale_share(self, scale: float) -> None:
        """Multiply this rank's share of the gradients of layers, as the others do theirs."""
        assert self.meet is not None, "there are other ranks"
        self.meet(f"scaling gradients by {scale}")
        for unit in self._units:
            shard, held = self._store.shards[unit.index], self.held[unit.index]
            for slice, param in held.pairs():
                if param.grad is None or not held.is_ours(slice, param):
                    continue
                for own in shard.own([slice]):
                    place = own.state(shard.sums) if is_summed(param) else own.view(shard.gradient)
                    place.mul_(scale)
        self.meet("gradients are scaled")

    def finish(self) -> None:
        """Block until the gradients of all layers are in host memory, where ``p.grad`` shows them."""
        self._issuer.wait(ops.gradient(unit.index) for unit in self._units if unit.layout.grad_nbytes)
        self._under_way.clear()

    @as_plain
    def _accumulate(
        self, unit: Unit, slot: int, used: Sequence[bool], has_grad: Sequence[bool]
    ) -> Callable[[], float] | None:
        """Add what is in ``slot`` to the gradients there are, in one pass over each."""
        held = self.held[unit.index]
        held.vacate()
        pairs = list(held.pairs())
        both = [is_used and has for is_used, has in zip(used, has_grad, strict=True)]
        summed = [is_summed(param) for _, param in pairs]
        short = [held.sums_in_fp32(param) for _, param in pairs]
        begin = [b and s and not already for b, s, already in zip(both, short, summed, strict=True)]
        add_to_sum = [b and already for b, already in zip(both, summed, strict=True)]
        in_place = [b and not x and not y for b, x, y in zip(both, begin, add_to_sum, strict=True)]
        new = [is_used and not has for is_used, has in zip(used, has_grad, strict=True)]

        if any(begin):
            held.vacate(summed=True)
        staged = self._stage(unit, slot)
        gradient = self._gradient(unit)
        sums = self._sums(unit).data if any(begin) or any(add_to_sum) else gradient
        layout, own = unit.layout, self._store.shards[unit.index].own
        squares = self.added[unit.index] = list[float]()

        def accumulate() -> None:
            for s in own(layout.stretches(begin)):
                squares.append(native.add(array(s.state(sums)), *_arrays(s, gradient, staged)))
            for s in own(layout.stretches(add_to_sum)):
                squares.append(native.accumulate(array(s.state(sums)), *_arrays(s, staged)))
            for s in own(layout.stretches(in_place)):
                squares.append(native.accumulate(*_arrays(s, gradient, staged)))
            for s in own(layout.stretches(new)):
                s.view(gradient).copy_(s.view(staged))

        # reads the staged gradient and the host gradient, writes the latter
        self._issuer.issue(ops.accumulate(unit.index, slot, 3 * unit.layout.grad_nbytes), accumulate)
        for (slice, param), begins in zip(pairs, begin, strict=True):
            if begins:
                held.show(slice, param, summed=True)
        self._show(unit, new)
        return (lambda: sum(squares)) if both == has_grad and not any(new) else None

    def _stage(self, unit: Unit, slot: int) -> torch.Tensor:
        """Page out ``slot`` to the staging buffer of the same number."""
        if not self._staging:
            self._check_host({STAGING: len(self.slots.buffers) * self._nbytes})
            self._staging = self._store.staging(len(self.slots.buffers), self._nbytes)
        share = self._store.shards[unit.index].share.gradient
        staged, source = self._staging[slot], self.slots.buffers[slot][share]
        op = ops.offload_grad(unit.index, slot, ops.staging(slot), source.numel())
        self._issuer.issue(op, lambda: self._issuer.backend.copy(staged[share], source))
        return staged

    @as_plain
    def _show(self, unit: Unit, which: Sequence[bool]) -> None:
        """Let the gradient that has just been paged out be ``p.grad``, where there is none."""
        self.held[unit.index].show_all(which)

    def _gradient(self, unit: Unit) -> torch.Tensor:
        # .data: a version counter of its own, so that our writes are not taken for the user's
        return self._store.shards[unit.index].gradient.data

    def _sums(self, unit: Unit) -> torch.Tensor:
        """The fp32 sums of ``unit`` in host memory, for which all units get room when the first needs it."""
        shard = self._store.shards[unit.index]
        if SUMS.name not in shard.held:
            # without gradients of layers on the host there is nothing to add to them either
            holders = [shard for shard in self._store.shards if shard.gradient.numel()]
            self._check_host(host_bytes([shard.layout for shard in holders], [SUMS]))
            self._store.add([SUMS], only=holders)
        return shard.sums

    def _sums_of_root(self) -> torch.Tensor:
        """The root's fp32 sums, on the device; where they leave to is made room for too."""
        if not self.root_sums.numel():
            self._sums(self._root)
            nbytes = 4 * self._root.layout.state_numel
            self.root_sums = self._issuer.backend.device_buffer(nbytes).view(FP32).data
        return self.root_sums

    def _move_layer(self, unit: Unit, purpose: Purpose, buffer: torch.Tensor | None) -> torch.Tensor:
        shard = self._store.shards[unit.index]
        if buffer is None:
            kept = [each for each, _, _ in self._store.exchanged() if each is shard]
            if len(kept) == MANY and not self._has_warned:
                self._has_warned = True
                warn(
                    f"what is kept of gradients of '{unit.name}' step after step (p.grad.detach(), .cpu(), "
                    ".view(), .numpy()) holds the memory of all its gradients each time: keep copies "
                    "(.clone())"
                )
            require(
                f"what is kept of gradients of '{unit.name}'",
                self._host(host_bytes([shard.layout], [purpose]), "keep copies of them (.clone())"),
            )
        return self._store.exchange(shard, purpose, buffer)

    def _move_root(self, purpose: Purpose, buffer: torch.Tensor | None) -> torch.Tensor:
        was = self.root_sums if purpose is SUMS else self.root_buffer
        if buffer is None:
            buffer = self._issuer.backend.device_buffer(was.nbytes).view(was.dtype).data
        if purpose is SUMS:
            self.root_sums = buffer
        else:
            self.root_buffer = buffer
        return buffer

    def _check_host(self, wanted: dict[str, int]) -> None:
        remedy = (
            "wrap with grad_dtype=None to add gradients up in the parameters' own dtype, or with a larger "
            "batch in place of several"
        )
        what = f"a second backward before the step ({', '.join(wanted)})"
        require(what, self._host(wanted, remedy))

    def before_access(self, unit: Unit, *, in_use: bool) -> None:
        """Return when the user's code may read and write the gradient of ``unit``; ``in_use`` says whether an
        update may be reading it."""
        if self.scale != 1.0:
            self.settle_scale()
        if in_use:
            self.held[unit.index].before_write()
        if unit.index in self._under_way:
            self._issuer.wait((ops.gradient(unit.index),))
            self._under_way.discard(unit.index)

    def _before_writing_root(self) -> None:
        # no need to block: what the caller's thread does on the device comes after
        self._issuer.mark(ops.sync((ops.grad_slot(ROOT),), to_write=True))

    def _before_write(self, unit: Unit) -> None:
        self.settle_scale()
        self._issuer.wait((ops.gradient(unit.index),), to_write=True)


def _references(shown: Mapping[Any, object], key: object) -> int:
    """How many references there are to what ``shown`` has under ``key``."""
    return sys.getrefcount(shown[key])


#: To what nobody else holds. Versions of Python count differently what is held during a call.
_REFERENCES = _references({None: object()}, None)
_REFERENCES_OF_EACH = max(map(sys.getrefcount, {None: object()}.values()))


def _arrays(stretch: Stretch, *buffers: torch.Tensor) -> list[Any]:
    """A stretch of each of these gradient buffers as the kernels take it."""
    return [array(stretch.view(buffer)) for buffer in buffers]
