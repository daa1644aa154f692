"""What a test may ask of the stand-in for a GPU, and change of it (README.md)."""

from __future__ import annotations

import ctypes
import json

_LIBRARY = ctypes.CDLL(None)

#: Whether kernels compute nothing here: PyTorch's CUDA build runs on nullgpu.cpp.
IS_LOADED = hasattr(_LIBRARY, "nullgpu_report")

#: Settings that may change while the process runs, and what they are when a test begins.
SETTINGS = {
    "jitter_us": 0.0,
    "kernel_us": 0.0,
    "copy_gbps": 0.0,
    "short_copies": 0.0,
    "lockable": -1.0,
    "allocations": -1.0,
}

if IS_LOADED:
    _LIBRARY.nullgpu_report.restype = ctypes.c_char_p
    _LIBRARY.nullgpu_set.argtypes = [ctypes.c_char_p, ctypes.c_double]


def change(**settings: float) -> None:
    """Change settings of `SETTINGS`."""
    for name, value in settings.items():
        assert _LIBRARY.nullgpu_set(name.encode(), value), f"nullgpu has no setting {name}"


def report() -> dict[str, int]:
    """What nullgpu has counted since the process began, and what is allocated and registered now."""
    found: dict[str, int] = json.loads(_LIBRARY.nullgpu_report())
    return found
