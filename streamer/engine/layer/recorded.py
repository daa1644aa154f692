"""Tensors that transformers records inside of a layer: router logits of experts, weights of attention.

[Note: recorded outputs]
A model of transformers returns such tensors in addition to its hidden states (``output_router_logits``,
``output_attentions``). Hooks on modules append them to lists that the model's forward has created. In a
streamed layer they are part of the layer's own graph, which the user's backward does not reach. So each call
of a layer has lists of its own. Their tensors are returned together with the layer's result, as tensors of
the user's graph, and appended to the model's lists.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

#: The variable that holds the model's lists, by their names.
_MODULE, _VARIABLE = "transformers.utils.output_capturing", "_active_collector"

Forward = Callable[..., Any]


class RecordingForward:
    """A layer's ``forward`` that returns its result and, by the lists' names, the tensors recorded during the
    call."""

    def __init__(self, forward: Forward, variable: Any, lists: dict[str, Any]) -> None:
        self._forward = forward
        self._variable = variable
        # not the lists themselves: every layer's graph would keep all tensors in them
        self._begun = {name: len(items) for name, items in lists.items() if isinstance(items, list)}
        self._others = {name: value for name, value in lists.items() if name not in self._begun}

    @staticmethod
    def of(forward: Forward) -> RecordingForward | None:
        """For ``forward``; None if nothing is recorded now."""
        variable = getattr(sys.modules.get(_MODULE), _VARIABLE, None)
        lists = None if variable is None else variable.get()
        return RecordingForward(forward, variable, lists) if lists else None

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, list[Any]]]:
        # hooks read the length
        own = {name: [None] * length for name, length in self._begun.items()}
        token = self._variable.set({**own, **self._others})
        try:
            result = self._forward(*args, **kwargs)
        finally:
            self._variable.reset(token)
        return result, {name: items[self._begun[name] :] for name, items in own.items()}

    def hand_on(self, returned: tuple[Any, dict[str, list[Any]]]) -> Any:
        """The result alone of a call that has ``returned`` both; the rest goes to the model's lists."""
        result, recorded = returned
        lists = self._variable.get()
        for name, items in recorded.items():
            lists[name].extend(items)
        return result
