"""Positions of tokens in a plan, which has no values.

Models of transformers that are called without a mask look whether their position ids begin anew within a row,
which means that it holds several sequences (``masking_utils.find_packed_sequence_indices``). They look at
values, also where they have just counted the positions themselves: with ``use_cache=False`` no such model
could be planned.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from streamer.torch_private import storage_id

_MODULE, _FINDS = "transformers.masking_utils", "find_packed_sequence_indices"


@contextmanager
def counted_positions(given: Sequence[torch.Tensor] = ()) -> Iterator[None]:
    """Inside the block, position ids on the meta device are one sequence a row, unless the caller has
    ``given`` them: only the model's own are known to be."""
    masks = sys.modules.get(_MODULE)
    find: Any = getattr(masks, _FINDS, None)
    if find is None:
        yield
        return

    def one_sequence(position_ids: torch.Tensor) -> object:
        is_counted = position_ids.is_meta and storage_id(position_ids) not in theirs
        return None if is_counted else find(position_ids)

    theirs = {storage_id(tensor) for tensor in given}
    setattr(masks, _FINDS, one_sequence)
    try:
        yield
    finally:
        setattr(masks, _FINDS, find)
