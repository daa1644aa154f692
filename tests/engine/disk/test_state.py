"""Optimizer state on disk: whatever a run does, its results are those of host memory alone."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import streamer
from streamer.engine.handle import wrapped
from streamer.store.ledger import UNLIMITED
from tests.on_disk import Model, copied, disks, end_of, least_budget, loss_of, small_chunks
from tests.reference import assert_equal, pairwise, streamed

__all__ = ["small_chunks"]

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
#: One that may be skipped and leave parameters out, between two.
STEPS = 3


@dataclass(frozen=True)
class Case:
    """A run. ``budget`` of host memory: "" for none, "some" that is short of the optimizer's state, "least"
    that the ring of state on disk goes into."""

    budget: str
    dtypes: tuple[torch.dtype, torch.dtype | str]  # of the weights and of their moments
    clip: bool
    backwards: int  # for each step
    grad_dtype: torch.dtype | None
    scaler: bool
    inf_at: int | None  # the step in which a gradient is infinite
    update: str
    micro_batch_size: int | None
    groups: int
    without: bool  # parameters have no gradient in some steps
    frozen: bool
    tied: bool
    activations: str
    num_slots: int
    folders: int

    def is_legal(self) -> bool:
        if self.update == "backward":
            once = self.backwards == 1 and not self.clip and not self.scaler
            return once and self.dtypes[0] != FP16
        # GradScaler unscales no gradients in fp16
        return not (self.clip and self.scaler and self.dtypes[0] == FP16)

    def __str__(self) -> str:
        return "-".join(str(getattr(self, field.name)).removeprefix("torch.") for field in fields(self))


CHOICES: dict[str, Sequence[Any]] = {
    "budget": ["some", "least", ""],
    "dtypes": [(BF16, FP32), (BF16, BF16), (BF16, "int8"), (FP32, FP32), (FP16, FP32)],
    "clip": [True, False],
    "backwards": [1, 2],
    "grad_dtype": [FP32, None],
    "scaler": [False, True],
    "inf_at": [None, 1],
    "update": ["step", "backward"],
    "micro_batch_size": [None, 2],
    "groups": [1, 3],
    "without": [False, True],
    "frozen": [False, True],
    "tied": [False, True],
    "activations": ["recompute", "keep"],
    "num_slots": [2, 1, 4],
    "folders": [1, 2],
}


@cache
def budgets(update: str, dtype: torch.dtype, tied: bool, frozen: bool) -> tuple[int, int]:
    """The least budget that there may be, and bytes of host memory without a disk and with fp32 moments."""
    options: dict[str, Any] = {"layers": "layers", "device": "cpu", "update": update, "dtype": dtype}
    model = Model(tied=tied, frozen=frozen)
    least = least_budget(model, **options)
    streamer.wrap(model, **options)
    streamer.AdamW(model.parameters())
    most = sum(wrapped(model).executor.host.bytes().values())
    streamer.unwrap(model)
    return least, most


def wrapped_as(case: Case, folder: Path | None) -> AbstractContextManager[nn.Module]:
    """The case's model, with state on disk in ``folder`` or all of it in host memory."""
    options: dict[str, Any] = {}
    if folder is not None:
        least, most = budgets(case.update, case.dtypes[0], case.tied, case.frozen)
        given = {"": None, "some": (least + most) // 2, "least": least}[case.budget]
        options = {"host_memory": given, "disk": disks(folder, case.folders)}
    return streamed(
        Model(tied=case.tied, frozen=case.frozen),
        layers="layers",
        dtype=case.dtypes[0],
        update=case.update,
        grad_dtype=case.grad_dtype,
        activations=case.activations,
        num_slots=case.num_slots,
        micro_batch_size=case.micro_batch_size,
        **options,
    )


def adamw(case: Case, model: nn.Module) -> streamer.AdamW:
    params = list(model.parameters())
    settings = ({"lr": 1e-2}, {"lr": 3e-3, "weight_decay": 0.0}, {"lr": 5e-3, "betas": (0.8, 0.95)})
    groups = [{"params": params[number :: case.groups], **settings[number]} for number in range(case.groups)]
    return streamer.AdamW(groups, state_dtype=case.dtypes[1])


def step(case: Case, model: nn.Module, optimizer: streamer.AdamW, number: int, scaler: Any) -> dict[str, Any]:
    """One step; what it shows."""
    seen: dict[str, Any] = {}
    for layer in model.layers:  # type: ignore[union-attr]
        layer.without = case.without and number % 2 == 1
    for part in range(case.backwards):
        loss = loss_of(model, 10 * number + part)
        if number == case.inf_at:
            loss = loss * float("inf")
        (loss if scaler is None else scaler.scale(loss)).backward()
        seen[f"loss {part}"] = loss.detach()
    if case.clip:
        if scaler is not None:
            scaler.unscale_(optimizer)
        seen["norm"] = streamer.clip_grad_norm_(model, 0.1)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    if case.update == "step":
        seen["gradients"] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    seen = copied(seen)
    optimizer.zero_grad()
    return seen


def trained(case: Case, folder: Path | None) -> list[dict[str, Any]]:
    with wrapped_as(case, folder) as model, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(a|the) gradient .*is NaN or infinite")
        optimizer = adamw(case, model)
        executor = wrapped(model).executor
        if folder is not None and case.budget == "least":
            assert "weights" in executor.host.disk_bytes()
        if case.backwards > 1:
            executor.host.limit = UNLIMITED  # the sums of gradients come on top
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2) if case.scaler else None
        seen = [step(case, model, optimizer, number, scaler) for number in range(STEPS)]
        return [*seen, end_of(model, optimizer), {"skipped": streamer.stats(model).skipped_steps}]


in_memory = cache(partial(trained, folder=None))


@pytest.mark.parametrize("case", pairwise(Case, CHOICES, Case.is_legal), ids=str)
def test_results_are_those_of_host_memory_alone(case: Case, tmp_path: Path) -> None:
    expected = in_memory(replace(case, budget="", folders=1))
    assert_equal(trained(case, tmp_path), expected)
