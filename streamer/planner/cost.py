"""The cost of operations on a machine: FLOPs of products, bytes of all others, and the launch of each.

Attention runs by the kernel that a real device would choose. On meta tensors
``torch.nn.functional.scaled_dot_product_attention`` is a chain of plain operations, which holds a score for
every pair of tokens. A device has fused kernels that never hold the scores. The plan needs these kernels in
the graph to predict the step.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from streamer.errors import warn
from streamer.planner.machine import CUDA, Machine
from streamer.quantized.bitsandbytes_private import product_with_4_bits
from streamer.torch_private import dispatch_modes, storage_id

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
#: The largest head dimension of a GPU's flash kernel, and the multiple that it rounds head dimensions up to.
MOST_HEAD_DIM, HEAD_DIMS = 256, 8
#: Whether PyTorch's memory-efficient kernel takes fewer heads of keys than of queries: 2.13 does not.
EFFICIENT_TAKES_GROUPS = torch.__version__ >= "2.14"


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    flops: int = sdpa_flop_count(query.shape, *_with_heads_of(query, key, value))
    return flops


def _backward_flops(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    flops: int = sdpa_backward_flop_count(gradient.shape, query.shape, *_with_heads_of(query, key, value))
    return flops


def _with_heads_of(query: Any, key: Any, value: Any) -> tuple[Sequence[int], Sequence[int]]:
    """The shapes of ``key`` and ``value`` if each head of ``query`` had its own. Heads that share them
    (grouped-query attention) compute as much, but the formulas of PyTorch 2.10 refuse their shapes."""
    batch, heads = query.shape[:2]
    return (batch, heads, *key.shape[2:]), (batch, heads, *value.shape[2:])


#: Fused attention, forward and backward. Its FLOPs have a rate of their own.
_ATTENTION = {
    _aten._scaled_dot_product_efficient_attention: _attention_flops,
    _aten._scaled_dot_product_efficient_attention_backward: _backward_flops,
    _aten._scaled_dot_product_flash_attention: _attention_flops,
    _aten._scaled_dot_product_flash_attention_backward: _backward_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward_flops,
    _aten._scaled_dot_product_cudnn_attention: _attention_flops,
    _aten._scaled_dot_product_cudnn_attention_backward: _backward_flops,
}


class DeviceKernels(TorchFunctionMode):
    """Inside the block, attention on meta tensors runs as the kernel of a device of ``kind``, "cpu" or
    "cuda", and products with 4-bit weights run as on a device for more than a few rows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._attend = _on_cpu if kind == "cpu" else _on_cuda

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            result = self._attend(*args, **kwargs)
            if result is not None:
                return result
        if isinstance(func, OpOverload | OpOverloadPacket):
            packet: Any = getattr(func, "overloadpacket", func)
            if (stands_in := _OF_BITSANDBYTES.get(packet._qualified_op_name)) is not None:
                return stands_in(*args, **kwargs)
        return func(*args, **kwargs)


def _quantized_rows(rows: torch.Tensor, threshold: float = 0.0) -> Any:
    """Rows in 8 bits, without outliers in any column: the number of outliers depends on values."""
    return torch.ops.bitsandbytes.int8_vectorwise_quant(rows, 0.0)


def _product_in_8_bits(
    rows: torch.Tensor,
    codes: torch.Tensor,
    weight: torch.Tensor,
    row_scales: torch.Tensor,
    scales: torch.Tensor,
    outliers: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> Any:
    """A product of `_quantized_rows`."""
    ops = torch.ops.bitsandbytes
    return ops.int8_scaled_mm(codes, weight, row_scales, scales, bias=bias, dtype=rows.dtype), None


#: Operations whose results depend on values, or that are several operations on a GPU.
_OF_BITSANDBYTES: dict[str, Callable[..., Any]] = {
    "bitsandbytes::gemm_4bit": product_with_4_bits,
    "bitsandbytes::int8_vectorwise_quant": _quantized_rows,
    "bitsandbytes::int8_mixed_scaled_mm": _product_in_8_bits,
}


def _on_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    choice = torch._fused_sdp_choice(
        _of_one_row(query),
        _of_one_row(key),
        _of_one_row(value),
        None if attn_mask is None else _of_one_row(attn_mask),
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    if choice != SDPBackend.FLASH_ATTENTION.value:
        return None
    result: torch.Tensor = _aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=_added(attn_mask, query), scale=scale
    )[0]
    return result


def _on_cuda(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    dim = query.shape[-1]
    if query.dim() != 4 or not dim == key.shape[-1] == value.shape[-1] or 0 in query.shape:
        return None
    if attn_mask is None and query.dtype in _HALVES and dim <= MOST_HEAD_DIM:
        more = -dim % HEAD_DIMS
        padded: Sequence[torch.Tensor] = [F.pad(t, (0, more)) if more else t for t in (query, key, value)]
        scale = dim**-0.5 if scale is None else scale
        out: torch.Tensor = _aten._scaled_dot_product_flash_attention(
            *padded, dropout_p, is_causal, False, scale=scale
        )[0]
        return out[..., :dim] if more else out
    if enable_gqa and key.shape[1] != query.shape[1] and not EFFICIENT_TAKES_GROUPS:
        return None
    bias = _added(attn_mask, query)
    if bias is not None:
        bias = bias.expand(*query.shape[:3], key.shape[2])
    needs_sums = query.requires_grad or key.requires_grad or value.requires_grad
    result: torch.Tensor = _aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, needs_sums, dropout_p, is_causal, scale=scale
    )[0]
    return result


def _of_one_row(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor of the same shape, dtype and ``requires_grad``, whose rows all share one row's memory."""
    row = torch.empty(tensor.shape[-1:] or (1,), dtype=tensor.dtype, device="cpu")
    strides = [0] * (tensor.dim() - 1) + [1] * min(tensor.dim(), 1)
    return row.as_strided(tensor.shape, strides).requires_grad_(tensor.requires_grad)


def _added(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """``mask`` as numbers that kernels add to the scores: -inf where a boolean mask is False."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))


#: Operations that make views, or allocate memory without touching it.
_FREE = {
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
    _aten._unsafe_view,
    _aten._reshape_alias,
    _aten.set_,
    _aten.lift_fresh,
}
#: Operations that write their first argument without reading it.
_OVERWRITING = {_aten.copy_, _aten.fill_, _aten.zero_, _aten.normal_, _aten.uniform_, _aten.bernoulli_}
#: Operations that read no more of their first argument than they return.
_GATHERING = {_aten.embedding, _aten.index_select, _aten.gather, _aten.index, _aten.nll_loss_forward}


def _grouped_flops(left: Any, right: Any, *_: Any, out_val: Any, **__: Any) -> int:
    """FLOPs of products of groups of rows, or of columns, with one matrix for each group."""
    if left.dim() == right.dim() == 2:  # groups of the inner dimension, each with a product of its own
        return 2 * int(left.numel()) * int(right.shape[1])
    return 2 * int(out_val.numel()) * int(left.shape[-1])


#: Products of mixtures of experts, for which PyTorch has no formula.
_GROUPED = {
    getattr(_aten, name): _grouped_flops
    for name in ("_grouped_mm", "_scaled_grouped_mm")
    if hasattr(_aten, name)
}

_FORMULAS = {**_GROUPED, **flop_registry, **_ATTENTION}

#: By name, since the library may not be installed.
_NAMED: dict[str, Callable[..., int]] = {
    "bitsandbytes::int8_scaled_mm": lambda left, right, *_, **__: 2 * left.numel() * right.shape[0],
}

#: Names of operations whose FLOPs matter.
_PRODUCT = re.compile(r"(^|_)(mm|bmm|addmm|addbmm|baddbmm|matmul|linear|conv\w*|attention|lstm|gru|rnn)(_|$)")


@cache
def _tell_uncounted(packet: Any) -> None:
    """Warn once that a product costs nothing in plans."""
    name = str(packet)
    if _PRODUCT.search(name.rpartition(".")[2]):
        warn(f"{name} has no formula for its FLOPs: plans count its bytes and no arithmetic")


@dataclass(frozen=True)
class Cost:
    """FLOPs, seconds on a machine, and the number of operations."""

    flops: int = 0
    seconds: float = 0.0
    ops: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.seconds + other.seconds, self.ops + other.ops)

    def __sub__(self, other: Cost) -> Cost:
        seconds = max(0.0, self.seconds - other.seconds)
        return Cost(self.flops - other.flops, seconds, self.ops - other.ops)

    def times(self, number: int) -> Cost:
        """The cost of ``number`` repetitions."""
        return Cost(self.flops * number, self.seconds * number, self.ops * number)


NOTHING = Cost()


class SeesOperations(Protocol):
    """Records each operation after it has run."""

    def see(self, func: Any, args: Any, kwargs: Any, result: Any) -> None: ...


#: Shape, strides and dtype of a tensor; the tensors (or None) that an operation has returned.
_Form = tuple[Sequence[int], Sequence[int], torch.dtype]
_Forms = _Form | tuple[_Form | None, ...]
#: Results of operations on meta tensors, by their arguments, and the number of results to cache.
_returned: dict[Any, _Forms | None] = {}
MOST_REMEMBERED = 1 << 16
_CONSTANTS = (int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


def _result(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of ``func``. On the meta device it has no values, and PyTorch derives its shape in Python.
    Layers are alike, so a known shape is used again."""
    if not _makes_new(func) or dispatch_modes():  # these must record it too
        return func(*args, **kwargs)
    forms_in = _forms_in((args, *kwargs.items()))
    if forms_in is None:
        return func(*args, **kwargs)
    key = func, forms_in, torch.get_default_dtype()
    forms = _returned.get(key)
    if forms is not None:
        return _like(forms)
    result = func(*args, **kwargs)
    if key not in _returned:
        if len(_returned) >= MOST_REMEMBERED:
            _returned.clear()
        _returned[key] = _forms_of(result, args, kwargs)
    return result


@cache
def _makes_new(func: Any) -> bool:
    """Whether an operation returns new tensors, and writes none of its arguments."""
    schema = func._schema
    of_values = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    new = all(each.alias_info is None and str(each.type) == "Tensor" for each in schema.returns)
    return bool(schema.returns) and new and not schema.is_mutable and of_values.isdisjoint(func.tags)


def _forms_in(value: Any) -> Any:
    """Everything that the shape of a result depends on; None if values may matter."""
    if isinstance(value, torch.Tensor):
        is_plain = value.is_meta and value.layout is torch.strided and not value.is_complex()
        return (value.shape, value.stride(), value.dtype) if is_plain else None
    if isinstance(value, list | tuple):
        several = tuple(map(_forms_in, value))
        return None if None in several else several
    return (type(value), value) if isinstance(value, _CONSTANTS) else None


def _forms_of(result: Any, args: Any, kwargs: Any) -> _Forms | None:
    """The forms from which `_like` creates an equal result; None if it cannot."""
    several = result if isinstance(result, tuple) else (result,)
    storages = {storage_id(each) for each in tensors_in((*args, *kwargs.values()))}
    forms: list[_Form | None] = []
    for each in several:
        if each is None:
            forms.append(None)
            continue
        form = each.shape, each.stride(), each.dtype
        is_whole = each.untyped_storage().nbytes() == _of_form(form).untyped_storage().nbytes()
        if not each.is_meta or not is_whole or each.storage_offset() or storage_id(each) in storages:
            return None
        storages.add(storage_id(each))
        forms.append(form)
    return tuple(forms) if isinstance(result, tuple) else forms[0]


def _like(forms: _Forms) -> Any:
    if isinstance(forms[-1], torch.dtype):
        return _of_form(forms)
    return tuple(None if each is None else _of_form(each) for each in forms)


def _of_form(form: _Form) -> torch.Tensor:
    shape, strides, dtype = form
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


class Observer(TorchDispatchMode, abc.ABC):
    """A mode that records the operations of the block, and passes them to the observers ``others``: a
    further mode in Python would delay every operation."""

    def __init__(self, *others: SeesOperations) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._all: tuple[SeesOperations, ...] = (self, *others)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # nothing is compiled here, and PyTorch's wrapper takes as long as an operation
        return False

    @abc.abstractmethod
    def see(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record an operation that has run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_wrapper, types)):
            return NotImplemented  # its operations on inner tensors come here
        kwargs = kwargs or {}
        result = _result(func, args, kwargs)
        for each in self._all:
            each.see(func, args, kwargs, result)
        return result


class Operations(Observer):
    """Counts the operations in the block, and their seconds on ``machine`` (0 without one).

    A matrix product, a convolution or an attention takes the time of its FLOPs, or that of its bytes if that
    is longer (Williams, Waterman & Patterson, Roofline, CACM 2009). Every other operation takes the time of
    its bytes, read and written. Views move nothing and are not counted. ``flops`` follow PyTorch's formulas;
    `torch.utils.flop_counter.FlopCounterMode` counts the same, by module too, and takes several times longer.
    """

    def __init__(self, machine: Machine | None = None, *others: SeesOperations) -> None:
        super().__init__(*others)
        self.flops = self.nbytes = self.ops = 0
        self.seconds = 0.0
        self._machine = machine
        #: how many times each operation counts
        self._times = 1

    @property
    def cost(self) -> Cost:
        """The cost of all operations so far."""
        return Cost(self.flops, self.seconds, self.ops)

    @contextmanager
    def counting(self, times: int) -> Iterator[None]:
        """Count each operation of the block ``times``."""
        self._times, before = times, self._times
        try:
            yield
        finally:
            self._times = before

    def see(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        packet = func.overloadpacket
        if func.is_view or packet in _FREE or self._is_of_host(args, result):
            return
        self.ops += self._times
        flops = self._times * _operation_flops(packet, args, kwargs, result)
        self.flops += flops
        machine = self._machine
        if machine is None or machine.device_bytes_per_second is not None:
            nbytes = self._times * _moved(packet, args, kwargs, result)
            # the rate of products already includes the bytes that they move
            self.nbytes += 0 if flops else nbytes
        if machine is not None:
            seconds = flops / _rate(machine, packet, args) if flops else 0.0
            if machine.device_bytes_per_second is not None:
                seconds = max(seconds, nbytes / machine.device_bytes_per_second)
            self.seconds += seconds + self._times * machine.seconds_per_op

    def _is_of_host(self, args: Any, result: Any) -> bool:
        """Whether an operation runs on the host while there is a GPU, as an optimizer's step counter does."""
        if self._machine is None or self._machine.kind != CUDA:
            return False
        first = next(tensors_in((result, *args)), None)
        return first is not None and first.is_cpu


@contextmanager
def repeated(times: int) -> Iterator[None]:
    """Inside the block each operation counts ``times`` in all open `Operations`: for a loop that runs one
    round in place of all. Bytes held count once."""
    with ExitStack() as counting:
        for mode in dispatch_modes():
            if isinstance(mode, Operations):
                counting.enter_context(mode.counting(times))
        yield


def is_wrapper(kind: type) -> bool:
    """Whether tensors of a class wrap inner tensors, on which their operations compute."""
    return hasattr(kind, "__tensor_flatten__")


def _operation_flops(packet: Any, args: Any, kwargs: Any, result: Any) -> int:
    formula = _FORMULAS.get(packet) or _NAMED.get(packet._qualified_op_name)
    if formula is None:
        _tell_uncounted(packet)
        return 0
    return int(formula(*args, **kwargs, out_val=result))


def _rate(machine: Machine, packet: Any, args: Any) -> float:
    if packet in _ATTENTION and machine.attention_flops_per_second is not None:
        return machine.attention_flops_per_second
    return machine.product_flops(args[0].dtype)


def _moved(packet: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Bytes that an operation reads and writes."""
    written = sum(map(_nbytes, tensors_in((result,))))
    first, *others = args or (None,)
    read = sum(map(_nbytes, tensors_in((*others, *kwargs.values()))))
    if packet not in _OVERWRITING:
        whole = sum(map(_nbytes, tensors_in((first,))))
        read += min(whole, written) if packet in _GATHERING else whole
    return written + read


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among the arguments of an operation, or in its result, including those in lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def _nbytes(tensor: torch.Tensor) -> int:
    nbytes = tensor.numel() * tensor.element_size()
    # an expanded tensor repeats the same memory
    return min(nbytes, tensor.untyped_storage().nbytes()) if 0 in tensor.stride() else nbytes
