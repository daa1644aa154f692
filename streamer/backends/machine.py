"""A machine as the virtual backend sees it: rates in units per second, sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Machine:
    """Rates in bytes/s and FLOP/s, sizes in bytes."""

    name: str
    flops_per_second: float
    h2d_bytes_per_second: float
    d2h_bytes_per_second: float
    host_bytes_per_second: float
    device_bytes: int
    host_bytes: int


#: One H200 with a 16-core host: a bus of 50 GB/s each way, 750 TFLOP/s of bf16 products, 150 GB/s of
#: host memory. Round figures to design with, not a measurement.
H200 = Machine(
    name="H200",
    flops_per_second=750e12,
    h2d_bytes_per_second=50e9,
    d2h_bytes_per_second=50e9,
    host_bytes_per_second=150e9,
    device_bytes=139 * GIB,
    host_bytes=128 * GIB,
)
