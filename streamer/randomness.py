"""The states of the generators of random numbers that a run draws from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """Those of Python, NumPy and PyTorch, on the CPU and on every GPU, in plain types and tensors."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def check_random_states(states: dict[str, Any]) -> None:
    """Raise, what NumPy and the others raise, unless `set_random_states` can take these."""
    random.Random().setstate(states["python"])
    np.random.RandomState().set_state(states["numpy"])
    torch.Generator().set_state(states["cpu"])
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index, state in enumerate(states["cuda"][:here]):
        torch.Generator(f"cuda:{index}").set_state(state)


def set_random_states(states: dict[str, Any]) -> None:
    """Go on from ``states`` of `random_states`; those of GPUs that are not here are left out."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index, state in enumerate(states["cuda"][:here]):
        torch.cuda.set_rng_state(state, index)
