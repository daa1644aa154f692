"""A layer input that is in host memory until backward. [Note: saved inputs]"""

from __future__ import annotations

from collections.abc import Callable

import torch

from streamer.engine.saved import SavedBytes, storages


class Paged:
    """A tensor that was saved, and its place in host memory. ``tensor`` is there while it is on the device,
    ``leaving`` (flat uint8) while it is copied from there."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.place = -1
        self.tensor: torch.Tensor | None = None
        self.leaving: torch.Tensor | None = None
        self.is_fetched = False
        #: how many have saved it, and how many of them, or of those who copy it, hold it on the device
        self.owners = self.holders = 0
        self._view = tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride(), tensor._version
        self._shape, self._dtype = tensor.shape, tensor.dtype
        # the tensor's own where it is dense
        self._stride = torch.empty_like(tensor, device="meta").stride()
        self._was_changed = False
        self._uncount: Callable[[], object] = lambda: None

    def is_now(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor``, of the same storage, is what was saved."""
        view = tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride(), tensor._version
        return view == self._view

    def dense(self, tensor: torch.Tensor) -> torch.Tensor:
        """The bytes of ``tensor``, or of a copy of it where it has gaps or only means its conjugate."""
        if tensor.stride() != self._stride or tensor.is_conj() or tensor.is_neg():
            tensor = self.empty(tensor.device).copy_(tensor)
        return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)

    def empty(self, device: torch.device) -> torch.Tensor:
        """A tensor to be fetched into."""
        return torch.empty_strided(self._shape, self._stride, dtype=self._dtype, device=device)

    def put(self, tensor: torch.Tensor, on_device: SavedBytes, *, is_fetched: bool) -> None:
        """It is on the device, as ``tensor``."""
        self.tensor, self.is_fetched = tensor, is_fetched
        self._uncount = on_device.hold(self, storages([tensor]))

    def get(self) -> torch.Tensor:
        """It, on the device. Raises RuntimeError if it has been written since it was saved."""
        self.note_writes()
        if self._was_changed:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: an input of shape {tuple(self._shape)} of a streamed layer"
            )
        assert self.tensor is not None, "who gets it holds it"
        return self.tensor

    def note_writes(self) -> None:
        """Has somebody written the user's tensor while it could leave?"""
        if self.tensor is not None and not self.is_fetched:
            self._was_changed |= self.tensor._version != self._view[-1]

    def drop(self) -> None:
        """Nobody holds it on the device any more."""
        self.note_writes()
        self.tensor = None
        self._uncount()
