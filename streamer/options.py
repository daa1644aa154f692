"""What `wrap` may be told: each option checked before anything else is done."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

import streamer_native as native
from streamer.engine.compiled import CompileBackend
from streamer.engine.policies import POLICIES
from streamer.memory.layout import Layout
from streamer.units import DTYPES

_FACTORS: dict[str | None, int] = {
    None: 1,
    **{letter: 1000 ** (power + 1) for power, letter in enumerate("KMGT")},
    "k": 1000,
    **{f"{letter}i": 1024 ** (power + 1) for power, letter in enumerate("KMGT")},
}


def check_options(
    *,
    dtype: torch.dtype | None,
    num_slots: int,
    activations: str,
    update: str,
    grad_dtype: torch.dtype | None,
    host_threads: int | None,
    compile: bool | CompileBackend,
) -> None:
    """Raise ValueError, naming the mend, for an option of `wrap` that cannot be honoured."""
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(
            f"dtype={dtype!r} cannot be streamed: use torch.float32, torch.bfloat16 or torch.float16"
        )
    if not _is_count(num_slots):
        raise ValueError(
            f"num_slots={num_slots!r}: it must be an integer of 1 or more; 2 overlaps copies and compute"
        )
    if activations not in POLICIES:
        raise ValueError(
            f"activations={activations!r} is unknown: use one of {', '.join(map(repr, POLICIES))}"
        )
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


def parse_bytes(name: str, given: int | str | None) -> int | None:
    """Bytes from a count or from a text such as "16GiB" or "15.5 GB"; ``name`` is the option's.

    Raises ValueError for anything else, and for less than a byte.
    """
    if given is None or _is_count(given):
        return None if given is None else int(given)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(k|[KMGT]i?)?B\s*", given) if isinstance(given, str) else None
    if match is None or (nbytes := int(float(match[1]) * _FACTORS[match[2]])) < 1:
        raise ValueError(f"{name}={given!r}: give it in bytes, or as a text such as '16GiB'")
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
