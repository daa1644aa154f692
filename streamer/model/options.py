"""What `wrap` may be told: each option checked before anything else is done."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

import streamer_native as native
from streamer.engine.layer.call import CompileBackend
from streamer.engine.layer.policies import POLICIES
from streamer.engine.paging.unit import Unit
from streamer.memory.layout import Layout
from streamer.model.units import DTYPES

#: One activation policy for all layers, one for each, or a function that gives one for a layer's index.
Activations = str | Sequence[str] | Callable[[int], str]

_KNOWN = ", ".join(map(repr, POLICIES))


def check_options(
    *,
    dtype: torch.dtype | None,
    num_slots: int | None,
    activations: Activations,
    micro_batch_size: int | None,
    batch_dims: Mapping[str, int | None] | None,
    update: str,
    grad_dtype: torch.dtype | None,
    host_threads: int | None,
    compile: bool | CompileBackend,
) -> None:
    """Raise ValueError, naming the remedy, for an option of `wrap` that cannot be honoured."""
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(
            f"dtype={dtype!r} cannot be streamed: use torch.float32, torch.bfloat16 or torch.float16"
        )
    if num_slots is not None and not _is_count(num_slots):
        raise ValueError(
            f"num_slots={num_slots!r}: it must be an integer of 1 or more; 2 overlaps copies and compute"
        )
    if isinstance(activations, str):
        _check_policy("activations", activations)
    elif not (isinstance(activations, Sequence) or callable(activations)):
        raise ValueError(
            f"activations={activations!r}: give one of {_KNOWN}, a list with one for each layer, or a "
            "function that returns one for a layer's index"
        )
    if micro_batch_size is not None and not _is_count(micro_batch_size):
        raise ValueError(
            f"micro_batch_size={micro_batch_size!r}: it must be an integer of 1 or more, or None"
        )
    if batch_dims is not None:
        _check_batch_dims(batch_dims, micro_batch_size)
    if update not in ("step", "backward"):
        raise ValueError(f"update={update!r} is unknown: use 'step' or 'backward'")
    if grad_dtype not in (None, torch.float32):
        raise ValueError(
            f"grad_dtype={grad_dtype!r}: use torch.float32, or None to add gradients up in the dtype of "
            "their parameters"
        )
    if not (isinstance(compile, bool | str) or callable(compile)):
        raise ValueError(f"compile={compile!r}: use True, False, or a backend of torch.compile")
    if isinstance(compile, str) and compile not in (known := torch.compiler.list_backends(())):
        raise ValueError(f"compile={compile!r} is no backend of torch.compile; there are: {', '.join(known)}")
    most = native.num_threads_available()
    if host_threads is not None and not (_is_count(host_threads) and host_threads <= most):
        raise ValueError(
            f"host_threads={host_threads!r}: it must be an integer from 1 to {most}; for more, set the "
            "environment variable NUMBA_NUM_THREADS before Python starts"
        )


def _check_policy(name: str, policy: object) -> str:
    """``policy``. Raises ValueError unless it is an activation policy; ``name`` is the option's."""
    if not isinstance(policy, str) or policy not in POLICIES:
        raise ValueError(f"{name}={policy!r} is unknown: use one of {_KNOWN}")
    return policy


def policies(activations: Activations, units: Sequence[Unit]) -> list[str]:
    """The activation policy of each of ``units``. Raises ValueError where it is none."""
    if isinstance(activations, str):
        return [activations] * len(units)
    if callable(activations):
        return [_check_policy(f"activations({unit.index})", activations(unit.index)) for unit in units]
    if len(activations) != len(units):
        raise ValueError(
            f"activations has {len(activations)} entries, and there are {len(units)} layers: give one "
            "for each"
        )
    return [_check_policy(f"activations[{index}]", policy) for index, policy in enumerate(activations)]


def _check_batch_dims(batch_dims: Mapping[str, int | None], micro_batch_size: int | None) -> None:
    if micro_batch_size is None:
        raise ValueError("batch_dims says how micro-batches are cut: give micro_batch_size too")
    if not isinstance(batch_dims, Mapping) or not all(
        isinstance(name, str) and (dim is None or type(dim) is int) for name, dim in batch_dims.items()
    ):
        raise ValueError(
            f"batch_dims={batch_dims!r}: give a dict from the names of arguments of the layers to the "
            "dimension of their batch, None for those that have none"
        )


def parse_bytes(name: str, given: int | str | None) -> int | None:
    """Bytes from a count or from a text such as "16GiB" or "15.5 GB"; ``name`` is the option's.

    Raises ValueError for anything else, and for less than a byte.
    """
    if given is None or _is_count(given):
        return None if given is None else int(given)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(k|[KMGT]i?)?B\s*", given) if isinstance(given, str) else None
    prefix = (match and match[2]) or ""
    factor = (1024 if prefix.endswith("i") else 1000) ** "_KMGT".index(prefix[:1].upper() or "_")
    if match is None or (nbytes := int(float(match[1]) * factor)) < 1:
        what = "a number and its unit" if isinstance(given, str) else "it in bytes, or as a text"
        raise ValueError(f"{name}={given!r}: give {what} such as '16GiB'")
    return nbytes


def check_dtypes_for_backward(layouts: Iterable[Layout]) -> None:
    """Raise ValueError if ``update="backward"`` cannot train parameters of these dtypes."""
    if any(slice.param.dtype == torch.float16 for layout in layouts for slice in layout.trainable):
        raise ValueError(
            "update='backward' updates before a loss scale can be checked, without which float16 overflows: "
            "wrap with dtype=torch.bfloat16 or update='step'"
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
