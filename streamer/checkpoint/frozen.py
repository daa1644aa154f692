"""Frozen parameters that a checkpoint leaves out, such as the base of adapters. It holds their checksums, so
that `load` can check that the model has the same values.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from streamer.checkpoint.tensors import DTYPES, bytes_of
from streamer.store.layout import Slice
from streamer.store.shard import HostShard
from streamer.store.weights_on_disk import WeightsOnDisk


@dataclass(frozen=True)
class LeftOut:
    """A manifest's entry for a parameter that the checkpoint leaves out: its dtype by the name of the
    safetensors format, its shape, and the CRC-32 of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    crc32: int

    @staticmethod
    def held(slice: Slice, shard: HostShard) -> LeftOut:
        """The entry of a frozen parameter of ``shard``, which is read as a whole; read only once if it is in
        the user's file, which does not change."""
        on_disk = shard.weights_on_disk
        known = _IN_FILES.setdefault(on_disk, {}) if on_disk.is_stored(slice) else {}
        if slice not in known:
            values = shard.weight_of(slice)
            known[slice] = LeftOut(DTYPES[values.dtype], tuple(values.shape), zlib.crc32(bytes_of(values)))
        return known[slice]

    @staticmethod
    def parsed(value: Mapping[str, Any]) -> LeftOut:
        """The entry, as a manifest has it."""
        return LeftOut(value["dtype"], tuple(value["shape"]), value["crc32"])


#: Known entries of parameters in files, for as long as these files are read.
_IN_FILES: WeakKeyDictionary[WeightsOnDisk, dict[Slice, LeftOut]] = WeakKeyDictionary()
