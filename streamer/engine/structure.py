"""Whether a wrapped model still has the layers that it was wrapped with.

A module that replaces a layer runs without being streamed, and no loss reveals it. So, at the beginning of a
forward of the model, the modules that hold layers are compared with their earlier contents.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from streamer.engine.unit import Unit


class Structure:
    """The modules of ``model`` that hold its layers, ``units``."""

    def __init__(self, units: Sequence[Unit], model: nn.Module) -> None:
        self._model = model
        self._units = units
        #: the layers by their name in the module that holds them, by the path of that module
        self._layers: dict[str, dict[str, nn.Module]] = {}
        for unit in units:
            path, _, key = unit.name.rpartition(".")
            self._layers.setdefault(path, {})[key] = unit.module
        self._lengths = {
            path: len(model.get_submodule(path)._modules)
            for path, layers in self._layers.items()
            if all(key.isdigit() for key in layers)
        }

    def check(self) -> None:
        """Raise ValueError if a layer or a layer's parameter was replaced, removed or added since the model
        was wrapped."""
        for path, layers in self._layers.items():
            now = self._children(path)
            for key, layer in layers.items():
                found = now.get(key)
                # other code may have put the layer into a module of its own, which calls it
                if found is not layer and (found is None or layer not in found.modules()):
                    raise _refusal(f"layer '{path}.{key}' was replaced or removed")
            if len(now) != self._lengths.get(path, len(now)):
                raise _refusal(f"'{path}' had {self._lengths[path]} layers and has {len(now)}")

        for unit in self._units:
            for name, param, owners in unit.registered:
                if any(module._parameters.get(key) is not param for module, key in owners):
                    raise ValueError(
                        f"parameter '{name}' of a streamed layer was replaced or removed after streamer.wrap "
                        "(torch.func.functional_call does so too): write into it (param.copy_ under "
                        "torch.no_grad), or call streamer.unwrap(model) first"
                    )

    def _children(self, path: str) -> dict[str, nn.Module | None]:
        try:
            return self._model.get_submodule(path)._modules
        except AttributeError:
            raise _refusal(f"'{path}' was removed") from None


def _refusal(what: str) -> ValueError:
    return ValueError(
        f"{what} after streamer.wrap: call streamer.unwrap(model), change the model, and wrap it again"
    )
