"""Device memory that CUDA's kernels of PyTorch take for the time of one operation, in bytes.

No tensor of a step shows this memory, and on meta tensors nobody asks for it: a bias gradient of a GPT of
width 1024 takes 130 MiB for partial sums. Each rule here is what PyTorch's own host code asks its allocator
for; ``tests/nullgpu`` compares every rule with that allocator.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, gcd, prod
from typing import Any

import torch

from streamer.simulate.machine import CUDA, Machine

_aten = torch.ops.aten

#: What PyTorch takes for cuBLAS per thread and stream that multiplies matrices, before and from compute
#: capability 9.0 on (CUDABlas: ``getChosenWorkspaceSize``). A step has two threads: the caller's, and
#: autograd's for the device.
_WORKSPACES, _WORKSPACE, _WORKSPACE_9 = 2, (4096 * 2 + 16 * 8) << 10, 32 << 20
#: Until PyTorch 2.11 cuBLASLt, which multiplies and adds a bias, has others beside them.
_WORKSPACE_LT = 0 if torch.__version__ >= "2.12" else 1 << 20


def workspace_bytes(machine: Machine) -> int:
    """What stays taken from the first matrix products on."""
    if machine.kind != CUDA:
        return 0
    of_cublas = _WORKSPACE if (machine.compute_capability or 9) < 9 else _WORKSPACE_9
    return _WORKSPACES * (of_cublas + _WORKSPACE_LT)


def temporary_bytes(machine: Machine, func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """What ``func`` takes on ``machine`` beside its ``result``, until it is done."""
    if machine.kind != CUDA or (rule := _RULES.get(func.overloadpacket)) is None:
        return 0
    return rule(machine, args, kwargs, result)


def _reduction(machine: Machine, args: Any, kwargs: Any, result: Any) -> int:
    """Partial sums of several thread blocks, where the innermost dimension is not reduced.

    The launch is PyTorch's (``Reduce.cuh``, ``setReduceConfig``): threads of a block are spread over outputs
    first and inputs then, and where each would have many inputs several blocks share an output. Every thread
    of such a block has room for each output, so the buffer is larger than the sums by the block's width.
    """
    given, outputs = args[0], result.numel()
    reduced = _reduced(given, args[1:], kwargs)
    vector = _outputs_at_once(given, reduced)
    if not vector or not outputs:
        return 0
    inputs = given.numel() // outputs
    most_threads = 512 // vector
    across, down = _floor_power(outputs // vector, most_threads), _floor_power(inputs, most_threads)
    height = min(down, most_threads // min(across, 32))
    width = min(across, most_threads // height)
    each, grid = ceil(inputs / height), ceil(outputs // vector / width)
    processors, threads = _size(machine)
    wanted = processors * (threads // (width * height))
    if each < 256 or grid > wanted:
        return 0
    blocks = min(max(ceil(wanted / grid), ceil(each / 256)), ceil(each / 16))
    accumulated = 8 if given.dtype in (torch.float64, torch.int64) else 4
    return accumulated * outputs * blocks * width * vector + 4 * grid if blocks > 1 else 0


def _size(machine: Machine) -> tuple[int, int]:
    """Multiprocessors, and the threads of each."""
    return machine.multiprocessors or 132, machine.threads_per_multiprocessor or 2048


def _reduced(given: torch.Tensor, dims: Any, kwargs: Any) -> set[int]:
    """The dimensions that an operation like ``sum`` reduces."""
    asked = kwargs.get("dim", dims[0] if dims else None)
    asked = [asked] if isinstance(asked, int) else asked or range(given.dim())
    return {dim % given.dim() for dim in asked} if given.dim() else set()


def _outputs_at_once(given: torch.Tensor, reduced: set[int]) -> int:
    """How many outputs a thread works at: 4 at most, as many as lie together everywhere; 0 where the
    innermost dimension is reduced."""
    inwards = sorted((stride, dim) for dim, stride in enumerate(given.stride()) if given.shape[dim] > 1)
    if not inwards or inwards[0][1] in reduced:
        return 0
    together, others = 1, list[int]()
    for stride, dim in inwards:
        if dim not in reduced and stride == together and not others:
            together *= given.shape[dim]
        else:
            others.append(stride)
    return gcd(4, together, *others)


def _floor_power(number: int, most: int) -> int:
    """The largest power of two that is no more than ``number`` and ``most``, a power of two itself."""
    return min(most, 1 << max(0, number.bit_length() - 1))


def _embedding_backward(machine: Machine, args: Any, kwargs: Any, result: Any) -> int:
    """The places of tokens, sorted, and partial sums in fp32 of the rows of each: ten places at most are one
    partial sum. Up to 3,072 places are added up without."""
    gradient, indices, rows = args[:3]
    places = indices.numel()
    if places <= 3072:
        return 0
    different = min(places, rows)
    return int(4 * (places // 10 + different) * gradient.shape[-1] + _SORTED * places)


#: Bytes for each key that is sorted, with the places where the keys were.
_SORTED = 49


def _indexed_sum(machine: Machine, args: Any, kwargs: Any, result: Any) -> int:
    """``index_put`` that adds up sorts the places first."""
    _, indices, _, *accumulate = args
    if not (accumulate and accumulate[0]) and not kwargs.get("accumulate"):
        return 0
    return _SORTED * max((index.numel() for index in indices if index is not None), default=0)


def _flash_forward(machine: Machine, args: Any, kwargs: Any, result: Any) -> int:
    """Outputs and sums in fp32 of each part, where keys are split over blocks because there are few queries.

    The number of parts is FlashAttention-2's (Dao, arXiv 2307.08691): the least that comes within 85% of the
    best use of the multiprocessors.
    """
    query, key = args[:2]
    batch, heads, tokens, dim = query.shape
    if (args[3] if len(args) > 3 else kwargs.get("dropout_p", 0.0)) > 0:
        return 0
    columns = ceil(key.shape[2] / (256 if dim <= 64 else 128 if dim <= 128 else 64))
    blocks, places = batch * heads * ceil(tokens / 64), 2 * _size(machine)[0]
    parts = _parts(blocks, places, columns)
    return 4 * parts * batch * heads * tokens * (_rounded_dim(dim) + 1) if parts > 1 else 0


def _parts(blocks: int, places: int, columns: int) -> int:
    if blocks >= 0.8 * places:
        return 1
    used = {}
    for parts in range(1, min(128, places, columns) + 1):
        # as many columns a part as with one part fewer: it would be empty
        if parts == 1 or ceil(columns / parts) != ceil(columns / (parts - 1)):
            waves = parts * blocks / places
            used[parts] = waves / ceil(waves)
    best = max(used.values())
    return next(parts for parts, share in used.items() if share >= 0.85 * best)


def _rounded_dim(dim: int) -> int:
    step = 32 if dim <= 128 else 64
    return ceil(dim / step) * step


def _flash_backward(machine: Machine, args: Any, kwargs: Any, result: Any) -> int:
    """The gradient of the queries, added up in fp32, and a number for each query."""
    _, query, key = args[:3]
    return 4 * _padded_rows(query) * (_rounded_dim(query.shape[-1]) + 1) + _of_each_head(query, key)


def _padded_rows(query: torch.Tensor) -> int:
    batch, heads, tokens, _ = query.shape
    return int(batch * heads * ceil(tokens / 128) * 128)


def _of_each_head(query: torch.Tensor, key: torch.Tensor) -> int:
    """Gradients of keys and values of each head, where several heads share a key."""
    heads = query.shape[1]
    return 0 if key.shape[1] == heads else 2 * key.nbytes // key.shape[1] * heads


def _efficient_forward(machine: Machine, args: Any, kwargs: Any, result: Any) -> int:
    """The output in fp32, where a kernel's registers do not hold it."""
    query = args[0]
    wide = query.shape[-1] > 128 and query.element_size() == 2
    return 4 * prod(query.shape) if wide else 0


def _efficient_backward(machine: Machine, args: Any, kwargs: Any, result: Any) -> int:
    """As of flash attention; for heads of more than 128 numbers keys' and values' gradients too."""
    _, query, key = args[:3]
    dim: int = query.shape[-1]
    wide = 384 if dim > 128 and query.element_size() == 2 else 0
    return 4 * _padded_rows(query) * (ceil(dim / 64) * 64 + wide + 2) + _of_each_head(query, key)


def _softmax_backward(machine: Machine, args: Any, kwargs: Any, result: Any) -> int:
    """The gradient times the softmax."""
    return _nbytes(args[0])


def _safe_softmax(machine: Machine, args: Any, kwargs: Any, result: Any) -> int:
    """Which scores are minus infinity, a byte each, and in which rows all are."""
    return int(result.numel() + result.numel() // max(1, result.shape[-1]))


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


_RULES: dict[Any, Callable[[Machine, Any, Any, Any], int]] = {
    _aten.sum: _reduction,
    _aten.mean: _reduction,
    _aten._softmax_backward_data: _softmax_backward,
    _aten._safe_softmax: _safe_softmax,
    _aten.embedding_dense_backward: _embedding_backward,
    _aten.index_put: _indexed_sum,
    _aten.index_put_: _indexed_sum,
    _aten._index_put_impl_: _indexed_sum,
    _aten._scaled_dot_product_flash_attention: _flash_forward,
    _aten._scaled_dot_product_flash_attention_backward: _flash_backward,
    _aten._scaled_dot_product_efficient_attention: _efficient_forward,
    _aten._scaled_dot_product_efficient_attention_backward: _efficient_backward,
}
