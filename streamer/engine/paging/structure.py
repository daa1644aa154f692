"""Whether a wrapped model still has the modules that it was wrapped with.

A module that is put in the place of a layer runs without being streamed, and nobody clips or updates a
parameter that is added outside of the layers. No loss shows that. So what each module outside of the layers
holds is compared with what it held, by identity, where a pass over the model begins. Inside of a layer
`Unit.using` looks.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from streamer.engine.paging.unit import Snapshot, Unit

#: What becomes of a module that nobody knows of.
LOST = ", and what is there now is neither streamed nor clipped"


class Structure:
    """The modules of a model that are in none of ``units``. Their parameters are those of ``root``."""

    def __init__(self, units: Sequence[Unit], root: Unit) -> None:
        self._units = units
        self._root = root
        self._called: set[int] = set()
        self._note()

    def enter(self, index: int) -> None:
        """Layer ``index`` is called: if it was called since the last `check`, another pass may have begun."""
        if index in self._called:
            self.check()
        self._called.add(index)

    def check(self) -> None:
        """Raise ValueError if a layer was replaced, removed or moved, or if a parameter was added outside of
        the layers, since the model was wrapped."""
        if self._snapshot.has_changed():
            self._check_layers()
            self._check_params()
            self._note()  # nothing that matters: modules without parameters, a call by torch.func
        self._called.clear()

    def _note(self) -> None:
        self._snapshot = Snapshot(tuple(self._outside().values()))

    def _outside(self) -> dict[str, nn.Module]:
        """The modules that are in no layer, by name."""
        inside = {module for unit in self._units for module in unit.module.modules()}
        return {name: m for name, m in self._root.module.named_modules() if m not in inside}

    def _check_layers(self) -> None:
        now = dict(self._root.module.named_modules(remove_duplicate=False))
        for unit in self._units:
            found = now.get(unit.name)
            # others may have put it into a module of theirs, which calls it
            if found is None:
                raise _refusal(f"layer '{unit.name}' was removed")
            if unit.module not in found.modules():
                raise _refusal(f"layer '{unit.name}' was replaced by another {type(found).__name__}", LOST)

    def _check_params(self) -> None:
        params = {param for _, param, _ in self._root.registered}
        for path, module in self._outside().items():
            for name, param in module._parameters.items():
                # a plain tensor is there for one call, by torch.func.functional_call
                if isinstance(param, nn.Parameter) and param not in params:
                    full_name = ".".join(part for part in (path, name) if part)
                    raise _refusal(f"parameter '{full_name}' was added or replaced", LOST)


def _refusal(what: str, why: str = "") -> ValueError:
    return ValueError(
        f"{what} after streamer.wrap{why}: call streamer.unwrap(model), change the model, and wrap it again"
    )
