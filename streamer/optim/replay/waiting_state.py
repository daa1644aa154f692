"""``optimizer.state`` on a wrapped model: reading a parameter's state waits for the parameter's update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from streamer.engine.handle import home_of
from streamer.optim.replay.spill import Spill, in_memory, is_on_disk


class WaitingState(defaultdict[Any, Any]):
    """The state of an optimizer by parameter. The optimizer's own updates use the methods of `dict`, which do
    not wait."""

    def __init__(self, state: Mapping[Any, Any]) -> None:
        super().__init__(dict, state)
        #: writes state to disk
        self.spill: Spill | None = None

    def wait(self, keys: Iterable[Any]) -> None:
        """Block until the state of these parameters may be read and written."""
        await_state(keys)
        if self.spill is not None:
            self.spill.finish()

    def __getitem__(self, key: Any) -> Any:
        self.wait([key])
        return _readable(super().__getitem__(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        self.wait([key])
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        self.wait([key])
        super().__delitem__(key)

    def __contains__(self, key: Any) -> bool:
        self.wait([key])
        return super().__contains__(key)

    def __iter__(self) -> Iterator[Any]:
        self.wait(dict.keys(self))
        return super().__iter__()

    def __len__(self) -> int:
        self.wait(dict.keys(self))
        return super().__len__()

    def get(self, key: Any, default: Any = None) -> Any:
        self.wait([key])
        return _readable(super().get(key, default))

    def pop(self, key: Any, *default: Any) -> Any:
        self.wait([key])
        return super().pop(key, *default)

    def keys(self) -> Any:
        self.wait(dict.keys(self))
        return super().keys()

    def values(self) -> Any:
        self.wait(dict.keys(self))
        return [_readable(value) for value in super().values()]

    def items(self) -> Any:
        self.wait(dict.keys(self))
        return [(key, _readable(value)) for key, value in super().items()]

    def clear(self) -> None:
        self.wait(dict.keys(self))
        super().clear()


def _readable(state: Any) -> Any:
    """A state for user code, with copies of tensors on disk."""
    return in_memory(state) if is_on_disk(state) else state


def await_state(params: Iterable[Any]) -> None:
    """Block until the updates of those ``params`` that belong to wrapped models are done."""
    homes = [home_of(param) for param in [*params] if isinstance(param, torch.Tensor)]
    for executor, unit in dict.fromkeys((home.executor, home.unit) for home in homes if home is not None):
        executor.host.await_state(unit)
