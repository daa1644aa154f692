"""Which backend runs on a device."""

from __future__ import annotations

import torch

from streamer.backends.base import Backend
from streamer.backends.cuda import CudaBackend
from streamer.backends.thread import ThreadBackend


def backend_for(device: torch.device | str | None) -> Backend:
    """A backend for ``device``, CUDA or the CPU; None means CUDA if PyTorch finds it, else the CPU. Raises
    ValueError for other devices."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device='{device}' is not supported: use 'cuda' or 'cpu'") from None
    if place.type == "cpu":
        return ThreadBackend()
    if place.type != "cuda":
        raise ValueError(f"device='{place}' is not supported: use 'cuda' or 'cpu'")
    if not torch.cuda.is_available():
        raise ValueError(f"device='{place}': PyTorch finds no CUDA device here; use device='cpu' or None")
    return CudaBackend(place)
