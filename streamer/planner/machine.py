"""A machine as the virtual backend models it (rates in units per second, sizes in bytes), and machines by
name. Figures come from their makers' documents; each has its source in a comment.

Products run at the peak of the data sheet, dense and accumulated in fp32. Real products do not reach it, so a
real step takes longer than predicted. Rates measured by `streamer calibrate` have no such error.
Estimates, the same for all: copies reach four fifths of the link (the rest goes to headers and credits),
operations on the device four fifths of its memory's peak, the host update three quarters of its memory's
peak. An operation takes 5 microseconds (launched by PyTorch one by one), and this library takes a millisecond
of the host for each forward or backward of a layer (half of what `bench/host_cost.py` measures on a server's
slower core). The disk, on which a machine's maker says nothing, is one NVMe drive on four lanes of PCIe 4.0:
it reads at four fifths of its link, as copies do. It writes at half of that, since a drive that is written
for hours has to erase old blocks. ``streamer calibrate --disk DIR`` measures the real drive.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, replace

import torch

from streamer.backends.base import DISKS, Lane

GIB = 1 << 30
#: Bytes of memory in which any model fits.
ENOUGH = 1 << 60

CUDA, CPU = "cuda", "cpu"
#: The path of gradients from GPU to GPU; see `Machine`.
INTERCONNECTS = BY_HOST, BY_PCIE, NVLINK = "host", "pcie", "nvlink"


@dataclass(frozen=True)
class KeptRates:
    """The share of its rate, in (0, 1], that one lane keeps while another works at the same time. In a name
    the first lane is the one that slows; *copy* and *disk* mean either direction. 1 if they share nothing."""

    compute_host: float = 1.0
    host_compute: float = 1.0
    compute_copy: float = 1.0
    copy_compute: float = 1.0
    host_copy: float = 1.0
    copy_host: float = 1.0
    copy_copy: float = 1.0
    compute_disk: float = 1.0
    disk_compute: float = 1.0
    host_disk: float = 1.0
    disk_host: float = 1.0
    copy_disk: float = 1.0
    disk_copy: float = 1.0
    disk_disk: float = 1.0

    def kept(self, lane: Lane, other: Lane) -> float:
        """The share that ``lane`` keeps while ``other`` works."""
        return float(getattr(self, f"{lane.group}_{other.group}"))


#: Bytes of a GPU that a process takes before its first tensor, for its context and the libraries' kernels:
#: several hundred MiB, by GPU and version. Half a GiB is an estimate, not a measurement.
CONTEXT_BYTES = 1 << 29


def context_bytes(kind: str) -> int:
    """`CONTEXT_BYTES` for a device of this kind, 0 if it has no such context."""
    return CONTEXT_BYTES if kind == CUDA else 0


# PCI Express Base Specification: 8, 16 and 32 GT/s a lane, 128b/130b, are 15.8, 31.5 and 63.0 GB/s each way
# over 16 lanes. Four fifths of that.
PCIE_3, PCIE_4, PCIE_5 = 12.5e9, 25e9, 50e9

SECONDS_PER_OP, SECONDS_PER_VISIT = 5e-6, 1e-3

#: One NVMe drive on four lanes of PCIe 4.0: its link, and half of that; estimate.
NVME_READ, NVME_WRITE = PCIE_4 / 4, PCIE_4 / 8


#: A server of two sockets: the update takes three quarters of sixteen channels of DDR5-4800, 614 GB/s
#: (JESD79-5), as elsewhere; its memory is assumed.
SERVER_BYTES_PER_SECOND, SERVER_BYTES = 460e9, 1024 * GIB
#: A network of 100 Gbit/s; four fifths of that, assumed.
ETHERNET_100 = 0.8 * 12.5e9
#: NVLink of the fourth generation, one way: half of the H100 data sheet's 900 GB/s; four fifths of that.
NVLINK_4 = 0.8 * 450e9


@dataclass(frozen=True)
class Machine:
    """Rates in bytes/s and FLOP/s, sizes in bytes.

    Args:
        flops_per_second: of matrix products, convolutions and attention, by PyTorch's formulas
            (`torch.utils.flop_counter`), which ignore masks.
        h2d_bytes_per_second, d2h_bytes_per_second: of a copy while no other lane works.
        host_bytes_per_second: of the host update, counted as the bytes that it reads and writes.
        device_bytes, host_bytes: sizes of the two memories.
        kind: "cuda", or "cpu" if the host's cores stand in for a device; the device's memory is then the
            host's.
        fp32_flops_per_second: of products of fp32 tensors; None: the same as others.
        bf16_flops_per_second: of products of bf16 tensors, if tensor cores do not support bf16; None: the
            same as others.
        attention_flops_per_second: of fused attention; None: the same as products.
        device_bytes_per_second: of operations bound by the device's memory (norms, activations), counted as
            the bytes that they read and write; None: they take no time.
        seconds_per_op: the least time of an operation.
        compute_capability: of a GPU, as in ``torch.cuda.get_device_properties``; it sets the size of cuBLAS's
            workspaces. None: that of an H100.
        disk_read_bytes_per_second, disk_write_bytes_per_second: of all drives that ``disk=`` names, together.
        ranks: GPUs that train one model together, each with its own process. They share the host's memory,
            its update and its drives; every other rate and size is for one GPU.
        machines: how many machines of ``ranks`` GPUs each train one model together; all else is for one.
        network_bytes_per_second: of the bytes that a machine sends to the others, for all of its GPUs.
        collective_bytes_per_second: of the bytes that a GPU sends to the others to average gradients.
        interconnect: the path of these bytes: "nvlink", separate links; "pcie", the links that copies take,
            straight to the other GPUs; "host", the same links by way of the host's memory.
        seconds_per_visit: host time of this library for each forward and backward of a layer, besides the
            layer's operations. Meanwhile a GPU works on operations queued before.
        beside: the share of their rates that lanes keep while others work.
        coherent: the GPU and the CPU share one memory, so that ``device_bytes`` and ``host_bytes`` are the
            same bytes.
        calibrated: whether rates were measured on the machine itself; others are bounds.
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
    bf16_flops_per_second: float | None = None
    attention_flops_per_second: float | None = None
    device_bytes_per_second: float | None = None
    seconds_per_op: float = 0.0
    seconds_per_visit: float = 0.0
    compute_capability: float | None = None
    beside: KeptRates = KeptRates()
    disk_read_bytes_per_second: float = NVME_READ
    disk_write_bytes_per_second: float = NVME_WRITE
    ranks: int = 1
    machines: int = 1
    network_bytes_per_second: float = ETHERNET_100
    collective_bytes_per_second: float = PCIE_4
    interconnect: str = BY_HOST
    coherent: bool = False
    calibrated: bool = False

    def bytes_per_second(self, lane: Lane) -> float:
        """The rate of a lane that is not COMPUTE: for COLLECTIVE, of the bytes that a GPU sends; for BARRIER,
        which moves nothing, infinite."""
        if lane is Lane.BARRIER:
            return math.inf
        rate = float(getattr(self, f"{lane.value}_bytes_per_second"))
        if self.ranks == 1:
            return rate
        # all ranks copy and update at the same time
        memory = self.host_bytes_per_second / self.ranks
        if lane is Lane.HOST:
            return memory
        if lane in DISKS:
            return min(rate / self.ranks, memory)
        if lane is not Lane.COLLECTIVE:
            return min(rate, memory)
        # bytes by way of the host's memory are written there and read again
        return min(rate, memory / 2) if self.interconnect == BY_HOST else rate

    def product_flops(self, dtype: torch.dtype) -> float:
        """FLOP/s of products of tensors in ``dtype``."""
        rate = None
        if dtype is torch.float32:
            rate = self.fp32_flops_per_second
        elif dtype is torch.bfloat16:
            rate = self.bf16_flops_per_second
        return self.flops_per_second if rate is None else rate

    @property
    def has_one_memory(self) -> bool:
        """Whether the device's memory is the host's."""
        return self.kind == CPU or self.coherent

    @property
    def has_ranks(self) -> bool:
        """Whether several processes train one model together."""
        return self.ranks * self.machines > 1

    @property
    def network_rate(self) -> float:
        """Bytes per second that one GPU sends to other machines, while the others of its machine do too."""
        return self.network_bytes_per_second / self.ranks

    def as_between_gpus(self, nbytes: int) -> int:
        """The bytes that a GPU sends within its machine while it sends ``nbytes`` to other machines."""
        return int(nbytes * self.bytes_per_second(Lane.COLLECTIVE) / self.network_rate)

    def kept(self, lane: Lane, other: Lane) -> float:
        """The share of its rate, in (0, 1], that ``lane`` keeps while ``other`` works."""
        together = {lane, other}
        if Lane.COLLECTIVE in together and together & {Lane.H2D, Lane.D2H}:
            return 1.0 if self.interconnect == NVLINK else 0.5
        return self.beside.kept(lane, other)

    def of_ranks(self, ranks: int, machines: int = 1) -> Machine:
        """This machine with ``ranks`` GPUs, as one of ``machines``. More than two GPUs are assumed to be in a
        server of two sockets, with `SERVER_BYTES` of memory at `SERVER_BYTES_PER_SECOND`, unless this machine
        has more, or its memory is the GPU's too."""
        if ranks <= 2 or self.coherent:
            return replace(self, ranks=ranks, machines=machines)
        return replace(
            self,
            ranks=ranks,
            machines=machines,
            host_bytes=max(self.host_bytes, SERVER_BYTES),
            host_bytes_per_second=max(self.host_bytes_per_second, SERVER_BYTES_PER_SECOND),
        )

    def with_room(self, device_bytes: int = ENOUGH) -> Machine:
        """This machine with memory for any model, so that a plan can report its needs; the device may be
        limited to ``device_bytes``."""
        return replace(self, device_bytes=device_bytes, host_bytes=ENOUGH)


def gpu_properties(machine: Machine, device: torch.device) -> Machine:
    """``machine`` with the compute capability of the GPU ``device``."""
    properties = torch.cuda.get_device_properties(device)
    return replace(machine, compute_capability=properties.major + properties.minor / 10)


#: A GeForce RTX 4090 in a desktop. GeForce drivers give no GPU access to another's memory.
RTX_4090 = Machine(
    name="RTX 4090",
    flops_per_second=165.2e12,  # NVIDIA Ada GPU Architecture, appendix A: bf16 with fp32 accumulation
    fp32_flops_per_second=82.6e12,  # the same, fp32 outside of the tensor cores
    device_bytes_per_second=0.8 * 1008e9,  # the same: 384 bits of 21 Gbit/s
    h2d_bytes_per_second=PCIE_4,  # the same: PCIe 4.0 x16
    d2h_bytes_per_second=PCIE_4,
    host_bytes_per_second=70e9,  # two channels of DDR5-5600 are 89.6 GB/s (JESD79-5); estimate
    device_bytes=24 * GIB,  # the same: 24 GB
    host_bytes=128 * GIB,  # four modules of 32 GiB; assumed
    seconds_per_op=SECONDS_PER_OP,
    seconds_per_visit=SECONDS_PER_VISIT,
    compute_capability=8.9,  # NVIDIA, "CUDA GPU Compute Capability", as all of these
)

#: The same on a board with PCIe 3.0 x16, or in a slot of eight lanes.
RTX_4090_PCIE_3 = replace(
    RTX_4090,
    name="RTX 4090, PCIe 3",
    h2d_bytes_per_second=PCIE_3,
    d2h_bytes_per_second=PCIE_3,
    collective_bytes_per_second=PCIE_3,
)

#: A GeForce RTX 3090 in a desktop.
RTX_3090 = replace(
    RTX_4090,
    name="RTX 3090",
    flops_per_second=71e12,  # NVIDIA Ampere GA102 GPU Architecture, appendix: bf16 with fp32 accumulation
    fp32_flops_per_second=35.6e12,  # the same
    device_bytes_per_second=0.8 * 936e9,  # the same: 384 bits of 19.5 Gbit/s
    host_bytes_per_second=40e9,  # two channels of DDR4-3200 are 51.2 GB/s (JESD79-4); estimate
    device_bytes=24 * GIB,
    host_bytes=128 * GIB,  # assumed
    compute_capability=8.6,
)

#: A GeForce RTX 5090 in a desktop.
RTX_5090 = replace(
    RTX_4090,
    name="RTX 5090",
    flops_per_second=209.5e12,  # NVIDIA RTX Blackwell GPU Architecture, appendix: bf16, fp32 accumulation
    fp32_flops_per_second=104.8e12,  # the same
    device_bytes_per_second=0.8 * 1792e9,  # the same: 512 bits of 28 Gbit/s
    h2d_bytes_per_second=PCIE_5,  # the same: PCIe 5.0 x16
    d2h_bytes_per_second=PCIE_5,
    collective_bytes_per_second=PCIE_5,
    device_bytes=32 * GIB,  # the same: 32 GB
    compute_capability=12.0,
)

#: A GeForce RTX 4080 in a desktop.
RTX_4080 = replace(
    RTX_4090,
    name="RTX 4080",
    flops_per_second=97.5e12,  # NVIDIA Ada GPU Architecture, appendix: bf16 with fp32 accumulation
    fp32_flops_per_second=48.7e12,  # the same
    device_bytes_per_second=0.8 * 716.8e9,  # the same: 256 bits of 22.4 Gbit/s
    device_bytes=16 * GIB,  # the same: 16 GB
)

#: A GeForce RTX 4060 Ti with 16 GB in a desktop.
RTX_4060_TI_16GB = replace(
    RTX_4090,
    name="RTX 4060 Ti 16 GB",
    # 34 SMs (4352 CUDA cores) of 512 FLOP a cycle, as the 4090's, at 2.535 GHz: NVIDIA's page of the GeForce
    # RTX 4060 family; derived
    flops_per_second=44.1e12,
    fp32_flops_per_second=22.1e12,  # 256 FLOP a cycle; derived
    device_bytes_per_second=0.8 * 288e9,  # the same page: 128 bits of 18 Gbit/s
    h2d_bytes_per_second=PCIE_4 / 2,  # PCIe 4.0 x8
    d2h_bytes_per_second=PCIE_4 / 2,
    device_bytes=16 * GIB,  # the same page: 16 GB
    collective_bytes_per_second=PCIE_4 / 2,
)

#: An RTX A6000 in a workstation.
RTX_A6000 = replace(
    RTX_3090,
    name="RTX A6000",
    flops_per_second=154.8e12,  # NVIDIA Ampere GA102 GPU Architecture, appendix: bf16, fp32 accumulation
    fp32_flops_per_second=38.7e12,  # the same
    device_bytes_per_second=0.8 * 768e9,  # the same: 384 bits of 16 Gbit/s
    host_bytes_per_second=77e9,  # four channels of DDR4-3200 are 102.4 GB/s (JESD79-4); estimate
    device_bytes=48 * GIB,  # the same: 48 GB; ECC is off as delivered
    interconnect=BY_PCIE,  # peer access; below one switch, assumed
)

#: A T4 in a cloud's machine. Its tensor cores support fp16, but not bf16: products of bf16 take as long as
#: those of fp32.
T4 = Machine(
    name="T4",
    flops_per_second=65e12,  # NVIDIA T4 data sheet: fp16 with fp32 accumulation
    fp32_flops_per_second=8.1e12,  # the same
    bf16_flops_per_second=8.1e12,  # as fp32, outside of the tensor cores; estimate
    device_bytes_per_second=0.8 * 320e9,  # NVIDIA T4 product brief: 256 bits of 10 Gbit/s
    h2d_bytes_per_second=PCIE_3,  # the data sheet: PCIe 3.0 x16
    d2h_bytes_per_second=PCIE_3,
    host_bytes_per_second=48e9,  # half of six channels of DDR4-2666, 128 GB/s (JESD79-4); estimate
    device_bytes=15 * GIB,  # 16 GB less a sixteenth for ECC: as a driver reports
    host_bytes=128 * GIB,  # as AWS's g4dn.8xlarge
    seconds_per_op=SECONDS_PER_OP,
    seconds_per_visit=SECONDS_PER_VISIT,
    collective_bytes_per_second=PCIE_3,
    compute_capability=7.5,
)

#: An L4 in a cloud's machine.
L4 = Machine(
    name="L4",
    flops_per_second=121e12,  # NVIDIA L4 data sheet: bf16, half of 242 with sparsity
    fp32_flops_per_second=30.3e12,  # the same
    device_bytes_per_second=0.8 * 300e9,  # the same
    h2d_bytes_per_second=PCIE_4,  # the same: PCIe 4.0 x16
    d2h_bytes_per_second=PCIE_4,
    host_bytes_per_second=75e9,  # half of an A100's host; assumed
    device_bytes=45 * GIB // 2,  # 24 GB less a sixteenth for ECC: as a driver reports
    host_bytes=128 * GIB,  # as AWS's g6.8xlarge, and g5.8xlarge of an A10G
    seconds_per_op=SECONDS_PER_OP,
    seconds_per_visit=SECONDS_PER_VISIT,
    compute_capability=8.9,
)

#: An A10G in a machine of AWS.
A10G = replace(
    L4,
    name="A10G",
    flops_per_second=70e12,  # NVIDIA A10G data sheet: bf16, half of 140 with sparsity
    fp32_flops_per_second=35e12,  # the same
    device_bytes_per_second=0.8 * 600e9,  # the same; PCIe 4.0 x16, 24 GB and ECC as an L4's
    compute_capability=8.6,
)

#: An L40S in a server; one GPU is used.
L40S = replace(
    L4,
    name="L40S",
    flops_per_second=362e12,  # NVIDIA L40S data sheet: bf16, dense; 733 with sparsity
    fp32_flops_per_second=91.6e12,  # the same
    device_bytes_per_second=0.8 * 864e9,  # the same; PCIe 4.0 x16 as an L4's
    host_bytes_per_second=150e9,  # eight channels of DDR4-3200 are 204.8 GB/s (JESD79-4); estimate
    device_bytes=45 * GIB,  # 48 GB less a sixteenth for ECC: as a driver reports
    host_bytes=256 * GIB,  # assumed
    interconnect=BY_PCIE,  # peer access; below one switch, assumed
)

#: An A100 80GB PCIe.
A100_PCIE_4 = Machine(
    name="A100, PCIe 4",
    flops_per_second=312e12,  # NVIDIA A100 data sheet: bf16, dense
    fp32_flops_per_second=19.5e12,  # the same; PyTorch uses TF32 only on request
    device_bytes_per_second=0.8 * 1935e9,  # the same
    h2d_bytes_per_second=PCIE_4,  # the same: PCIe 4.0 x16
    d2h_bytes_per_second=PCIE_4,
    host_bytes_per_second=150e9,  # eight channels of DDR4-3200 are 204.8 GB/s (JESD79-4); estimate
    device_bytes=80 * GIB,  # the same: 80 GB
    host_bytes=256 * GIB,  # assumed
    interconnect=BY_PCIE,  # the same: peer access; below one switch, assumed
    seconds_per_op=SECONDS_PER_OP,
    seconds_per_visit=SECONDS_PER_VISIT,
    compute_capability=8.0,
)

#: An A100 40GB PCIe.
A100_40GB = replace(
    A100_PCIE_4,
    name="A100 40GB, PCIe 4",
    device_bytes_per_second=0.8 * 1555e9,  # NVIDIA A100 40GB PCIe product brief
    device_bytes=40 * GIB,  # the same
)

#: An H100 PCIe.
H100_PCIE_5 = Machine(
    name="H100, PCIe 5",
    flops_per_second=756e12,  # NVIDIA H100 data sheet: bf16, half of 1513 with sparsity
    fp32_flops_per_second=51e12,  # the same
    device_bytes_per_second=0.8 * 2000e9,  # the same
    h2d_bytes_per_second=PCIE_5,  # the same: PCIe 5.0 x16
    d2h_bytes_per_second=PCIE_5,
    host_bytes_per_second=230e9,  # eight channels of DDR5-4800 are 307 GB/s (JESD79-5); estimate
    device_bytes=80 * GIB,  # the same: 80 GB
    host_bytes=256 * GIB,  # assumed
    collective_bytes_per_second=PCIE_5,  # the same
    interconnect=BY_PCIE,  # peer access; below one switch, assumed
    seconds_per_op=SECONDS_PER_OP,
    seconds_per_visit=SECONDS_PER_VISIT,
    compute_capability=9.0,
)

#: An H100 SXM in a server; one GPU is used.
H100_SXM = replace(
    H100_PCIE_5,
    name="H100 SXM",
    collective_bytes_per_second=NVLINK_4,
    interconnect=NVLINK,
    flops_per_second=989e12,  # NVIDIA H100 data sheet: bf16, half of 1979 with sparsity
    fp32_flops_per_second=67e12,  # the same
    device_bytes_per_second=0.8 * 3350e9,  # the same
)

#: One H200 with a 16-core host; this GPU's share of the host's memory is 150 GB/s.
H200 = replace(
    H100_SXM,
    name="H200",
    flops_per_second=989e12,  # NVIDIA H200 data sheet: bf16, half of 1979 with sparsity
    device_bytes_per_second=0.8 * 4800e9,  # the same
    host_bytes_per_second=150e9,  # a share of a server's memory; assumed
    device_bytes=139 * GIB,  # of the data sheet's 141 GB, which is 131 GiB, or 144: as a driver reports
    host_bytes=128 * GIB,  # assumed
)

#: A GH200 with 96 GB of HBM3 and 480 GB of LPDDR5X. The link, NVLink-C2C, has 450 GB/s each way (NVIDIA GH200
#: data sheet); copies reach 411 to the device and 170 back, as others have measured. Both directions and the
#: update share the CPU's memory: hence ``beside``.
GH200 = replace(
    H100_SXM,
    name="GH200",
    flops_per_second=990e12,  # NVIDIA GH200 data sheet: bf16, half of 1979 with sparsity
    device_bytes_per_second=0.8 * 4000e9,  # the same: 4 TB/s of HBM3
    h2d_bytes_per_second=411e9,
    d2h_bytes_per_second=170e9,
    host_bytes_per_second=290e9,  # 480 GB of LPDDR5X have 384 GB/s (NVIDIA Grace CPU data sheet); estimate
    device_bytes=96 * GIB,  # the same: 96 GB
    host_bytes=447 * GIB,  # the same: 480 GB
    beside=KeptRates(copy_copy=0.5, copy_host=0.5, host_copy=0.5),  # halves of what they share; estimate
)

#: A laptop with a GeForce RTX 4060 and 32 GiB.
LAPTOP_8GB = Machine(
    name="laptop, 8 GiB",
    # 24 SMs of 512 FLOP a cycle (the 4090's 165.2e12 over its 128 SMs and 2.52 GHz: NVIDIA Ada GPU
    # Architecture, appendix A) at 2.0 GHz, between the 1.5 and 2.4 of the maker's page; derived
    flops_per_second=24.6e12,
    fp32_flops_per_second=12.3e12,  # 256 FLOP a cycle; derived
    device_bytes_per_second=0.8 * 256e9,  # 128 bits of 16 Gbit/s: NVIDIA's page of the GeForce RTX 40 laptops
    h2d_bytes_per_second=PCIE_4 / 2,  # the same: PCIe 4.0 x8
    d2h_bytes_per_second=PCIE_4 / 2,
    host_bytes_per_second=57e9,  # two channels of DDR5-4800 are 76.8 GB/s (JESD79-5); estimate
    device_bytes=8 * GIB,  # the same: 8 GB
    host_bytes=32 * GIB,  # assumed
    seconds_per_op=SECONDS_PER_OP,
    seconds_per_visit=SECONDS_PER_VISIT,
    compute_capability=8.9,
)

#: A DGX Spark: a GB10, whose CPU and GPU share one memory, so that all the rates below are of that memory.
DGX_SPARK = Machine(
    name="DGX Spark",
    # an eighth of 1e15, the data sheet's figure for FP4 with sparsity, as of other Blackwell GPUs that add up
    # in fp32 at full rate; derived
    flops_per_second=125e12,
    fp32_flops_per_second=31e12,  # NVIDIA at Hot Chips 2025
    device_bytes_per_second=0.8 * 273e9,  # NVIDIA DGX Spark data sheet: 256 bits of LPDDR5X
    h2d_bytes_per_second=0.4 * 273e9,  # a copy reads the memory and writes it
    d2h_bytes_per_second=0.4 * 273e9,
    host_bytes_per_second=0.75 * 273e9,  # estimate
    device_bytes=119 * GIB,  # the same data sheet: 128 GB for both together
    host_bytes=119 * GIB,
    seconds_per_op=SECONDS_PER_OP,
    seconds_per_visit=SECONDS_PER_VISIT,
    compute_capability=12.1,
    beside=KeptRates(copy_copy=0.5, copy_host=0.5, host_copy=0.5),  # halves of what they share; estimate
    coherent=True,
)

#: By name.
MACHINES = {
    "rtx-3090": RTX_3090,
    "rtx-4060ti-16gb": RTX_4060_TI_16GB,
    "rtx-4080": RTX_4080,
    "rtx-4090": RTX_4090,
    "rtx-4090-pcie3": RTX_4090_PCIE_3,
    "rtx-5090": RTX_5090,
    "rtx-a6000": RTX_A6000,
    "t4": T4,
    "l4": L4,
    "a10g": A10G,
    "l40s": L40S,
    "a100-40gb": A100_40GB,
    "a100-80gb": A100_PCIE_4,
    "h100-pcie": H100_PCIE_5,
    "h100-sxm": H100_SXM,
    "h200": H200,
    "gh200": GH200,
    "laptop-8gb": LAPTOP_8GB,
    "dgx-spark": DGX_SPARK,
}


#: By the driver's name of the GPU.
BY_GPU = {
    "NVIDIA GeForce RTX 3090": RTX_3090,
    "NVIDIA GeForce RTX 4060 Ti": RTX_4060_TI_16GB,
    "NVIDIA GeForce RTX 4080": RTX_4080,
    "NVIDIA GeForce RTX 4090": RTX_4090,
    "NVIDIA GeForce RTX 5090": RTX_5090,
    "NVIDIA GeForce RTX 4060 Laptop GPU": LAPTOP_8GB,
    "NVIDIA RTX A6000": RTX_A6000,
    "Tesla T4": T4,
    "NVIDIA L4": L4,
    "NVIDIA A10G": A10G,
    "NVIDIA L40S": L40S,
    "NVIDIA A100-PCIE-40GB": A100_40GB,
    "NVIDIA A100-SXM4-40GB": A100_40GB,
    "NVIDIA A100 80GB PCIe": A100_PCIE_4,
    "NVIDIA A100-SXM4-80GB": A100_PCIE_4,
    "NVIDIA H100 PCIe": H100_PCIE_5,
    "NVIDIA H100 80GB HBM3": H100_SXM,
    "NVIDIA H200": H200,
    "NVIDIA GH200 480GB": GH200,
    "NVIDIA GB10": DGX_SPARK,
}


def peak_flops(gpu: str, dtype: torch.dtype) -> float | None:
    """FLOP/s of products in ``dtype`` by the data sheet of the GPU with this driver name; None for an unknown
    GPU."""
    machine = BY_GPU.get(gpu)
    return None if machine is None else machine.product_flops(dtype)


#: The most names that an error suggests.
MOST_LIKE = 4


def named_machine(name: str) -> Machine:
    """The machine of a name in `MACHINES`. Raises ValueError for an unknown name, with similar names, if any,
    and the list of all."""
    if name not in MACHINES:
        *others, last = like_name(name) or [""]
        near = f"did you mean {', '.join(others)}{' or ' * bool(others)}{last}? " if last else ""
        raise ValueError(f"there is no machine {name!r}: {near}known are {', '.join(MACHINES)}")
    return MACHINES[name]


def like_name(name: str) -> list[str]:
    """The names in `MACHINES` similar to ``name``: the one that differs only in case, spaces and dashes; if
    there is none, those that contain ``name`` or are part of it, and then those with similar spelling.
    """
    by_plain = {_plain(known): known for known in MACHINES}
    plain_name = _plain(name)
    if plain_name in by_plain:
        return [by_plain[plain_name]]
    found = [plain for plain in by_plain if plain_name and (plain_name in plain or plain in plain_name)]
    found += difflib.get_close_matches(plain_name, by_plain)
    return [by_plain[plain] for plain in dict.fromkeys(found)][:MOST_LIKE]


def _plain(name: str) -> str:
    """``name`` in lower case, letters and digits only."""
    return "".join(filter(str.isalnum, name.lower()))
