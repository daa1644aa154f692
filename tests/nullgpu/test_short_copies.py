"""Short copies that are done when they are submitted, as the host's cost of a visit is measured."""

from __future__ import annotations

import ctypes
from types import ModuleType

import pytest
import torch

pytestmark = pytest.mark.cuda_api

#: In cycles of `torch.cuda._sleep`.
MILLISECOND = 1_000_000
LIMIT = 1 << 16


def held(on_device: torch.Tensor) -> bytes:
    """What ``on_device``, whose memory is the host's here, holds at this moment."""
    return ctypes.string_at(on_device.data_ptr(), on_device.nbytes)


@pytest.mark.parametrize("is_behind_another", [False, True])
def test_a_short_copy_is_done_at_once_where_nothing_is_before_it(
    is_behind_another: bool, nullgpu: ModuleType
) -> None:
    source = torch.ones(LIMIT, dtype=torch.uint8).pin_memory()
    into = torch.zeros(LIMIT, dtype=torch.uint8).to("cuda")
    torch.cuda.synchronize()
    nullgpu.change(short_copies=LIMIT)
    if is_behind_another:
        torch.cuda._sleep(500 * MILLISECOND)
    into.copy_(source, non_blocking=True)
    is_done = torch.cuda.current_stream().query()
    assert (is_done, held(into)[-1]) == ((False, 0) if is_behind_another else (True, 1))
    torch.cuda.synchronize()
    assert held(into) == bytes(source.tolist())


def test_a_copy_that_is_to_take_its_time_does(nullgpu: ModuleType) -> None:
    source = torch.ones(LIMIT, dtype=torch.uint8).pin_memory()
    into = torch.zeros(LIMIT, dtype=torch.uint8).to("cuda")
    torch.cuda.synchronize()
    nullgpu.change(short_copies=LIMIT, copy_gbps=1e-4)
    into.copy_(source, non_blocking=True)
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert held(into) == bytes(source.tolist())
