"""One call of a layer: its own forward, on weights from a slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from streamer.engine.tree import Rebuild, flatten
from streamer.engine.unit import Unit

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Call:
    """A layer's plain forward with everything but tensors bound: ``rebuild`` makes its (args, kwargs)."""

    unit: Unit
    forward: Callable[..., Any]
    rebuild: Rebuild

    def run(
        self, weights: torch.Tensor, leaves: Tensors, inputs: Tensors
    ) -> tuple[list[torch.Tensor], Rebuild]:
        """Run it with ``leaves``, which are views of the slot ``weights``, as parameters.

        Returns the tensors of the result and what puts the result together. None of them aliases the
        slot, which will soon hold another layer.
        """
        args, kwargs = self.rebuild(inputs)
        with self.unit.using(leaves):
            result = self.forward(*args, **kwargs)
        outputs, rebuild = flatten(result)
        return [out.clone() if aliases(out, weights) else out for out in outputs], rebuild


def aliases(tensor: torch.Tensor, buffer: torch.Tensor) -> bool:
    """Whether both share one storage (its identity, since all meta tensors have the same address)."""
    return bool(tensor.untyped_storage()._cdata == buffer.untyped_storage()._cdata)
