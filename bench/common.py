"""Shared by all bench scripts: the machine and the versions of a result, quartiles, the JSON file."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch

from bench.no_values import has_values
from streamer.cli.calibrate.machine_file import processor

RESULTS = Path(__file__).parent / "results"


def load_average() -> float:
    """Of the last minute. Well above 0 before a measurement: others are using the cores and the memory."""
    return os.getloadavg()[0]


def hardware(*, load_before: float, device: torch.device | str = "cpu") -> dict[str, Any]:
    """The machine that a figure was measured on; ``load_before`` is `load_average` before it was."""
    found = {
        "processor": processor(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load_average_after": load_average(),
        "load_average_before": load_before,
    }
    if torch.device(device).type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["gpu_bytes"] = torch.cuda.get_device_properties(device).total_memory
        found["driver"] = driver_version()
    return found


def driver_version() -> str:
    """Of the GPU's driver, as nvidia-smi tells it; "unknown" where there is no nvidia-smi."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return output.split("\n")[0].strip()


def versions() -> dict[str, str]:
    """The hardware that computes."""
    return {
        "python": platform.python_version(),
        "numba": numba.__version__,
        "numpy": np.__version__,
        "torch": torch.__version__,
        **({} if torch.version.cuda is None else {"cuda": torch.version.cuda}),
    }


def provenance(script: str, *, load_before: float, device: torch.device | str = "cpu") -> dict[str, Any]:
    """The head of a result: its script, the date (UTC), the hardware and the versions; for a GPU also whether
    it computes (a stand-in for a GPU does not)."""
    return {
        "script": script,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": hardware(load_before=load_before, device=device),
        "versions": versions(),
        **({"has_values": has_values(device)} if torch.device(device).type == "cuda" else {}),
    }


def quartiles(values: Iterable[float]) -> dict[str, float]:
    """The lower quartile, the median and the upper quartile of two or more values."""
    names = ("lower_quartile", "median", "upper_quartile")
    values = sorted(values)
    # those of two values would lie beyond the two: times below zero
    among = (min(max(value, values[0]), values[-1]) for value in statistics.quantiles(values, n=4))
    return dict(zip(names, among, strict=True))


def mean_and_std(values: Sequence[float]) -> dict[str, float]:
    """The mean and the sample's standard deviation, NaN for a single value."""
    # NumPy, for it takes NaN and Inf as they come
    std = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    return {"mean": float(np.mean(values)), "std": std}


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """Write ``report`` into ``path``, making its folder where there is none; NaN and Inf become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_in_json(report), indent=2, allow_nan=False) + "\n")
    print(f"written: {path}")


def _in_json(value: Any) -> Any:
    """``value`` without the numbers that JSON lacks."""
    if isinstance(value, Mapping):
        return {key: _in_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_in_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
