"""What operations on meta tensors return is found once, and is what PyTorch finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from streamer.planner import cost
from streamer.planner.machine import H200
from streamer.planner.measure import Meter
from streamer.torch_private import storage_id


@pytest.fixture(autouse=True)
def nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "_returned", {})


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def work() -> list[torch.Tensor]:
    """Results that look alike, of operations that are given nearly the same."""
    x, whole = empty(4, 6), empty(4, 6, dtype=torch.long)
    found = [
        x + x.bfloat16(),
        x.bfloat16() + x.bfloat16(),
        empty(6, 4).T * 2,
        x * 2,
        x[:, :3].cos(),
        x[:, ::2].cos(),
    ]
    found += [whole * one for one in (1, 1.0, True)]
    found += [whole.sum(), (whole == 1).sum(), x.sum(0), x.sum(1), x.sum(1, keepdim=True), x.softmax(0)]
    found += [
        F.layer_norm(x, (6,)),
        F.gelu(x),
        x.to(torch.float16),
        x @ x.T,
        x.max(0).values,
        x.max(1).indices,
    ]
    found += [torch.zeros_like(x), torch.cat([x, x]), torch.cat([x, x], 1), torch.where(x > 0, x, 0.0)]
    return found


def forms(tensors: list[torch.Tensor]) -> list[Any]:
    return [(t.shape, t.stride(), t.dtype, t.untyped_storage().nbytes()) for t in tensors]


def test_what_is_found_again_is_what_pytorch_finds() -> None:
    expected = forms(work())
    measured = []
    for _ in range(2):
        with Meter(H200) as meter:
            found = work()
        assert forms(found) == expected
        assert len({storage_id(each) for each in found}) == len(found)
        measured.append((meter.cost, meter.peak, meter.now))
    assert measured[0] == measured[1]


def test_an_operation_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []
    asked = cost._forms_of

    def forms_of(result: Any, args: Any, kwargs: Any) -> Any:
        runs.append(result)
        return asked(result, args, kwargs)

    monkeypatch.setattr(cost, "_forms_of", forms_of)
    counts = []
    for _ in range(2):
        with Meter(H200):
            work()
        counts.append(len(runs))
    assert counts[0] == counts[1] > 20


def test_what_shares_memory_does_so_again() -> None:
    x = empty(4, 6)
    alike: list[Callable[[], torch.Tensor]] = [
        lambda: torch.ops.aten._unsafe_view(x, [6, 4]),
        lambda: torch.ops.aten.lift_fresh(x),
        lambda: x.view(24),
        lambda: x.add_(1),
    ]
    for run in alike:
        for _ in range(2):
            with Meter(H200):
                assert storage_id(run()) == storage_id(x)
