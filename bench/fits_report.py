"""What `bench.fits` has found, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def failures(report: Mapping[str, Any]) -> list[str]:
    """What did not hold, in words."""
    found, limits = report["within_limits"], report["limits"]
    failed = []
    first, last = found["validation_loss"]
    # what stands in for a GPU has no losses
    if report.get("has_values", True) and not last < first:
        failed.append(f"the validation loss did not fall: {first:.3f}, then {last:.3f}")
    if limits["host_bytes"] is not None and found["host_bytes_peak"] > limits["host_bytes"]:
        failed.append(
            f"{found['host_bytes_peak']} bytes of host memory were taken, not {limits['host_bytes']}"
        )
    device = found["device_bytes_reserved_peak"] or found["device_bytes_peak"]
    if limits["device_bytes"] is not None and device > limits["device_bytes"]:
        failed.append(f"{device} bytes of the device were taken, not {limits['device_bytes']}")
    if found["device_allocations_after_second_step"]:
        failed.append(f"{found['device_allocations_after_second_step']} allocations after the second step")
    return failed


def print_report(report: Mapping[str, Any]) -> None:
    """Print what `bench.fits` has found."""
    found, gib = report["within_limits"], 1 << 30
    first, last = found["validation_loss"]
    print(f"{report['parameters']:,} parameters, built in {report['build_seconds']:.1f} s")
    print(f"validation loss {first:.3f}, after {len(found['losses'])} steps {last:.3f}")
    device = found["device_bytes_reserved_peak"] or found["device_bytes_peak"]
    print(
        f"at most {device / gib:.2f} GiB of the device, {found['host_bytes_peak'] / gib:.2f} of host memory"
    )
    print(f"{found['tokens_per_step']:>8,} tokens a step: {found['tokens_per_second']:>10,.0f} tokens/s")
    for row in report["with_batch"]:
        start = f"{row['tokens_per_step']:>8,} tokens a step: "
        if "skipped" in row:
            print(start + row["skipped"])
            continue
        print(
            f"{start}{row['tokens_per_second']:>10,.0f} tokens/s, "
            f"{row['flops_per_second'] / 1e12:.2f} TFLOP/s at 6 per parameter and token, "
            f"{row['exposed_transfer_of_step']:.2%} waiting for copies, H2D {row['h2d_of_raw']:.2f} of raw"
        )
    for failure in report["failures"]:
        print(f"FAILED: {failure}")
