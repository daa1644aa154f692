"""Key/value caches have no place in training.

[Note: key/value caches]
A model with ``use_cache=True`` hands every layer one cache object and the layer appends its keys and
values to it. A layer that runs again in backward appends them a second time and attends to both:
wrong gradients and no error. In training an empty cache is therefore taken out of a layer's arguments
(the layer then attends to its own keys and values, as it would have), and one with tokens in it is
refused. Whatever else a layer changes among its arguments is found by `tree.fingerprint`.
"""

from __future__ import annotations

from typing import Any


def without_caches(
    args: tuple[Any, ...], kwargs: dict[str, Any], layer: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``args`` and ``kwargs`` of a layer without empty caches. [Note: key/value caches]

    Raises ValueError for a cache that holds tokens already.
    """
    if not holds_cache(args, kwargs):
        return args, kwargs
    kept = tuple(_without_cache(value, layer) for value in args)
    named = {key: _without_cache(value, layer) for key, value in kwargs.items()}
    if "use_cache" in named:
        named["use_cache"] = False
    return kept, named


def holds_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether one of the arguments is a cache."""
    return any(_is_cache(value) for value in (*args, *kwargs.values()))


def _is_cache(value: object) -> bool:
    # the protocol of transformers.Cache, which need not be installed
    return hasattr(value, "get_seq_length") and (hasattr(value, "update") or hasattr(value, "reorder_cache"))


def _without_cache(value: Any, layer: str) -> Any:
    if not _is_cache(value):
        return value
    if (tokens := int(value.get_seq_length())) > 0:
        raise ValueError(
            f"layer '{layer}' got a key/value cache with {tokens} tokens while gradients are on: train with "
            "past_key_values=None, or run this forward under torch.no_grad()"
        )
    return None
