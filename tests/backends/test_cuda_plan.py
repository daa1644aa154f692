"""What a plan says of a GPU's memory beside what PyTorch allocates there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from typing import Any

import pytest
import torch

import streamer
from models.gpt2 import GPT
from streamer.backends.base import Backend
from streamer.backends.cuda import CudaBackend
from streamer.engine.paging.executor import Executor
from streamer.engine.paging.handle import wrapped
from streamer.plan.step_plan import plan_step
from streamer.simulate.backend import VirtualBackend
from streamer.simulate.machine import H200

pytestmark = pytest.mark.cuda

TIME, BATCH = 512, 16


def begin(backend: Backend, **options: Any) -> tuple[Executor, Callable[[], None]]:
    with torch.device("meta") if backend.device.type == "meta" else nullcontext():
        # large enough for the workspaces of libraries (some MiB) not to count
        model = GPT(vocab_size=8192, block_size=TIME, n_layer=6, n_head=16, n_embd=1024)
    streamer.wrap(model, layers="transformer.h", backend=backend, dtype=torch.bfloat16, **options)
    optimizer = streamer.AdamW(model.parameters())
    tokens = torch.zeros(BATCH, TIME, dtype=torch.long, device=backend.device)

    def step() -> None:
        model(tokens, loss_of=partial(streamer.chunked_cross_entropy, targets=tokens)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return wrapped(model).executor, step


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activations": "keep"},
        {"activations": "recompute+offload", "micro_batch_size": 4},
        {"num_slots": 6},
    ],
    ids=lambda options: ",".join(map(str, options.values())),
)
def test_the_peak_is_the_plan(options: dict[str, Any]) -> None:
    plan = plan_step(*begin(VirtualBackend(H200), **options))
    backend = CudaBackend(torch.device("cuda"))
    with closing(backend):
        executor, step = begin(backend, **options)
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        executor.synchronize()
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() == pytest.approx(plan.device_total, rel=0.05)
