"""What is paged as one piece: a layer, or the root unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from streamer.memory.layout import Layout


@dataclass(frozen=True)
class Unit:
    """A layer of the model (or, with index ROOT, all that is in no layer).

    ``params`` are the model's own parameters in the order of ``layout.slices``; ``owners`` are, for
    each of them, all the (module, name) pairs under which it is registered in this unit.
    """

    index: int
    name: str
    module: nn.Module
    layout: Layout
    params: tuple[nn.Parameter, ...]
    owners: tuple[tuple[tuple[nn.Module, str], ...], ...]
    buffer_owners: tuple[tuple[nn.Module, str], ...]

    def written(self) -> int:
        """A number that grows whenever somebody writes a parameter in place through PyTorch.

        Raises ValueError where a parameter that was frozen when the model was wrapped now wants a
        gradient: there is no room for it.
        """
        total = 0
        for slice, param in zip(self.layout.slices, self.params, strict=True):
            total += param._version
            if param.requires_grad and not slice.param.trainable:
                raise ValueError(
                    f"'{slice.param.name}' was frozen when the model was wrapped and has no room for a "
                    "gradient: set requires_grad before streamer.wrap, or unwrap and wrap again"
                )
        return total

    def leaves(self, weights: torch.Tensor) -> list[torch.Tensor]:
        """The parameters as autograd leaves that are views of a flat uint8 buffer of weights."""
        return [
            slice.view(weights).detach().requires_grad_(param.requires_grad)
            for slice, param in zip(self.layout.slices, self.params, strict=True)
        ]

    def buffers(self) -> list[torch.Tensor]:
        """The unit's buffers (running statistics, masks), which stay on the device."""
        return [buffer for owner, name in self.buffer_owners if (buffer := owner._buffers[name]) is not None]

    def modes(self) -> tuple[bool, ...]:
        """Which of the unit's modules are in training mode."""
        return tuple(module.training for module in self.module.modules())

    @contextmanager
    def in_modes(self, modes: Sequence[bool]) -> Iterator[None]:
        """Run the block in the training and evaluation modes of another moment."""
        now = self.modes()
        try:
            self._set_modes(modes)
            yield
        finally:
            self._set_modes(now)

    def _set_modes(self, modes: Sequence[bool]) -> None:
        for module, training in zip(self.module.modules(), modes, strict=True):
            module.training = training

    @contextmanager
    def buffers_restored(self, wanted: bool) -> Iterator[None]:
        """Where ``wanted``, undo what the block does to buffers: a forward run again must not count twice."""
        saved = {place: place[0]._buffers[place[1]] for place in self.buffer_owners} if wanted else {}
        try:
            for (owner, name), buffer in saved.items():
                owner._buffers[name] = None if buffer is None else buffer.clone()
            yield
        finally:
            for (owner, name), buffer in saved.items():
                owner._buffers[name] = buffer

    @contextmanager
    def using(self, leaves: Sequence[torch.Tensor]) -> Iterator[None]:
        """Let the unit's modules see ``leaves`` in place of their parameters."""
        for param, owners in zip(self.params, self.owners, strict=True):
            for module, name in owners:
                if module._parameters.get(name) is not param:
                    raise ValueError(
                        f"parameter '{name}' of a {type(module).__name__} in layer '{self.name}' was "
                        "replaced or removed after streamer.wrap: write into it (param.copy_ under "
                        "torch.no_grad), or unwrap first"
                    )
        try:
            self._register(leaves)
            yield
        finally:
            self._register(self.params)

    def _register(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor, owners in zip(tensors, self.owners, strict=True):
            for module, name in owners:
                # as torch.func.functional_call does: the module's own __setattr__ takes only Parameters
                module._parameters[name] = tensor  # type: ignore[assignment]
