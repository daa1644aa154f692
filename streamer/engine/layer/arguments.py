"""A layer's arguments and results, and the uses of a layer that are refused.

[Note: key/value caches] A model with ``use_cache=True`` passes one cache object to every layer, and the layer
appends its keys and values to it. A layer that runs again in backward appends them a second time and attends
to both: wrong gradients and no error. In training an empty cache is therefore taken out of a layer's
arguments, and one with tokens in it is refused.

[Note: containers] Tensors that a layer puts into a dict or list among its arguments are outputs of the layer,
and go into the caller's container: later layers of Gemma 3n and 4 use keys and values of earlier ones in that
way. Tensors already there are inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import Node

from streamer.engine.guard import Guarded, as_plain
from streamer.engine.tensors import Rebuild, Tensors
from streamer.quantized.parts import marked, plain_parts, plainly
from streamer.torch_private import (
    in_distributed_forward,
    in_forward_mode,
    in_trace,
    in_transform,
    is_batched,
    storage_id,
)

#: The tensors that a layer has computed, and the function that builds its result from them and the inputs.
Outputs = tuple[list[torch.Tensor], Rebuild]


@dataclass(frozen=True)
class PassedOn:
    """Builds a layer's result from its output tensors followed by its inputs. An input that the layer returns
    unchanged is the user's own tensor."""

    rebuild: Rebuild
    #: for each tensor of the result, the number of its input, or None
    places: Sequence[int | None]

    def __call__(self, tensors: Tensors) -> Any:
        own = iter(tensors)
        inputs = tensors[self.places.count(None) :]
        return self.rebuild([next(own) if place is None else inputs[place] for place in self.places])


def passed_on(outputs: list[torch.Tensor], rebuild: Rebuild, inputs: Tensors) -> Outputs:
    """The ``outputs`` that are not among the ``inputs``, and the function that builds the result from those
    and the inputs."""
    places = {id(tensor): place for place, tensor in enumerate(inputs)}
    if places.keys().isdisjoint(map(id, outputs)):
        return outputs, rebuild
    found = [places.get(id(output)) for output in outputs]
    own = [output for output, place in zip(outputs, found, strict=True) if place is None]
    return own, PassedOn(rebuild, found)


def containers(values: Iterable[Any]) -> list[Any]:
    """The dicts and lists in ``values``, a layer's arguments, outer before inner: the layer may put tensors
    into them."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, MutableMapping):
            found += (value, *containers(value.values()))
        elif isinstance(value, list):
            found += (value, *containers(value))
        elif isinstance(value, tuple):
            found += containers(value)
    return found


def added_to(box: Any, before: Any) -> Any:
    if isinstance(box, MutableMapping):
        return {key: value for key, value in box.items() if key not in before or before[key] is not value}
    return box[len(before) :]


def hand_over(arguments: Iterable[Any], found: tuple[Any, Sequence[Any]]) -> Any:
    """The layer's result. Tensors that the layer put into its containers go into the caller's. [Note:
    containers]"""
    result, added = found
    for box, more in zip(containers(arguments), added, strict=True):
        if more:
            box.update(more) if isinstance(box, MutableMapping) else box.extend(more)
    return result


def without_caches(
    args: tuple[Any, ...], kwargs: dict[str, Any], layer: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``args`` and ``kwargs`` of a layer without empty caches. [Note: key/value caches]

    Raises ValueError for a cache that already holds tokens.
    """
    caches = [value for value in (*args, *kwargs.values()) if is_cache(value)]
    if not caches:
        return args, kwargs
    if tokens := max(int(cache.get_seq_length()) for cache in caches):
        raise ValueError(
            f"layer '{layer}' got a key/value cache with {tokens} tokens while gradients are on: train "
            "without one (use_cache=False, or past_key_values=None), or run this forward under "
            "torch.no_grad()"
        )
    named = {name: None if is_cache(value) else value for name, value in kwargs.items()}
    if "use_cache" in named:
        named["use_cache"] = False
    return tuple(None if is_cache(value) else value for value in args), named


def is_cache(value: object) -> bool:
    # the protocol of transformers.Cache, which need not be installed
    return (
        not isinstance(value, torch.Tensor)  # a tensor is slow to look up a missing attribute
        and hasattr(value, "get_seq_length")
        and (hasattr(value, "update") or hasattr(value, "reorder_cache"))
    )


def detached(inputs: Tensors) -> list[torch.Tensor]:
    """Leaves with the memory of ``inputs``."""
    return [_detached(tensor).requires_grad_(tensor.requires_grad) for tensor in inputs]


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    # the memory of a parameter goes to no other tensor
    return marked(plainly([tensor])[0]) if isinstance(tensor, Guarded) else tensor.detach()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is of no subclass, and has its elements in one piece of memory."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested


def accumulator(leaf: torch.Tensor) -> Node:
    """The graph node that accumulates the gradient of ``leaf``, which requires one; to be called with
    gradients on."""
    view = leaf.view_as(leaf).grad_fn
    node = None if view is None else view.next_functions[0][0]
    assert node is not None, "gradients are on"
    return node


def let_go(leaves: Tensors) -> None:
    """Free the memory of ``leaves`` of a graph; they still receive gradients of their shapes."""
    for leaf in leaves:
        if is_plain(leaf):
            leaf.data = leaf.new_empty(0)


def apart(outputs: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``outputs``, with clones in place of those that share memory with ``others`` or with one another."""
    taken = {storage for tensor in others for storage in _storages(tensor)}
    found = []
    for output in outputs:
        own = _storages(output)
        found.append(output if taken.isdisjoint(own) else output.clone())
        taken |= own
    return found


def _storages(tensor: torch.Tensor) -> set[int]:
    if is_plain(tensor):
        return {storage_id(tensor)}
    return {storage_id(part) for part in plain_parts(tensor) if part.layout is torch.strided}


@as_plain
def require_grad(tensors: Iterable[torch.Tensor]) -> bool:
    return any(tensor.requires_grad for tensor in tensors)


def refuse_transforms(layer: str, tensors: Iterable[torch.Tensor | None] = ()) -> None:
    """Raise RuntimeError inside of a transform of `torch.func`, for batched gradients among ``tensors``, and
    inside of another data parallel module."""
    refuse_trace()
    if in_transform() or any(tensor is not None and is_batched(tensor) for tensor in tensors):
        raise RuntimeError(
            "transforms of torch.func (grad, vjp, jvp, vmap) and batched gradients are not supported by "
            f"streamed layer '{layer}': use torch.autograd.grad, or call streamer.unwrap(model) first"
        )
    if in_distributed_forward():
        raise RuntimeError(
            f"DistributedDataParallel is not notified when the gradients of streamed layer '{layer}' have "
            "arrived: train without it, several GPUs by streamer.wrap(process_group=...)"
        )


def refuse_trace() -> None:
    """Raise RuntimeError inside of `torch.jit.trace`, which would record slots instead of weights."""
    if in_trace():
        raise RuntimeError(
            "torch.jit.trace (which torch.onnx.export and TensorBoard's add_graph may use) cannot record a "
            "wrapped model, whose layers have their weights only while they run: call "
            "streamer.unwrap(model) first, or trace copy.deepcopy(model), which is a plain model"
        )


def refuse_dual(layer: str, inputs: Tensors) -> None:
    """Raise RuntimeError for inputs of forward-mode differentiation."""
    if in_forward_mode() and any(forward_ad.unpack_dual(x).tangent is not None for x in inputs):
        raise RuntimeError(
            f"forward-mode differentiation of streamed layer '{layer}' works only where backward does not: "
            "run it under torch.no_grad()"
        )


#: The meaning of errors of autograd and of `torch.utils.checkpoint`, which name no layer, for the layer in
#: whose backward they are raised.
MEANINGS = {
    "modified by an inplace operation": "has an argument or a result that was written before its "
    "backward, which needs it (write into a clone)",
    "backward through the graph a second time": "runs backward a second time, or uses a tensor "
    "that is not an argument and whose graph was already used by a backward (pass the tensor to "
    "the layer as an argument)",
    "torch.utils.checkpoint": "computed something else when it ran again in backward (wrap with "
    "activations='keep', or let it compute the same: no counters, no random numbers but PyTorch's)",
}
