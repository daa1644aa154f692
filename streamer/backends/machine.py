"""A machine as the virtual backend sees it: rates in units per second, sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30

CUDA, CPU = "cuda", "cpu"


@dataclass(frozen=True)
class Beside:
    """The share of its rate, in (0, 1], that one lane keeps while another works beside it: the first name
    is the one that slows, *copy* either direction. 1 where the two share nothing."""

    compute_host: float = 1.0
    host_compute: float = 1.0
    compute_copy: float = 1.0
    copy_compute: float = 1.0
    host_copy: float = 1.0
    copy_host: float = 1.0
    copy_copy: float = 1.0


@dataclass(frozen=True)
class Machine:
    """Rates in bytes/s and FLOP/s, sizes in bytes.

    Args:
        flops_per_second: of matrix products, convolutions and attention, by PyTorch's formulas
            (`torch.utils.flop_counter`), which know of no mask.
        h2d_bytes_per_second, d2h_bytes_per_second: of a copy with nothing beside it.
        host_bytes_per_second: of the host update, counted as what it reads and writes.
        device_bytes, host_bytes: sizes of the two memories.
        kind: "cuda", or "cpu" where the host's cores stand in for a device: compute is then done when the
            loop goes on, and the lanes may share its cores (``beside``).
        fp32_flops_per_second: of products of fp32 tensors; None: as of others.
        attention_flops_per_second: of fused attention; None: as of products.
        device_bytes_per_second: of operations that wait for the device's memory (norms, activations), counted
            as what they read and write; None: they take no time.
        seconds_per_op: what an operation takes however little it does.
        seconds_per_visit: what this library takes for each forward and backward of a layer, beside its
            operations. Of kind "cpu" alone: elsewhere the loop runs ahead of the device.
        beside: what lanes keep of their rates beside one another.
    """

    name: str
    flops_per_second: float
    h2d_bytes_per_second: float
    d2h_bytes_per_second: float
    host_bytes_per_second: float
    device_bytes: int
    host_bytes: int
    kind: str = CUDA
    fp32_flops_per_second: float | None = None
    attention_flops_per_second: float | None = None
    device_bytes_per_second: float | None = None
    seconds_per_op: float = 0.0
    seconds_per_visit: float = 0.0
    beside: Beside = Beside()
