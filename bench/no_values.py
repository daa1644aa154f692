"""``--no-values``: complete measurements on a stand-in for a GPU: its kernels compute nothing.

Sizes, copies, bytes and waits of such a run are real; losses, gradients and the seconds of kernels are not.
`bench.common.provenance` asks each device for a sum, and `bench.report` refuses results of a device that
cannot add as results of a GPU, with or without this option.
"""

from __future__ import annotations

import argparse

import torch

from streamer.engine.layer import batch_check
from streamer.engine.paging.norms import Norms
from streamer.optim import adamw


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-values",
        action="store_true",
        help="the device is a stand-in for a GPU whose kernels compute nothing: gradients are taken to be "
        "finite",
    )


def go_on_without_values() -> None:
    """Let training continue in this process with any values that its device computes."""
    batch_check._are_alike = lambda *_: True
    measured = Norms.is_finite

    def is_finite(self: Norms) -> bool:
        measured(self)  # what reads the device still waits for it
        return True

    Norms.is_finite = is_finite  # type: ignore[method-assign]
    total = Norms.total
    # a sum of squares that nobody has computed may be negative
    Norms.total = lambda *args, **options: abs(total(*args, **options))  # type: ignore[method-assign]
    adamw.all_finite = lambda gradient, stretches: True


def has_values(device: torch.device | str) -> bool:
    """Whether kernels of ``device`` compute."""
    # both ways to 0 for memory that nobody has written
    numbers = torch.arange(1, 9, device=device)
    return numbers.sum().item() == 36 and (numbers * 0).sum().item() == 0
