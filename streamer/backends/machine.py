"""A machine as the virtual backend sees it: rates in units per second, sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    #: "cuda", or "cpu" where the host's cores stand in for a device
    kind: str = "cuda"


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

# What copies reach of a PCIe x16 link, whose rate each way is 15.8, 31.5 and 63.0 GB/s (PCI Express Base
# Specification: 8, 16 and 32 GT/s a lane, 128b/130b): four fifths, the rest goes to headers and credits.
PCIE_3, PCIE_4, PCIE_5 = 12.5e9, 25e9, 50e9

#: A GeForce RTX 4090 in a desktop. 165.2 TFLOP/s of dense bf16 products added up in fp32, 24 GB, PCIe 4.0
#: x16 (NVIDIA Ada GPU Architecture, appendix A). Host: two channels of DDR5-5600 are 89.6 GB/s (JESD79-5), of
#: which a streaming update reaches 70; four modules of 32 GiB.
RTX_4090 = Machine(
    name="RTX 4090",
    flops_per_second=165.2e12,
    h2d_bytes_per_second=PCIE_4,
    d2h_bytes_per_second=PCIE_4,
    host_bytes_per_second=70e9,
    device_bytes=24 * GIB,
    host_bytes=128 * GIB,
)

#: The same on a board with PCIe 3.0 x16, or in a slot of eight lanes.
RTX_4090_PCIE_3 = replace(
    RTX_4090, name="RTX 4090, PCIe 3", h2d_bytes_per_second=PCIE_3, d2h_bytes_per_second=PCIE_3
)

#: An A100 80GB PCIe: 312 TFLOP/s of dense bf16 products, 80 GB, PCIe 4.0 x16 (NVIDIA A100 datasheet). Host:
#: eight channels of DDR4-3200 are 204.8 GB/s (JESD79-4), of which a streaming update reaches 150.
A100_PCIE_4 = Machine(
    name="A100, PCIe 4",
    flops_per_second=312e12,
    h2d_bytes_per_second=PCIE_4,
    d2h_bytes_per_second=PCIE_4,
    host_bytes_per_second=150e9,
    device_bytes=80 * GIB,
    host_bytes=256 * GIB,
)

#: An H100 PCIe: 1513 TFLOP/s of bf16 products with sparsity, half of that dense, 80 GB, PCIe 5.0 x16 (NVIDIA
#: H100 datasheet). Host: eight channels of DDR5-4800 are 307 GB/s (JESD79-5), of which a streaming update
#: reaches 230.
H100_PCIE_5 = Machine(
    name="H100, PCIe 5",
    flops_per_second=756e12,
    h2d_bytes_per_second=PCIE_5,
    d2h_bytes_per_second=PCIE_5,
    host_bytes_per_second=230e9,
    device_bytes=80 * GIB,
    host_bytes=256 * GIB,
)
