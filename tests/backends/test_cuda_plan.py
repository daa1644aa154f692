"""What a plan says of a GPU's memory beside what PyTorch allocates there."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import streamer
from models.gpt2 import GPT
from streamer.backends.base import Backend
from streamer.backends.cuda import CudaBackend
from streamer.backends.virtual import VirtualBackend
from streamer.cli.config import StreamConfig
from streamer.cli.plan.planning import this_machine
from streamer.engine.executor import Executor
from streamer.engine.handle import wrapped
from streamer.engine.paging.norms import Norms
from streamer.planner.machine import H200, RTX_4090, Machine, gpu_properties
from streamer.planner.step import plan_step
from tests.reference import hugging_face

pytestmark = pytest.mark.cuda_api

WIDTH, LAYERS = 512, 4


@dataclass(frozen=True)
class Setting:
    kind: str
    dtype: torch.dtype
    activations: str
    micro_batch_size: int | None
    num_slots: int
    loss: str
    vocab_size: int
    #: sequences, and tokens in each
    batch: tuple[int, int]

    def __str__(self) -> str:
        return "-".join(str(getattr(self, field.name)).removeprefix("torch.") for field in fields(self))

    def model(self) -> tuple[nn.Module, str]:
        """A new model, and where its layers are."""
        _, time = self.batch
        if self.kind != "llama":
            sizes = {"n_layer": LAYERS, "n_head": 8, "n_embd": WIDTH, "bias": self.kind == "gpt"}
            return GPT(vocab_size=self.vocab_size, block_size=time, **sizes), "transformer.h"
        sizes = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": LAYERS}
        sizes |= {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": time}
        return hugging_face(vocab_size=self.vocab_size, **sizes), "model.layers"

    def begin(self, backend: Backend) -> tuple[Executor, Callable[[], None]]:
        """The model, wrapped, and a step of it."""
        with torch.device("meta") if backend.device.type == "meta" else nullcontext():
            model, layers = self.model()
        streamer.wrap(
            model,
            layers=layers,
            backend=backend,
            dtype=self.dtype,
            activations=self.activations,
            micro_batch_size=self.micro_batch_size,
            num_slots=self.num_slots,
        )
        optimizer = streamer.AdamW(model.parameters())
        tokens = torch.zeros(self.batch, dtype=torch.long, device=backend.device)

        def loss() -> torch.Tensor:
            if self.loss == "chunked":
                return model(tokens, loss_of=partial(streamer.chunked_cross_entropy, targets=tokens))
            logits = model(tokens)
            logits = getattr(logits, "logits", logits).flatten(0, 1)
            return F.cross_entropy(logits.float(), tokens.flatten())

        def step() -> None:
            loss().backward()
            optimizer.step()
            optimizer.zero_grad()

        return wrapped(model).executor, step


def settings(number: int) -> list[Setting]:
    """``number`` of all combinations, the same ones each time."""
    every = product(
        ["gpt", "gpt without biases", "llama"],
        [torch.bfloat16, torch.float32],
        ["recompute", "recompute+offload", "keep"],
        [None, 1],
        [2, LAYERS],
        ["chunked", "whole"],
        [1000, 50257],
        [(8, 512), (2, 1000), (2, 4096)],
    )
    possible = [
        setting
        for setting in (Setting(*values) for values in every)
        # the loss over chunks is this repository's GPT's
        if not (setting.kind == "llama" and setting.loss == "chunked")
    ]
    return random.Random(0).sample(possible, number)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """This GPU, on which no matrix has been multiplied, and no look at values: bytes alone are compared."""
    monkeypatch.setattr(Norms, "is_finite", lambda *_: True)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    return gpu_properties(H200, torch.device("cuda"))


def test_train_plans_with_what_pytorch_says_of_the_gpu() -> None:
    machine, _ = this_machine(StreamConfig(device="cuda"))
    properties = torch.cuda.get_device_properties("cuda")
    assert machine.compute_capability == properties.major + properties.minor / 10
    assert machine.flops_per_second == RTX_4090.flops_per_second


@pytest.mark.parametrize("setting", settings(30), ids=str)
def test_the_peak_is_the_plan(setting: Setting, gpu: Machine) -> None:
    planned = plan_step(*setting.begin(VirtualBackend(gpu))).device_total
    before = torch.cuda.memory_allocated()
    with closing(CudaBackend(torch.device("cuda"))) as backend:
        executor, step = setting.begin(backend)
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        executor.synchronize()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    assert peak <= planned <= 1.15 * peak
