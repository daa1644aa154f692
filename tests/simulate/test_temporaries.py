"""Memory that kernels take while they run, by rules; ``tests/backends/test_cuda_temporaries.py`` compares the
rules with PyTorch's allocator. The figures here are that allocator's, of PyTorch 2.14.1."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from streamer.planner.measure import Meter
from streamer.simulate.machine import H200, RTX_4090, Machine
from streamer.simulate.temporaries import workspace_bytes

BIAS = (8192, 4096)


def taken(machine: Machine) -> int:
    """What the gradient of a bias takes on ``machine`` beside the gradient."""
    gradient = torch.empty(BIAS, dtype=torch.bfloat16, device="meta")
    with Meter(machine) as meter:
        bias = gradient.sum(0)
    return meter.all.rise - bias.nbytes


def test_the_gradient_of_a_bias_takes_partial_sums() -> None:
    # of 66 blocks for each of 4096 outputs, each with room for 128 outputs in fp32; and 32 semaphores
    assert taken(H200) == 4 * 4096 * 66 * 128 + 4 * 32


def test_fewer_multiprocessors_take_fewer_partial_sums() -> None:
    assert taken(replace(H200, multiprocessors=66)) == 4 * 4096 * 33 * 128 + 4 * 32
    assert taken(replace(H200, threads_per_multiprocessor=1024)) == 4 * 4096 * 33 * 128 + 4 * 32


def test_what_is_not_known_of_a_gpu_is_as_of_an_h100() -> None:
    unknown = replace(H200, multiprocessors=None, threads_per_multiprocessor=None, compute_capability=None)
    assert taken(unknown) == taken(H200)
    assert workspace_bytes(unknown) == workspace_bytes(H200)


def test_a_processor_takes_none_of_the_devices_memory() -> None:
    assert taken(replace(H200, kind="cpu")) == workspace_bytes(replace(H200, kind="cpu")) == 0


@pytest.mark.parametrize(("machine", "nbytes"), [(RTX_4090, 8_519_680), (H200, 33_554_432)])
def test_products_of_matrices_have_a_workspace_in_both_threads(machine: Machine, nbytes: int) -> None:
    assert workspace_bytes(machine) == 2 * nbytes
