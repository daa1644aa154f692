"""What the machine is called, and how much memory it has."""

from __future__ import annotations

import platform
from pathlib import Path

import psutil
import torch


def processor() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")


def device_name(device: torch.device) -> str:
    """The device's name: the GPU's, or the processor's where it stands in for one."""
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else processor()


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """All of the device's memory, and all of the host's, in bytes."""
    host = int(psutil.virtual_memory().total)
    if device.type != "cuda":
        return host, host
    return int(torch.cuda.get_device_properties(device).total_memory), host
