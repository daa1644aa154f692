"""Layer inputs that are saved for backward, paged to host memory and back.

[Note: saved inputs]
With ``activations="recompute+offload"`` a layer's inputs are copied to host memory while it and the next
layers run, and fetched while the layer above goes backward. Such an input is the user's tensor, allocated on
COMPUTE. It is held until its copy is done, and its memory may be reused only after an op on COMPUTE that
waits for the copy. At most `OUTGOING` layers' inputs are held in that way; the next layer waits for the
first. So the last inputs of a forward are still on the device when backward begins, and are not fetched. A
fetched input also goes into memory allocated on COMPUTE, so its copy waits for all earlier work on COMPUTE:
it is fetched one layer ahead.

A tensor that several layers save, such as an encoder's output, is copied once.

The host buffers are reused: the sizes of inputs are not known beforehand.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.utils.weak import WeakIdKeyDictionary

from streamer.engine.paging.host_memory import HostMemory
from streamer.engine.schedule import op as ops
from streamer.engine.schedule.hazards import Issuer
from streamer.engine.schedule.op import Place
from streamer.engine.tensors import SavedBytes, storages
from streamer.store.ledger import require
from streamer.store.purposes import SAVED_INPUTS


class Paged:
    """A saved tensor, and its place in host memory. ``tensor`` is set while it is on the device, ``leaving``
    (flat uint8) while it is copied from there."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.place = -1
        self.tensor: torch.Tensor | None = None
        self.leaving: torch.Tensor | None = None
        self.is_fetched = False
        #: the number of saves; the number of saves and copies that hold it on the device
        self.owners = self.holders = 0
        self._view = tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride(), tensor._version
        self._shape, self._dtype = tensor.shape, tensor.dtype
        # the tensor's own stride if it is dense
        self._stride = torch.empty_like(tensor, device="meta").stride()
        self._was_changed = False
        #: counts the bytes while it is on the device
        self._held: object = None

    def is_now(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor``, of the same storage, equals the saved tensor."""
        view = tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride(), tensor._version
        return view == self._view

    def dense(self, tensor: torch.Tensor) -> torch.Tensor:
        """The bytes of ``tensor``, or of a copy if it has gaps or is a lazy conjugate or negative."""
        if tensor.stride() != self._stride or tensor.is_conj() or tensor.is_neg():
            tensor = self.empty(tensor.device).copy_(tensor)
        return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)

    def empty(self, device: torch.device) -> torch.Tensor:
        """An empty tensor to fetch into."""
        return torch.empty_strided(self._shape, self._stride, dtype=self._dtype, device=device)

    def put(self, tensor: torch.Tensor, on_device: SavedBytes, *, is_fetched: bool) -> None:
        """``tensor`` is the copy of this input on the device."""
        self.tensor, self.is_fetched = tensor, is_fetched
        self._held = on_device.hold(storages([tensor]))

    def get(self) -> torch.Tensor:
        """The input's copy on the device. Raises RuntimeError if it was written after it was saved."""
        self.note_writes()
        if self._was_changed:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: an input of shape {tuple(self._shape)} of a streamed layer"
            )
        assert self.tensor is not None, "the caller holds it"
        return self.tensor

    def note_writes(self) -> None:
        """Note whether the user's tensor was written while it was on the device."""
        if self.tensor is not None and not self.is_fetched:
            self._was_changed |= self.tensor._version != self._view[-1]

    def drop(self) -> None:
        """The copy on the device is no longer needed."""
        self.note_writes()
        self.tensor = self._held = None


class HostPlaces:
    """Numbered buffers, each used by one owner at a time and kept for the next. A buffer that has become too
    small is freed before a larger one takes its number.

    ``allocate`` returns a buffer of some bytes. ``give_back`` is called with the number and the buffer when a
    buffer is no longer needed, and returns when nothing reads or writes it.
    """

    def __init__(
        self,
        allocate: Callable[[int], torch.Tensor],
        give_back: Callable[[int, torch.Tensor], None],
    ) -> None:
        self.buffers: list[torch.Tensor] = []
        self._free: set[int] = set()
        self._allocate = allocate
        self._give_back = give_back

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def take(self, nbytes: int) -> int:
        """The number of a buffer of at least ``nbytes``."""
        by_size = sorted(self._free, key=lambda number: self.buffers[number].nbytes)
        number = next((number for number in by_size if self.buffers[number].nbytes >= nbytes), None)
        if number is None:
            number = by_size[-1] if by_size else len(self.buffers)
            self._replace(number, nbytes)
        self._free.discard(number)
        return number

    def release(self, number: int) -> None:
        """The buffer is free for others."""
        self._free.add(number)

    def _replace(self, number: int, nbytes: int) -> None:
        empty = torch.empty(0, dtype=torch.uint8)
        if number < len(self.buffers):
            self._give_back(number, self.buffers[number])
            self.buffers[number] = empty
        buffer = self._allocate(nbytes)
        if number == len(self.buffers):
            self.buffers.append(empty)
        self.buffers[number] = buffer


#: The number of layers whose inputs are held on the device during the copy to the host.
OUTGOING = 2


Saved = Sequence[Paged]
#: Tensors on the device, and the places that an op reads when it uses them.
Fetched = tuple[Sequence[torch.Tensor], tuple[Place, ...]]
_NONE: AbstractContextManager[Fetched] = nullcontext(((), ()))


class InputPager:
    """The saved inputs of all layers. [Note: saved inputs]"""

    def __init__(self, issuer: Issuer, on_device: SavedBytes, memory: HostMemory) -> None:
        self.places = HostPlaces(self._allocate, self._give_back)
        self._issuer = issuer
        self._memory = memory
        self._on_device = on_device
        #: by storage
        self._known = WeakIdKeyDictionary()
        #: by number, in the order of forward: the inputs that layers have saved and may need
        self._saved: dict[int, Saved] = {}
        self._count = 0
        self._outgoing: dict[int, Saved] = {}
        #: the number of the prefetched inputs
        self._ahead: int | None = None
        #: inputs that are no longer needed; the garbage collector may append to it at any moment
        self._gone: deque[int] = deque()

    @staticmethod
    def takes(tensor: torch.Tensor) -> bool:
        """Whether ``tensor``, an input of a layer, should be paged and can be rebuilt from its bytes."""
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested
        # a leaf stays on the device anyway; a tensor with gaps would come back without them, and PyTorch
        # would then compute with other operations
        return (
            is_plain
            and tensor.grad_fn is not None
            and not (tensor.is_conj() or tensor.is_neg())
            and tensor.stride() == torch.empty_like(tensor, device="meta").stride()
        )

    def save(self, owner: object, tensors: Sequence[torch.Tensor]) -> int:
        """Page out ``tensors``, kept until `forget` or until ``owner`` is gone. Returns the number to fetch
        them by.

        Raises MemoryError if host memory has no room for them.
        """
        self.settle()
        number = self._count = self._count + 1
        saved: list[Paged] = []
        self._saved[number] = self._outgoing[number] = saved
        # before the first is saved: there may be no room for the next one
        weakref.finalize(owner, self._gone.append, number).atexit = False
        for tensor in tensors:
            saved.append(self._save(tensor))
        if len(self._outgoing) > OUTGOING:
            self._let_go(next(iter(self._outgoing)))
        return number

    def forget(self, number: int) -> None:
        """``number`` is no longer needed."""
        self._gone.append(number)

    def using(self, number: int | None) -> AbstractContextManager[Fetched]:
        """The tensors saved under ``number``, on the device inside the block, and the places that an op reads
        when it uses them; none for None. Raises RuntimeError if one of them was written since."""
        if number is None and self._ahead is None and not self._gone:
            return _NONE
        return self._using(number)

    @contextmanager
    def _using(self, number: int | None) -> Iterator[Fetched]:
        saved = () if number is None else self._saved[number]
        self._hold(saved)
        try:
            self._drop_ahead()
            places = tuple(ops.fetched(paged.place) for paged in saved if paged.is_fetched)
            yield [paged.get() for paged in saved], places
        finally:
            self._release(saved)
            self.settle()

    def prefetch(self, number: int | None) -> None:
        """Fetch the inputs saved before ``number``: they are likely to be needed next."""
        if number is None:
            return
        before = max((other for other in self._saved if other < number), default=None)
        if before is not None and self._ahead is None:
            self._hold(self._saved[before])
            self._ahead = before

    def release(self) -> None:
        """Release everything."""
        for kept in (self._saved, self._outgoing, self._known, self._gone, self.places.buffers):
            kept.clear()
        self._ahead = None

    def _save(self, tensor: torch.Tensor) -> Paged:
        known: list[Paged] = self._known.setdefault(tensor.untyped_storage(), [])
        known[:] = [paged for paged in known if paged.owners]
        paged = next((paged for paged in known if paged.is_now(tensor)), None)
        if paged is None:
            paged = Paged(tensor)
            self._page_out(paged, tensor)
            known.append(paged)
        elif paged.tensor is None:
            paged.put(tensor, self._on_device, is_fetched=False)
        paged.owners += 1
        paged.holders += 1
        return paged

    def _page_out(self, paged: Paged, tensor: torch.Tensor) -> None:
        source = paged.dense(tensor)
        # from here on no allocation can fail
        paged.place = self.places.take(source.numel())
        self._memory.taken[SAVED_INPUTS] = self.places.nbytes
        into = self.places.buffers[paged.place][: source.numel()]
        try:
            # the copy begins when the tensor is computed
            self._sync(ops.saved_input(paged.place), to_write=True)
            op = ops.offload_input(paged.place, source.numel())
            self._issuer.issue(op, lambda: self._issuer.backend.copy(into, source))
        except BaseException:
            self.places.release(paged.place)
            raise
        paged.leaving = source
        paged.put(tensor, self._on_device, is_fetched=False)

    def _let_go(self, number: int) -> None:
        """The copies that ``number`` is held for are done, as far as COMPUTE is concerned."""
        saved = self._outgoing.pop(number)
        for paged in saved:
            if paged.leaving is not None:
                self._sync(ops.saved_input(paged.place), to_write=True)
                paged.leaving = None
        self._release(saved)

    def _hold(self, saved: Saved) -> None:
        for count, paged in enumerate(saved):
            try:
                if paged.tensor is None:
                    self._fetch(paged)
            except BaseException:
                self._release(saved[:count])
                raise
            paged.holders += 1

    def _fetch(self, paged: Paged) -> None:
        tensor = paged.empty(self._issuer.backend.device)
        into = paged.dense(tensor)
        source = self.places.buffers[paged.place][: into.numel()]
        # the copy begins when COMPUTE has finished with the earlier contents of this memory
        self._sync(ops.saved_input(paged.place), to_write=True)
        op = ops.fetch_input(paged.place, into.numel())
        self._issuer.issue(op, lambda: self._issuer.backend.copy(into, source))
        paged.put(tensor.requires_grad_(), self._on_device, is_fetched=True)

    def _release(self, saved: Saved) -> None:
        for paged in saved:
            paged.holders -= 1
            if not paged.holders:
                if paged.is_fetched:
                    # the copy may still be running if it was not used
                    self._sync(ops.fetched(paged.place))
                paged.drop()

    def _drop_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._release(self._saved[ahead])

    def settle(self) -> None:
        """Free the memory of inputs that are no longer needed."""
        while self._gone:
            number = self._gone.popleft()
            if number == self._ahead:
                self._drop_ahead()
            if number in self._outgoing:
                self._let_go(number)
            for paged in self._saved.pop(number, ()):
                paged.owners -= 1
                if not paged.owners:
                    self.places.release(paged.place)

    def _sync(self, place: Place, *, to_write: bool = False) -> None:
        # no need to block: the caller's work on the device runs after it
        self._issuer.mark(ops.sync((place,), to_write=to_write))

    def _allocate(self, nbytes: int) -> torch.Tensor:
        self._memory.taken[SAVED_INPUTS] = self.places.nbytes
        require(
            f"a layer's saved inputs in host memory, in addition to {self.places.nbytes} bytes of them "
            "(activations='recompute+offload')",
            self._memory.room(
                nbytes,
                "take a smaller batch, or 'recompute' for some of the layers, or, with a disk, wrap with "
                "example=, a batch, to leave room for them",
            ),
        )
        return self._issuer.backend.host_buffer(nbytes)

    def _give_back(self, place: int, buffer: torch.Tensor) -> None:
        self._issuer.wait((ops.host_input(place),), to_write=True)
        self._issuer.backend.unpin(buffer)
