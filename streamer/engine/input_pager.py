"""Layer inputs that are saved for backward, paged to host memory and back.

[Note: saved inputs]
With ``activations="recompute+offload"`` a layer's inputs leave for host memory while it and the next ones
run, and come back while the layer above goes backward. What leaves is the user's tensor, which COMPUTE has
allocated: it is held until its copy is done, and its memory may be used for something else only after an op
on COMPUTE that waits for the copy. Those of no more than `OUTGOING` layers are held in that way, the next one
waits for the first; the last ones of a forward are thus still on the device when backward begins, and are not
fetched. What comes back goes into memory that COMPUTE has allocated too, so that its copy waits for all that
COMPUTE had been given by then: it is fetched one layer ahead.

A tensor that several layers save, an encoder's output say, leaves once.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.utils.weak import WeakIdKeyDictionary

from streamer.engine import op as ops
from streamer.engine.issuer import Issuer
from streamer.engine.op import Resource
from streamer.engine.paged import Paged
from streamer.engine.saved import SavedBytes
from streamer.memory.places import HostPlaces

#: Layers whose inputs are held on the device while they leave it.
OUTGOING = 2


Saved = Sequence[Paged]


class InputPager:
    """The saved inputs of all layers. [Note: saved inputs]"""

    def __init__(self, issuer: Issuer, on_device: SavedBytes) -> None:
        self.places = HostPlaces(self._allocate, self._give_back)
        self._issuer = issuer
        self._on_device = on_device
        #: by storage
        self._known = WeakIdKeyDictionary()
        #: by number, in the order of forward: what layers have saved and may ask for
        self._saved: dict[int, Saved] = {}
        self._count = 0
        self._outgoing: dict[int, Saved] = {}
        self._ahead: Saved = ()
        #: what nobody will ask for any more; the garbage collector may say so at any moment
        self._gone: deque[int] = deque()

    @staticmethod
    def takes(tensor: torch.Tensor) -> bool:
        """Whether ``tensor``, an input of a layer, is worth a place and can be made again from bytes."""
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested
        # who has made a leaf has it anyway
        return is_plain and tensor.grad_fn is not None

    def save(self, owner: object, tensors: Sequence[torch.Tensor]) -> int:
        """Page out ``tensors``, kept until `forget` or until ``owner`` is gone; the number to ask for them.

        Raises MemoryError where host memory has no room for them.
        """
        self._settle()
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
        """Nobody will ask for ``number`` again."""
        self._gone.append(number)

    @contextmanager
    def using(self, number: int | None) -> Iterator[tuple[list[torch.Tensor], list[Resource]]]:
        """The tensors saved under ``number``, on the device inside the block, and what an op must read that
        uses them; none for None. Raises RuntimeError if one of them was written since."""
        saved = () if number is None else self._saved[number]
        self._hold(saved)
        self._drop_ahead()
        try:
            yield [paged.get() for paged in saved], [ops.fetched(p.place) for p in saved if p.is_fetched]
        finally:
            self._release(saved)
            self._settle()

    def prefetch(self, number: int | None) -> None:
        """Fetch what was saved before ``number``: it is likely to be asked for next."""
        if number is None:
            return
        before = max((other for other in self._saved if other < number), default=None)
        if before is not None and not self._ahead:
            self._hold(self._saved[before])
            self._ahead = self._saved[before]

    def release(self) -> None:
        """Give up everything."""
        for kept in (self._saved, self._outgoing, self._known, self._gone, self.places.buffers):
            kept.clear()
        self._ahead = ()

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
        # from here on nothing is short of memory
        paged.place = self.places.take(source.numel())
        paged.leaving = source
        paged.put(tensor, self._on_device, is_fetched=False)
        into = self.places.buffers[paged.place][: source.numel()]
        # what has made the tensor is done before its copy begins
        self._sync(ops.saved_input(paged.place), to_write=True)
        op = ops.offload_input(paged.place, source.numel())
        self._issuer.issue(op, lambda: self._issuer.backend.copy(into, source))

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
        # what COMPUTE had in this memory is done with before the copy begins
        self._sync(ops.saved_input(paged.place), to_write=True)
        op = ops.fetch_input(paged.place, into.numel())
        self._issuer.issue(op, lambda: self._issuer.backend.copy(into, source))
        paged.put(tensor.requires_grad_(), self._on_device, is_fetched=True)

    def _release(self, saved: Saved) -> None:
        for paged in saved:
            paged.holders -= 1
            if not paged.holders:
                if paged.is_fetched:
                    # the copy may still be running if nobody has used it
                    self._sync(ops.fetched(paged.place))
                paged.drop()

    def _drop_ahead(self) -> None:
        ahead, self._ahead = self._ahead, ()
        self._release(ahead)

    def _settle(self) -> None:
        """Free the places of what nobody will ask for."""
        while self._gone:
            number = self._gone.popleft()
            if number in self._outgoing:
                self._let_go(number)
            for paged in self._saved.pop(number, ()):
                paged.owners -= 1
                if not paged.owners:
                    self.places.release(paged.place)

    def _sync(self, resource: Resource, *, to_write: bool = False) -> None:
        # no need to block: what the caller's thread does on the device comes after
        self._issuer.issue(ops.sync((resource,), to_write=to_write), lambda: None)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        available = self._issuer.backend.host_available()
        if nbytes > available:
            raise MemoryError(
                "activations='recompute+offload' needs host memory for the saved inputs of a layer: "
                f"{nbytes} bytes more beside {self.places.nbytes}, and {available} are free; take a smaller "
                "batch, or 'recompute' for some of the layers"
            )
        return self._issuer.backend.host_buffer(nbytes)

    def _give_back(self, place: int, buffer: torch.Tensor) -> None:
        self._issuer.wait((ops.host_input(place),), to_write=True)
        self._issuer.backend.unpin(buffer)
