"""Machines: by name, as files, and what work takes on them, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from streamer.backends.base import Event, Lane, Span
from streamer.backends.virtual import Clock, VirtualBackend
from streamer.cli.calibrate.machine_file import dump_machine, load_machine, machine
from streamer.cli.config import ConfigError
from streamer.planner.cost import DeviceKernels, Operations
from streamer.planner.machine import BY_GPU, GIB, MACHINES, KeptRates, Machine, peak_flops

#: One FLOP a second, a thousand bytes of the device's memory, and nothing for a launch.
UNIT = Machine("unit", 1.0, 1.0, 1.0, 1.0, 1 << 40, 1 << 40, device_bytes_per_second=1000.0)
COMPUTE, H2D, D2H, HOST = Lane.COMPUTE, Lane.H2D, Lane.D2H, Lane.HOST


@pytest.mark.parametrize("name", MACHINES)
def test_a_named_machine_is_complete_and_plausible(name: str, tmp_path: Path) -> None:
    found = machine(name)
    assert found.kind == "cuda"
    assert found.fp32_flops_per_second is not None and found.device_bytes_per_second is not None
    assert found.compute_capability is not None
    assert found.fp32_flops_per_second < found.flops_per_second
    # between a laptop and a superchip: the device's memory above the host's, the bus below both
    assert 20e12 < found.flops_per_second < 1000e12
    assert 0.2e12 < found.device_bytes_per_second < 4e12
    assert found.host_bytes_per_second < found.device_bytes_per_second
    assert 12e9 <= found.d2h_bytes_per_second <= found.h2d_bytes_per_second <= 450e9
    assert 8 * GIB <= found.device_bytes <= 144 * GIB < 512 * GIB
    if found.coherent:
        assert found.device_bytes == found.host_bytes == machine(name, 4).host_bytes, "one memory"
    else:
        assert found.device_bytes < found.host_bytes or name == "h200"
    assert (found.bf16_flops_per_second is None) is (found.compute_capability >= 8), "from Ampere on"
    if found.interconnect != "nvlink" and name != "laptop-8gb":  # which has one GPU
        assert found.collective_bytes_per_second <= found.h2d_bytes_per_second
    assert found in BY_GPU.values() or name == "rtx-4090-pcie3"
    assert 0 < found.seconds_per_op < 1e-4
    path = tmp_path / "machine.toml"
    path.write_text(dump_machine(found))
    assert machine(str(path)) == found


def test_a_machine_that_is_written_is_read_back(tmp_path: Path) -> None:
    rates = {"attention_flops_per_second": 0.1, "beside": KeptRates(compute_host=1 / 3)}
    made = replace(UNIT, kind="cpu", calibrated=True, **rates)
    path = tmp_path / "machine.toml"
    path.write_text(dump_machine(made, {"date": "2026-01-01", "quartiles": {"host": [1.0, 2.0, 3.0]}}))
    assert load_machine(path) == made


def test_an_unknown_machine_is_told_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        machine("abacus")
    assert str(caught.value) == (
        f"there is no machine 'abacus': known are {', '.join(MACHINES)}; "
        "or use a file ending in .toml, which streamer calibrate writes"
    )


def test_a_misspelt_machine_is_told_those_like_it_before_all_others() -> None:
    for misspelt, near in [
        ("rtx4090", "rtx-4090"),
        ("l40", "l4 or l40s"),
        ("h100", "h100-pcie, h100-sxm or h200"),
    ]:
        with pytest.raises(ConfigError) as caught:
            machine(misspelt)
        told = f"there is no machine {misspelt!r}: did you mean {near}? known are rtx-3090, rtx-4060ti-16gb, "
        assert str(caught.value).startswith(told)
        assert "\n" not in str(caught.value)


LEAST = """\
[machine]
name = "least"
flops_per_second = 1e12
h2d_bytes_per_second = 1e9
d2h_bytes_per_second = 1e9
host_bytes_per_second = 1e9
device_bytes = 1
host_bytes = 1
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[machine]", "[machines]", r"unknown table \[machines\]; did you mean 'machine'\?"),
        ("[machine]", "beside = 1\n[machine]", r"beside must be a table: write \[beside\]"),
        (LEAST, "", r"there is no \[machine\]: use a file of streamer calibrate"),
        ("host_bytes = 1", "host_byte = 1", r"unknown key 'host_byte' in \[machine\]; did you mean 'host_b"),
        ("host_bytes = 1\n", "", "machine.host_bytes is missing: set it to an integer of 1 or more"),
        (
            "h2d_bytes_per_second = 1e9",
            "",
            "machine.h2d_bytes_per_second is missing: set it to a number above 0",
        ),
        ("= 1e12", "= 0", "machine.flops_per_second must be a number above 0, not 0"),
        ("= 1e12", "= nan", "machine.flops_per_second must be a number above 0, not nan"),
        ("device_bytes = 1", "device_bytes = 1.5", "device_bytes must be an integer of 1 or more, not 1.5"),
        ('"least"', '""', "machine.name must be a string that is not empty"),
        ('"least"', '"least"\nkind = "tpu"', 'machine.kind must be "cuda" or "cpu", not "tpu"'),
        ('"least"', '"least"\nseconds_per_op = -1', "seconds_per_op must be a number of 0 or more, not -1"),
        (
            "host_bytes = 1\n",
            "host_bytes = 1\n[beside]\ncopy_copy = 1.5\n",
            "beside.copy_copy must be a number above 0 and at most 1, not 1.5",
        ),
        (
            "host_bytes = 1\n",
            "host_bytes = 1\n[beside]\ncopy_cpy = 1\n",
            r"unknown key 'copy_cpy' in \[beside\]; did you mean 'copy_copy'\?",
        ),
        ('"least"', '"least"\ncoherent = 1', "machine.coherent must be true or false, not 1"),
        ("[machine]", "[machine", "not TOML in UTF-8"),
    ],
)
def test_a_bad_file_is_told_in_one_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "machine.toml"
    assert old in LEAST
    path.write_text(LEAST.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message) as caught:
        load_machine(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(LEAST)
    with pytest.raises(ConfigError, match=r"machine.toml: No such file .*mine.toml"):
        machine(str(tmp_path / "machine.toml"))


def seconds(made: Machine, work: object) -> float:
    with Operations(made) as counter:
        work()  # type: ignore[operator]
    return counter.seconds


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("left", "right", "by_hand"),
    [
        # 16 rows in 4 groups, each of which meets a matrix of its own
        ((16, 8), (4, 8, 32), 16 * 2 * 8 * 32),
        # the gradient of the 4 matrices: groups of the inner dimension
        ((8, 16), (16, 32), 2 * 8 * 16 * 32),
        ((4, 16, 8), (8, 32), 2 * 16 * 32 * 8),
        ((4, 16, 8), (4, 8, 32), 4 * 2 * 16 * 8 * 32),
    ],
)
def test_products_of_experts_count_the_rows_that_each_meets(
    left: tuple[int, ...], right: tuple[int, ...], by_hand: int
) -> None:
    offsets = None if len(left) == len(right) == 3 else meta(4, dtype=torch.int32)
    with Operations() as counter:
        torch._grouped_mm(meta(*left, dtype=torch.bfloat16), meta(*right, dtype=torch.bfloat16), offs=offsets)
    assert counter.flops == by_hand


def test_products_take_the_time_of_their_flops_or_of_their_bytes() -> None:
    x, y = meta(10, 10), meta(10, 10)
    assert seconds(UNIT, lambda: x @ y) == 2000.0
    # 1.2 kB at a byte a second
    slow = replace(UNIT, flops_per_second=1e9, device_bytes_per_second=1.0)
    assert seconds(slow, lambda: x @ y) == 1200.0
    halves = replace(UNIT, fp32_flops_per_second=4.0)
    assert seconds(halves, lambda: x @ y) == 500.0
    assert seconds(halves, lambda: x.bfloat16() @ y.bfloat16()) == pytest.approx(2000.0 + 4 * 0.3)


def test_bf16_is_slow_where_tensor_cores_do_not_know_it() -> None:
    made = replace(UNIT, device_bytes_per_second=None, bf16_flops_per_second=0.5)
    took = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = meta(10, 10, dtype=dtype)
        took[dtype] = seconds(made, lambda x=x: x @ x)
    assert took == {torch.bfloat16: 4000.0, torch.float16: 2000.0, torch.float32: 2000.0}
    assert peak_flops("Tesla T4", torch.float16) == 65e12
    assert peak_flops("Tesla T4", torch.bfloat16) == peak_flops("Tesla T4", torch.float32) == 8.1e12


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_attention_has_a_rate_of_its_own(kind: str) -> None:
    made = replace(UNIT, kind=kind, attention_flops_per_second=2.0)
    query = meta(2, 3, 16, 8, dtype=torch.bfloat16)
    flops = 2 * 2 * 2 * 3 * 16 * 16 * 8  # two products, 2 FLOP each
    with DeviceKernels(kind):
        took = seconds(made, lambda: F.scaled_dot_product_attention(query, query, query))
    # a few bytes are moved beside it
    assert took == pytest.approx(flops / 2, rel=1e-3)


def test_what_is_submitted_before_slows_and_two_lanes_add_up() -> None:
    clock = Clock(KeptRates(compute_host=0.5, compute_copy=0.5))
    events = [clock.submit(HOST, 9.0, ()), clock.submit(H2D, 3.0, ())]
    # a third of its rate until 3, then half of it: 1 and 2 of its seconds
    assert clock.submit(COMPUTE, 3.0, ()).span() == Span(0, 0, 7)
    assert clock.submit(COMPUTE, 0.0, events).span() == Span(7, 9, 9)
    clock.compute(2.0)
    assert clock.now() == 11


def test_copies_both_ways_at_once() -> None:
    clock = Clock(KeptRates(copy_copy=0.5))
    assert clock.submit(H2D, 4.0, ()).span() == Span(0, 0, 4)
    # until 4 at half its rate, which is 2 of its 3 seconds
    assert clock.submit(D2H, 3.0, ()).span() == Span(0, 0, 5)
    assert clock.submit(COMPUTE, 2.0, ()).span() == Span(0, 0, 2)
    waiting: list[Event] = [clock.submit(COMPUTE, 3.0, ())]
    assert clock.submit(H2D, 1.0, waiting).span() == Span(4, 5, 6)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_virtual_backend_takes_the_callers_time_too(kind: str) -> None:
    backend = VirtualBackend(replace(UNIT, kind=kind))
    x = meta(100, 10)
    with backend.counting_caller():
        x.exp_()
        event = backend.submit(COMPUTE, lambda: x @ x.t(), (), 0)
    assert backend.caller_seconds == 8.0
    flops = 2 * 100 * 100 * 10
    assert event.span() == Span(8, 8, 8 + flops)
    assert backend.flops == flops
