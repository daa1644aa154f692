"""The backend of a device."""

from __future__ import annotations

import torch

from streamer.backends.base import Backend
from streamer.backends.cuda import CudaBackend
from streamer.backends.thread import ThreadBackend


def backend_for(device: torch.device | str | None) -> Backend:
    """The backend of ``device``; of CUDA where there is one, else of the CPU, for None. Raises ValueError for
    others."""
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
