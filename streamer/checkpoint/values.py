"""The parts of a checkpoint that are not tensors: Python values as JSON (no pickle, and the same values
back), and the states of the random number generators of a run.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from streamer.optim.replay.spill import OnDisk

#: Takes a tensor to store outside of the JSON, and returns the name that stands for it in the JSON.
Put = Callable[[torch.Tensor | OnDisk], str]


def encode(value: Any, put: Put, where: str = "extra") -> Any:
    """``value`` in JSON's types. Raises ValueError for anything but a number, a string, a list, a tuple, a
    dict, None, a tensor or an array, naming its place."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if type(value) is float:
        return {"float": value.hex()}
    try:
        if isinstance(value, torch.Tensor | OnDisk):
            return {"tensor": put(value)}
        if type(value) is np.ndarray:
            return {"array": put(torch.from_numpy(value.copy(order="C")))}
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
    if type(value) in (list, tuple):
        kind = type(value).__name__
        return {kind: [encode(item, put, f"{where}[{index}]") for index, item in enumerate(value)]}
    if isinstance(value, dict):
        return {
            # a MultiStepLR holds one
            "counter" if type(value) is Counter else "dict": [
                [encode(key, put, f"a key of {where}"), encode(item, put, f"{where}[{key!r}]")]
                for key, item in value.items()
            ]
        }
    raise ValueError(
        f"{where} is a {type(value).__name__}, which cannot be saved without pickle: use numbers, strings, "
        "lists, tuples, dicts, tensors or arrays (a scheduler's state_dict(), say)"
    )


def decode(value: Any, get: Callable[[str], torch.Tensor]) -> Any:
    """The decoded value; ``get`` returns a tensor by its name. Raises ValueError for other JSON."""
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, dict) and len(value) == 1:
        ((kind, held),) = value.items()
        if kind == "float":
            return float.fromhex(held)
        if kind == "int":  # of version 0.1: an integer of more than 64 bits
            return int(held, 16)
        if kind == "tensor":
            return get(held)
        if kind == "array":
            return get(held).numpy()
        if kind in ("list", "tuple"):
            items = [decode(item, get) for item in held]
            return items if kind == "list" else tuple(items)
        if kind in ("dict", "counter"):
            pairs = {decode(key, get): decode(item, get) for key, item in held}
            return pairs if kind == "dict" else Counter(pairs)
    raise ValueError(f"{value!r} is not an encoded value")


def random_states() -> dict[str, Any]:
    """The states of Python's, NumPy's and PyTorch's generators, on the CPU and on every GPU, in plain types
    and tensors."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Continue from ``states`` of `random_states`, without those of GPUs that are not here."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index, state in enumerate(states["cuda"][:here]):
        torch.cuda.set_rng_state(state, index)
