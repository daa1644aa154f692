"""What transformers records inside of a layer: router logits of experts, weights of attention.

[Note: recorded outputs]
A model of transformers returns such tensors beside its hidden states (``output_router_logits``,
``output_attentions``). Hooks on modules append them to lists, which the model's forward has begun. In a
streamed layer they are part of the layer's own graph, which no backward of the user's reaches. So each call
of a layer has lists of its own. What is in them then is returned beside the layer's result, as tensors of the
user's graph, and appended to the model's lists.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

#: Where the variable is that holds the model's lists, by their names.
_MODULE, _VARIABLE = "transformers.utils.output_capturing", "_active_collector"

Forward = Callable[..., Any]


class RecordingForward:
    """A layer's ``forward`` that returns its result and, by the lists' names, what was recorded meanwhile."""

    def __init__(self, forward: Forward, variable: Any, lists: dict[str, Any]) -> None:
        self._forward = forward
        self._variable = variable
        # not the lists, of which every layer's graph would keep all tensors
        self._begun = {name: len(items) for name, items in lists.items() if isinstance(items, list)}
        self._others = {name: value for name, value in lists.items() if name not in self._begun}

    @staticmethod
    def of(forward: Forward) -> RecordingForward | None:
        """For ``forward``; None where nothing is recorded now."""
        variable = getattr(sys.modules.get(_MODULE), _VARIABLE, None)
        lists = None if variable is None else variable.get()
        return RecordingForward(forward, variable, lists) if lists else None

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, list[Any]]]:
        # hooks look at the length
        own = {name: [None] * length for name, length in self._begun.items()}
        token = self._variable.set({**own, **self._others})
        try:
            result = self._forward(*args, **kwargs)
        finally:
            self._variable.reset(token)
        return result, {name: items[self._begun[name] :] for name, items in own.items()}

    def hand_on(self, returned: tuple[Any, dict[str, list[Any]]]) -> Any:
        """The result alone of a call that has ``returned`` so; the rest goes to the model's lists."""
        result, recorded = returned
        lists = self._variable.get()
        for name, items in recorded.items():
            lists[name].extend(items)
        return result
