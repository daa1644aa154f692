"""Refused uses of a streamed layer, and the meaning of autograd's errors for one."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.autograd import forward_ad

from streamer.engine.tensors.nested import Tensors
from streamer.torch_private import in_distributed_forward, in_forward_mode, in_trace, in_transform, is_batched


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
