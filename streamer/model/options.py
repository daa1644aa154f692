"""The options of `wrap` in one record, with their checks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Literal

import torch

import streamer_native as native
from streamer.backends.disk import Disks
from streamer.engine.layer.layer import POLICIES
from streamer.engine.layer.surroundings import CompileBackend
from streamer.engine.unit import Unit
from streamer.model.init import Init
from streamer.model.layers import Layers
from streamer.model.units import DTYPES
from streamer.store.layout import Layout
from streamer.store.ledger import limit_of

#: One activation policy for all layers, one for each, or a function from a layer's index to its policy.
Activations = str | Sequence[str] | Callable[[int], str]

AUTO: Literal["auto"] = "auto"
#: A number that may be "auto".
Number = int | Literal["auto"] | None

#: A folder, or several.
Folders = str | PathLike[str] | Sequence[str | PathLike[str]]

#: A dtype, or its name.
Dtype = torch.dtype | str

#: The names of dtypes in which weights can be streamed.
DTYPE_NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPE_NAMES |= {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}

_KNOWN = ", ".join(map(repr, POLICIES))


@dataclass(frozen=True)
class WrapOptions:
    """How a model is streamed: arguments of `streamer.wrap`, which documents them and has their defaults."""

    layers: Layers
    dtype: torch.dtype | None
    num_slots: Number
    activations: Activations
    micro_batch_size: Number
    batch_dims: Mapping[str, int | None] | None
    update: str
    grad_dtype: torch.dtype | None
    host_threads: int | None
    init: Init | None
    compile: bool | CompileBackend
    device_memory: int | str | None
    host_memory: int | str | None = None
    disk: Folders | Disks | None = None
    gather_weights: bool = False

    @property
    def host_limit(self) -> int:
        """``host_memory`` in bytes. Raises ValueError for an invalid amount of memory."""
        return limit_of(parse_bytes("host_memory", self.host_memory))

    @property
    def device_limit(self) -> int | None:
        """``device_memory`` in bytes. Raises ValueError for an invalid amount of memory."""
        return parse_bytes("device_memory", self.device_memory)

    def check(self) -> None:
        """Raise ValueError, naming the remedy, for an unsupported option; "auto" is one here."""
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(
                f"dtype={self.dtype!r} cannot be streamed: use torch.float32, torch.bfloat16 or torch.float16"
            )
        if self.num_slots is not None and not _is_count(self.num_slots):
            raise ValueError(
                f"num_slots={self.num_slots!r}: it must be an integer of 1 or more; 2 overlaps copies "
                "and compute"
            )
        if isinstance(self.activations, str):
            _check_policy("activations", self.activations)
        elif not (isinstance(self.activations, Sequence) or callable(self.activations)):
            raise ValueError(
                f"activations={self.activations!r}: use one of {_KNOWN}, a list with one for each layer, "
                "or a function that returns one for a layer's index"
            )
        if self.micro_batch_size is not None and not _is_count(self.micro_batch_size):
            raise ValueError(
                f"micro_batch_size={self.micro_batch_size!r}: it must be an integer of 1 or more, or None"
            )
        if self.batch_dims is not None:
            _check_batch_dims(self.batch_dims, self.micro_batch_size)
        if self.update not in ("step", "backward"):
            raise ValueError(f"update={self.update!r} is unknown: use 'step' or 'backward'")
        if self.grad_dtype not in (None, torch.float32):
            raise ValueError(
                f"grad_dtype={self.grad_dtype!r}: use torch.float32, or None to add gradients up in the "
                "dtype of their parameters"
            )
        if not (isinstance(self.compile, bool | str) or callable(self.compile)):
            raise ValueError(f"compile={self.compile!r}: use True, False, or a backend of torch.compile")
        if isinstance(self.compile, str) and self.compile not in (known := torch.compiler.list_backends(())):
            raise ValueError(
                f"compile={self.compile!r} is not a backend of torch.compile; there are: {', '.join(known)}"
            )
        if not isinstance(self.gather_weights, bool):
            raise ValueError(f"gather_weights={self.gather_weights!r}: use True or False")
        most = native.num_threads_available()
        if self.host_threads is not None and not (_is_count(self.host_threads) and self.host_threads <= most):
            raise ValueError(
                f"host_threads={self.host_threads!r}: it must be an integer from 1 to {most}; for more, "
                "set the environment variable NUMBA_NUM_THREADS before Python starts"
            )


def _check_policy(name: str, policy: object) -> str:
    """Return ``policy``. Raises ValueError unless it is an activation policy; ``name`` is the option's."""
    if not isinstance(policy, str) or policy not in POLICIES:
        raise ValueError(f"{name}={policy!r} is unknown: use one of {_KNOWN}")
    return policy


def policies(activations: Activations, units: Sequence[Unit]) -> list[str]:
    """The activation policy of each of ``units``. Raises ValueError for an unknown one."""
    if isinstance(activations, str):
        return [activations] * len(units)
    if callable(activations):
        return [_check_policy(f"activations({unit.index})", activations(unit.index)) for unit in units]
    if len(activations) != len(units):
        raise ValueError(
            f"activations=[...] has {len(activations)} entries, and there are {len(units)} layers: use one "
            "for each"
        )
    return [_check_policy(f"activations[{index}]", policy) for index, policy in enumerate(activations)]


def _check_batch_dims(batch_dims: Mapping[str, int | None], micro_batch_size: Number) -> None:
    if micro_batch_size is None:
        raise ValueError("batch_dims says how micro-batches are cut: set micro_batch_size too")
    if not isinstance(batch_dims, Mapping) or not all(
        isinstance(name, str) and (dim is None or type(dim) is int) for name, dim in batch_dims.items()
    ):
        raise ValueError(
            f"batch_dims={batch_dims!r}: use a dict from the names of arguments of the layers, or the "
            "paths or globs of their lists, to the dimension of the batch, None for those that have none"
        )


def parse_bytes(name: str, value: int | str | None) -> int | None:
    """Bytes from a number or from a text such as "16GiB" or "15.5 GB"; ``name`` is the option's.

    Raises ValueError for anything else, and for less than one byte.
    """
    if value is None or _is_count(value):
        return None if value is None else int(value)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(k|[KMGT]i?)?B\s*", value) if isinstance(value, str) else None
    prefix = (match and match[2]) or ""
    factor = (1024 if prefix.endswith("i") else 1000) ** "_KMGT".index(prefix[:1].upper() or "_")
    if match is None or (nbytes := int(float(match[1]) * factor)) < 1:
        what = "a number and its unit" if isinstance(value, str) else "a number of bytes, or a text"
        raise ValueError(f"{name}={value!r}: use {what} such as '16GiB'")
    return nbytes


def dtype_of(name: str, value: Dtype | None) -> torch.dtype | None:
    """The dtype ``value`` as itself or by name; ``name`` is the option's. Raises ValueError for an unknown
    name."""
    if not isinstance(value, str):
        return value
    if value not in DTYPE_NAMES:
        raise ValueError(f"{name}={value!r} is not a dtype: use one of {', '.join(map(repr, DTYPE_NAMES))}")
    return DTYPE_NAMES[value]


def folders_of(disk: Folders) -> list[str | PathLike[str]]:
    """The folders of ``disk=``. Raises ValueError for anything else."""
    folders = [disk] if isinstance(disk, str | PathLike) else disk
    are_folders = isinstance(folders, Sequence) and all(isinstance(f, str | PathLike) for f in folders)
    if not are_folders or not folders:
        raise ValueError(f"disk={disk!r}: use a folder, or a list of folders on different drives")
    return list(folders)


def check_dtypes_for_backward(layouts: Iterable[Layout]) -> None:
    """Raise ValueError if ``update="backward"`` cannot train parameters of these dtypes."""
    if any(slice.param.dtype == torch.float16 for layout in layouts for slice in layout.trainable):
        raise ValueError(
            "update='backward' updates before a loss scale can be checked, without which float16 overflows: "
            "wrap with dtype=torch.bfloat16 or update='step'"
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
