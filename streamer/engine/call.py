"""One call of a layer: its own forward, on weights from a slot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from streamer.engine.compiled import CompiledForward
from streamer.engine.sharing import untangle
from streamer.engine.tree import Rebuild, fingerprint, flatten, reachable
from streamer.engine.unit import Attributes, Unit, changed_attributes, set_attributes

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Call:
    """A layer's plain forward with everything but tensors bound: ``rebuild`` makes its (args, kwargs)."""

    unit: Unit
    forward: Callable[..., Any]
    rebuild: Rebuild

    @property
    def compile_failures(self) -> tuple[type[BaseException], ...]:
        """The exceptions that say that compiling the forward has failed; none where it is not compiled."""
        return (self.forward.failure,) if isinstance(self.forward, CompiledForward) else ()

    @property
    def is_compiled(self) -> bool:
        """Whether a compiled forward is what runs."""
        return isinstance(self.forward, CompiledForward) and self.forward.works

    def give_up_compiling(self, error: BaseException) -> None:
        """Run the forward as it is from now on, because of ``error``, one of `compile_failures`."""
        assert isinstance(self.forward, CompiledForward)
        self.forward.give_up(error)

    def run(
        self, weights: torch.Tensor, leaves: Tensors, inputs: Tensors
    ) -> tuple[list[torch.Tensor], Rebuild]:
        """Run it with ``leaves``, which are views of the slot ``weights``, as parameters.

        Returns the tensors that are to leave the layer, and what puts its result together from them and,
        after them, the user's inputs: [Note: shared outputs]. None of them aliases the slot, which will soon
        hold another layer. Raises ValueError if the layer changes its arguments.
        """
        args, kwargs = self.rebuild(inputs)
        given = reachable((args, kwargs))
        self._check_seen(given, inputs, "is given", lambda tensor: tensor.requires_grad)
        before = fingerprint((args, kwargs))
        try:
            result = run_on_slot(self.unit, self.forward, weights, leaves, args, kwargs)
        except RuntimeError as error:
            # autograd's own refusal, where the graph is built in forward, names no layer
            if "in-place operation" in str(error):
                raise self._changes_its_arguments() from error
            raise
        if fingerprint((args, kwargs)) != before:
            raise self._changes_its_arguments()
        outputs, rebuild = flatten(result)
        self._check_seen(reachable(result), outputs, "returns", lambda tensor: tensor.is_floating_point())
        return untangle(self.unit.name, outputs, rebuild, inputs)

    def _check_seen(
        self,
        tensors: Tensors,
        seen: Tensors,
        verb: str,
        matters: Callable[[torch.Tensor], bool],
    ) -> None:
        """Refuse tensors inside objects that `flatten` does not open: they would lose their gradients."""
        known = {id(tensor) for tensor in seen}
        if any(id(tensor) not in known and matters(tensor) for tensor in tensors):
            raise ValueError(
                f"layer '{self.unit.name}' {verb} a tensor inside an object of its own class, where its "
                "gradient would be lost: use a tuple, a list, a dict or a dataclass"
            )

    def _changes_its_arguments(self) -> ValueError:
        return ValueError(
            f"layer '{self.unit.name}' changes what it is given (a tensor in place, or a list or a cache "
            "among its arguments), so it cannot run again in backward: let it return the new value"
        )


def run_on_slot(
    unit: Unit,
    forward: Callable[..., Any],
    weights: torch.Tensor,
    leaves: Tensors,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """``forward`` with ``leaves``, views of the slot ``weights``, as parameters; the result does not alias
    the slot. Raises ValueError if it writes its weights, since the slot is a copy, or keeps them."""
    slot = (weights, *leaves)
    before, attributes = [tensor._version for tensor in slot], unit.attributes()
    with unit.restored(), unit.using(leaves):
        result = forward(*args, **kwargs)
    if changed := list(changed_attributes(attributes)):
        unit.forget_attributes()
        _check_not_kept(unit, attributes, changed, weights)
    if [tensor._version for tensor in slot] != before:
        raise ValueError(
            f"layer '{unit.name}' writes its own weights in its forward, which would be lost: write them "
            "between steps"
        )
    outputs, rebuild = flatten(result)
    return rebuild([out.clone() if aliases(out, weights) else out for out in outputs])


def _check_not_kept(
    unit: Unit,
    before: Attributes,
    changed: Iterable[tuple[nn.Module, Mapping[str, Any]]],
    weights: torch.Tensor,
) -> None:
    for module, values in changed:
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and values.get(name) is not value and aliases(value, weights):
                set_attributes(before)
                raise ValueError(
                    f"layer '{unit.name}' keeps a weight, or a view of one, in attribute '{name}' of a "
                    f"{type(module).__name__} beyond its forward, when other weights will be in its place: "
                    "keep a clone, or look the weight up each time"
                )


def aliases(tensor: torch.Tensor, buffer: torch.Tensor) -> bool:
    """Whether both share one storage (its identity, since all meta tensors have the same address)."""
    return bool(tensor.untyped_storage()._cdata == buffer.untyped_storage()._cdata)
