"""How an optimizer gets host memory for its moments, and whether what was saved fits there."""

from __future__ import annotations

from typing import Any

import torch

from streamer.engine.executor import Executor
from streamer.memory.purposes import BF16, FP32, INT8, MOMENTS, host_bytes


def parse_state_dtype(given: torch.dtype | str) -> torch.dtype:
    """The dtype that is meant by ``state_dtype=given``. Raises ValueError for others than the three."""
    for dtype in (FP32, BF16, INT8):
        if given in (dtype, str(dtype).removeprefix("torch.")):
            return dtype
    raise ValueError(f"state_dtype={given!r} is unknown: use torch.float32, torch.bfloat16 or 'int8'")


def make_room(executor: Executor, state_dtype: torch.dtype) -> None:
    """Allocate zeroed moments for a model, unless it has them in that dtype already.

    Raises MemoryError if there is no room, before anything is allocated.
    """
    store, purposes = executor.store, MOMENTS[state_dtype]
    if store.holds(purposes):
        return
    store.drop(purpose for kept in MOMENTS.values() for purpose in kept)
    executor.updated_by.clear()
    wanted = host_bytes([shard.layout for shard in store.shards], purposes)
    needed, available = sum(wanted.values()), executor.backend.host_available()
    if needed > available:
        parts = ", ".join(f"{name} {nbytes}" for name, nbytes in wanted.items())
        raise MemoryError(
            f"not enough host memory for the moments: they take {needed} bytes ({parts}) and {available} are "
            "free: choose a smaller state_dtype (torch.bfloat16 or 'int8', with bfloat16 parameters), or "
            "freeze parameters"
        )
    store.add(purposes)


def check_moments(name: str, saved: dict[str, Any], moments: dict[str, torch.Tensor]) -> None:
    """Raise ValueError if what was ``saved`` for a parameter is not laid out as its ``moments`` are."""

    def described(values: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
        tensors = {key: torch.as_tensor(value) for key, value in values.items() if key != "step"}
        return {key: (str(t.dtype).removeprefix("torch."), *t.shape) for key, t in tensors.items()}

    if described(saved) != described(moments):
        raise ValueError(
            f"the state of '{name}' is {described(saved)} and this optimizer keeps {described(moments)}: "
            "make AdamW with the state_dtype that it was saved with"
        )
