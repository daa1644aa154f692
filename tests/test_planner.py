"""The executor on the virtual backend: the same order, and a clock that can be checked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import streamer
from models.gpt2 import GPT
from streamer.backends.base import Lane
from streamer.backends.machine import GIB, H200, Machine
from streamer.backends.thread import ThreadBackend
from streamer.backends.virtual import VirtualBackend
from streamer.handle import wrapped
from streamer.plan.planner import Prediction, predict_step
from tests.reference import VOCAB

#: One byte or FLOP a second each way, for figures that are the work itself.
UNIT = Machine("unit", 1.0, 1.0, 1.0, 1.0, 1 << 40, 1 << 40)


class Stack(nn.Module):
    """Three layers of one 32 x 32 matrix each: 4 KiB in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def predict(model: nn.Module, machine: Machine, inputs: torch.Tensor, **options: object) -> Prediction:
    streamer.wrap(model, backend=VirtualBackend(machine), **options)
    optimizer = streamer.AdamW(model.parameters())

    def step() -> None:
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return predict_step(wrapped(model).executor, step)


def test_busy_seconds_are_the_work() -> None:
    with torch.device("meta"):
        model = Stack()
    tokens, matrix = 64, 32 * 32
    prediction = predict(model, UNIT, torch.empty(tokens, 32, device="meta"), layers="layers", num_slots=2)
    # forward; in backward forward again and the gradients of input and weight, but the first layer's input
    # needs none: 2 FLOP for each token and weight
    assert prediction.busy_seconds[Lane.COMPUTE] == 2 * tokens * matrix * (3 + 3 + 3 + 2)
    # all three for forward, one of them again for backward, where the other two are there still
    assert prediction.busy_seconds[Lane.H2D] == 4 * 4 * matrix
    assert prediction.busy_seconds[Lane.D2H] == 3 * 4 * matrix
    # fp32 AdamW reads and writes 28 bytes for each parameter
    assert prediction.busy_seconds[Lane.HOST] == 3 * 28 * matrix
    assert prediction.binding_lane is Lane.COMPUTE


def test_what_does_not_fit_is_refused_with_both_sides() -> None:
    with torch.device("meta"):
        model = GPT(n_layer=50, n_head=32, n_embd=4096)
    options = {"layers": "transformer.h", "dtype": torch.bfloat16}
    needs = r"the host needs 8\d{10} bytes .*weights 20558094336 bytes .* and has 64424509440 bytes"
    with pytest.raises(MemoryError, match=needs):
        streamer.wrap(model, backend=VirtualBackend(replace(H200, host_bytes=60 * GIB)), **options)
    streamer.wrap(model, backend=VirtualBackend(H200), **options)
    with pytest.raises(
        MemoryError, match=r"moments: they take 82232377344 bytes .* choose a smaller state_dtype"
    ):
        streamer.AdamW(model.parameters())
    streamer.AdamW(model.parameters(), state_dtype="int8")


def test_a_large_batch_hides_every_copy_of_ten_billion_parameters() -> None:
    with torch.device("meta"):
        model = GPT(n_layer=50, n_head=32, n_embd=4096)
    prediction = predict(
        model,
        # fp32 moments and masters of this model are more than its host holds
        replace(H200, host_bytes=256 * GIB),
        torch.zeros(64, 1024, dtype=torch.long, device="meta"),
        layers="transformer.h",
        dtype=torch.bfloat16,
    )
    exposed = prediction.exposed_seconds[Lane.H2D] + prediction.exposed_seconds[Lane.D2H]
    assert exposed < 0.03 * prediction.seconds
    assert prediction.seconds == pytest.approx(max(prediction.busy_seconds.values()), rel=0.05)


@pytest.mark.parametrize("num_slots", [1, 2, 4])
@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_the_virtual_order_is_the_real_one(num_slots: int, activations: str) -> None:
    def ops(model: GPT, backend: ThreadBackend | VirtualBackend, device: str) -> list[str]:
        streamer.wrap(
            model, layers="transformer.h", backend=backend, num_slots=num_slots, activations=activations
        )
        optimizer = streamer.AdamW(model.parameters())
        for _ in range(3):
            model(torch.zeros(2, 16, dtype=torch.long, device=device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        streamer.synchronize(model)
        trace = wrapped(model).executor.issuer.trace
        # what is issued, in the order of issue: lanes differ in when they finish
        by_lane = [
            " ".join(str(record.op) for record in trace.records() if record.op.lane is lane) for lane in Lane
        ]
        streamer.unwrap(model)
        return by_lane

    sizes = {"vocab_size": VOCAB, "block_size": 16, "n_layer": 5, "n_head": 2, "n_embd": 32}
    with torch.device("meta"):
        shape = GPT(**sizes)
    assert ops(shape, VirtualBackend(H200), "meta") == ops(GPT(**sizes), ThreadBackend(), "cpu")
