"""What operations cost on a machine: FLOPs of products, bytes of all others, and the launch of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from streamer.backends.attention import CPU_FLOPS
from streamer.backends.machine import CUDA, Machine

aten = torch.ops.aten

#: Fused attention, whose FLOPs have a rate of their own.
_ATTENTION = {
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_cudnn_attention_backward,
}
#: They show memory that is there, or take some without touching it.
_FREE = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    aten._unsafe_view,
    aten._reshape_alias,
    aten.set_,
    aten.lift_fresh,
}
#: They write their first argument without reading it.
_OVERWRITING = {aten.copy_, aten.fill_, aten.zero_, aten.normal_, aten.uniform_, aten.bernoulli_}
#: They read no more of their first argument than comes out.
_GATHERING = {aten.embedding, aten.index_select, aten.gather, aten.index, aten.nll_loss_forward}


_FORMULAS = {**flop_registry, **CPU_FLOPS}


@dataclass(frozen=True)
class Cost:
    """FLOPs, and seconds on a machine."""

    flops: int = 0
    seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.seconds + other.seconds)

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.flops - other.flops, max(0.0, self.seconds - other.seconds))


NOTHING = Cost()


class Operations(TorchDispatchMode):
    """Counts what runs in the block, and the seconds that it takes on ``machine`` (without one: 0).

    A matrix product, a convolution or an attention takes the time of its FLOPs, or that of its bytes if that
    is longer (Williams, Waterman & Patterson, Roofline, CACM 2009); everything else that of its bytes, read
    and written. Views move nothing and are not counted. ``flops`` are by PyTorch's formulas;
    `torch.utils.flop_counter.FlopCounterMode` counts the same, by module too, and takes several times longer.
    """

    def __init__(self, machine: Machine | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = self.nbytes = self.ops = 0
        self.seconds = 0.0
        self._machine = machine

    @property
    def cost(self) -> Cost:
        """Of all so far."""
        return Cost(self.flops, self.seconds)

    def recall(self, cost: Cost) -> None:
        """Count what was not run: ``cost`` is what it would have cost."""
        self.flops += cost.flops
        self.seconds += cost.seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func.overloadpacket
        if func.is_view or packet in _FREE or self._is_of_host(args, result):
            return result
        self.ops += 1
        flops = _flops(packet, args, kwargs, result)
        self.flops += flops
        machine = self._machine
        if machine is None or machine.device_bytes_per_second is not None:
            nbytes = _moved(packet, args, kwargs, result)
            # what products move is inside of their rate
            self.nbytes += 0 if flops else nbytes
        if machine is not None:
            seconds = flops / _rate(machine, packet, args) if flops else 0.0
            if machine.device_bytes_per_second is not None:
                seconds = max(seconds, nbytes / machine.device_bytes_per_second)
            self.seconds += seconds + machine.seconds_per_op
        return result

    def _is_of_host(self, args: Any, result: Any) -> bool:
        """Whether a GPU has nothing to do with it: an optimizer counts its steps on the host."""
        if self._machine is None or self._machine.kind != CUDA:
            return False
        first = next(_tensors((result, *args)), None)
        return first is not None and first.is_cpu


def _flops(packet: Any, args: Any, kwargs: Any, result: Any) -> int:
    formula = _FORMULAS.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def _rate(machine: Machine, packet: Any, args: Any) -> float:
    if packet in _ATTENTION and machine.attention_flops_per_second is not None:
        return machine.attention_flops_per_second
    if machine.fp32_flops_per_second is not None and args[0].dtype == torch.float32:
        return machine.fp32_flops_per_second
    return machine.flops_per_second


def _moved(packet: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Bytes that an operation reads and writes."""
    written = sum(map(_nbytes, _tensors((result,))))
    first, *others = args or (None,)
    read = sum(map(_nbytes, _tensors((*others, *kwargs.values()))))
    if packet not in _OVERWRITING:
        whole = sum(map(_nbytes, _tensors((first,))))
        read += min(whole, written) if packet in _GATHERING else whole
    return written + read


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _nbytes(tensor: torch.Tensor) -> int:
    nbytes = tensor.numel() * tensor.element_size()
    # an expanded tensor shows the same memory again and again
    return min(nbytes, tensor.untyped_storage().nbytes()) if 0 in tensor.stride() else nbytes
