"""Parameter groups: what a group's hyperparameters may be, and what they are for one update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from streamer_native import Hyper


def check_group(group: dict[str, Any]) -> None:
    """Raise ValueError for a hyperparameter out of its range."""
    betas = group["betas"]
    for name, fits in (
        ("lr", 0 <= group["lr"] < math.inf),
        (
            "betas",
            isinstance(betas, tuple | list) and len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
        ),
        ("eps", 0 <= group["eps"] < math.inf),
        ("weight_decay", 0 <= group["weight_decay"] < math.inf),
    ):
        if not fits:
            raise ValueError(
                f"{name}={group[name]} is out of range: betas are two numbers in [0, 1), the others are "
                "finite and 0 or more"
            )


def hyper_of(group: dict[str, Any], step: int) -> Hyper:
    """What an update takes from its group; ``step`` counts from 1."""
    beta1, beta2 = group["betas"]
    return Hyper(float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"], step)


def check_landed_with(landed_with: Mapping[int, Hyper], groups: Sequence[dict[str, Any]]) -> None:
    """Raise RuntimeError if layers were updated, as gradients landed, with other hyperparameters than those
    of ``groups``; ``landed_with`` has them by the identity of a group."""
    for group in groups:
        if landed_with.get(id(group), hyper_of(group, 1)) != hyper_of(group, 1):
            raise RuntimeError(
                "hyperparameters of a group (lr?) were changed between backward and step(), but "
                "update='backward' has updated layers with the old ones: change them before backward"
            )
