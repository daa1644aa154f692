"""The executor on the virtual backend: the same order, and a clock that can be checked by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import streamer
from models.gpt2 import GPT
from streamer.backends.base import Lane
from streamer.backends.virtual import VirtualBackend
from streamer.cli.build import build_model, build_optimizer
from streamer.cli.config import load_config
from streamer.engine.handle import wrapped
from streamer.planner.cost import DeviceKernels, Operations
from streamer.planner.machine import GIB, H200, Machine
from streamer.planner.measure import Tracker
from streamer.planner.step import Prediction, plan_step, predict_step
from tests.reference import VOCAB

CONFIGS = Path(__file__).parents[2] / "configs"

#: One byte or FLOP a second each way, for figures that are the work itself.
UNIT = Machine("unit", 1.0, 1.0, 1.0, 1.0, 1 << 40, 1 << 40)


class Stack(nn.Module):
    """Three layers of one 32 x 32 matrix each: 4 KiB in fp32. What comes after it saves its own output."""

    def __init__(self, after: type[nn.Module] = nn.Sigmoid) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32, bias=False), after()) for _ in range(3))

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


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_step_is_no_shorter_than_what_its_compute_does(kind: str) -> None:
    machine = replace(UNIT, kind=kind, device_bytes_per_second=1.0, seconds_per_op=100.0)
    with torch.device("meta"):
        model = Stack()
    streamer.wrap(model, backend=VirtualBackend(machine), layers="layers", num_slots=2)
    inputs = torch.empty(64, 32, device="meta")

    def step() -> None:
        model(inputs).sum().backward()
        model.zero_grad()
        # after all that is paged: of this step, and of no other
        inputs.square().sum()

    prediction = predict_step(wrapped(model).executor, step)
    assert prediction.seconds >= prediction.busy_seconds[Lane.COMPUTE] * (1 - 1e-9)


class Headed(Stack):
    """With a head of 8 words."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(super().forward(x))


def test_head_and_loss_take_compute_time_between_forward_and_backward() -> None:
    inputs = torch.empty(64, 32, device="meta")
    with torch.device("meta"):
        without, with_head = Stack(), Headed()
    fast_bus = replace(UNIT, h2d_bytes_per_second=1e30, d2h_bytes_per_second=1e30, host_bytes_per_second=1e30)
    before = predict(without, fast_bus, inputs, layers="layers")
    after = predict(with_head, fast_bus, inputs, layers="layers")
    # forward and, in backward, the gradients of input and weight
    head = 3 * 2 * 64 * 32 * 8
    assert after.busy_seconds[Lane.COMPUTE] - before.busy_seconds[Lane.COMPUTE] == head
    assert after.seconds - before.seconds == pytest.approx(head)
    assert after.exposed_seconds[Lane.COMPUTE] == 0


@pytest.mark.parametrize("training", [True, False])
def test_flops_are_those_that_pytorch_counts(training: bool) -> None:
    with torch.device("meta"):
        model = GPT(vocab_size=VOCAB, block_size=16, n_layer=2, n_head=2, n_embd=32)
    tokens = torch.zeros(3, 16, dtype=torch.long, device="meta")
    with (
        FlopCounterMode(display=False) as expected,
        Operations() as counted,
        torch.set_grad_enabled(training),
    ):
        result = model(tokens)
        if training:
            result.sum().backward()
    assert counted.flops == expected.get_total_flops() > 0


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_heads_that_share_keys_compute_what_heads_with_their_own_do(kind: str) -> None:
    shapes = [(3, 4, 16, 8), (3, 2, 16, 8), (3, 2, 16, 8)]
    query, key, value = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True) for shape in shapes
    )
    product = 2 * 3 * 4 * 16 * 16 * 8
    with Operations() as counted, DeviceKernels(kind):
        attended = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        assert counted.flops == 2 * product
        attended.backward(torch.empty_like(attended))
    # backward: the scores again, and two gradients for each of the two products
    assert counted.flops == (2 + 5) * product


def test_what_does_not_fit_is_refused_with_both_sides() -> None:
    with torch.device("meta"):
        model = GPT(n_layer=50, n_head=32, n_embd=4096)
    options = {"layers": "transformer.h", "dtype": torch.bfloat16}
    needs = r"the host needs 8\d{10} bytes .* and has 64424509440 bytes(.|\n)*\n  weights +20,558,094,336  "
    with pytest.raises(MemoryError, match=needs):
        streamer.wrap(model, backend=VirtualBackend(replace(H200, host_bytes=60 * GIB)), **options)
    streamer.wrap(model, backend=VirtualBackend(H200), **options)
    with pytest.raises(
        MemoryError, match=r"moments: the host needs 82232377344 bytes .* choose a smaller state_dtype"
    ):
        streamer.AdamW(model.parameters())
    streamer.AdamW(model.parameters(), state_dtype="int8")


def test_golden_of_a_virtual_step() -> None:
    with torch.device("meta"):
        model = Stack()
    matrix = 4.0 * 32 * 32
    # a layer's forward (of 64 tokens), its copy each way and its update take a second each
    machine = Machine("golden", 32 * matrix, matrix, matrix, 7 * matrix, 1 << 40, 1 << 40)
    streamer.wrap(model, backend=VirtualBackend(machine), layers="layers", num_slots=2)
    optimizer = streamer.AdamW(model.parameters())
    inputs = torch.empty(64, 32, device="meta", requires_grad=True)
    for _ in range(3):
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    # the second of the three steps begins when the gradient that left last, and is needed first, leaves
    begin, end = 13, 28

    def shown(lane: Lane) -> str:
        records = wrapped(model).executor.issuer.trace.records()
        spans = [(record.op, record.span.start, record.span.end) for record in records]
        return " ".join(
            f"{op}:{start - begin:g}-{stop - begin:g}"
            for op, start, stop in spans
            if op.lane is lane and begin <= start < min(stop, end)
        )

    lanes = {lane: shown(lane) for lane in Lane}
    assert lanes == {
        Lane.COMPUTE: "0F@0:3-4 1F@1:4-5 2F@0:5-6 2B@0:6-9 1B@1:9-12 0B@0:12-15",
        Lane.H2D: "0UNSHARD@0:2-3 1UNSHARD@1:3-4 2UNSHARD@0:4-5 0UNSHARD@0:9-10",
        Lane.D2H: "0OFFLOAD_GRAD@0:0-1 2OFFLOAD_GRAD@1:9-10 1OFFLOAD_GRAD@0:12-13",
        Lane.HOST: "0STEP:1-2 1STEP:2-3 2STEP:3-4",
        Lane.DISK_READ: "",
        Lane.DISK_WRITE: "",
        Lane.COLLECTIVE: "",
        Lane.BARRIER: "",
    }


def test_a_large_batch_hides_copies_and_updates_of_ten_billion_parameters() -> None:
    """A step of 64k tokens, at once, with the model and the optimizer of the config."""
    config = load_config(CONFIGS / "gpt2-10b.toml", ["stream.micro_batch_size=64"])
    model = build_model(config, backend=VirtualBackend(H200))
    optimizer = build_optimizer(config, model)
    tokens = torch.zeros(64, config.train.max_length, dtype=torch.long, device="meta")

    def step() -> None:
        model(tokens).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    ten_billion = plan_step(wrapped(model).executor, step).prediction
    exposed = ten_billion.exposed_seconds[Lane.H2D] + ten_billion.exposed_seconds[Lane.D2H]
    assert exposed < 0.03 * ten_billion.seconds
    assert ten_billion.seconds == pytest.approx(max(ten_billion.busy_seconds.values()), rel=0.05)
    assert ten_billion.binding_lane is Lane.COMPUTE
    # all updates but those of the root and of the first layer, with which a step begins
    assert ten_billion.exposed_seconds[Lane.HOST] < 0.05 * ten_billion.busy_seconds[Lane.HOST]
    assert ten_billion.exposed_seconds[Lane.HOST] < 0.01 * ten_billion.seconds


def test_the_config_of_ten_billion_parameters_fits_where_it_says() -> None:
    config = load_config(CONFIGS / "gpt2-10b.toml")
    model = build_model(config, backend=VirtualBackend(H200))
    build_optimizer(config, model)
    assert sum(param.numel() for param in model.parameters()) == pytest.approx(10.28e9, rel=1e-3)
    at_rest = sum(streamer.stats(model).host_bytes.values())
    assert at_rest == pytest.approx(95.7 * GIB, rel=1e-3)
    # saved inputs wait in host memory, so a few layers take as much of the device as all
    few, layers = 4, config.model.args["n_layer"]
    config = load_config(CONFIGS / "gpt2-10b.toml", [f"model.args.n_layer={few}"])
    model = build_model(config, backend=VirtualBackend(H200))
    tokens = torch.zeros(
        config.train.per_device_train_batch_size, config.train.max_length, dtype=torch.long, device="meta"
    )

    def backward() -> None:
        model(tokens, loss_of=partial(streamer.chunked_cross_entropy, targets=tokens)).backward()

    backward()  # makes room for saved inputs
    model.zero_grad()
    with Tracker() as beside:
        backward()
    held = streamer.stats(model)
    # these figures are the README's; what an allocator loses comes on top of the device's
    saved_inputs = held.host_bytes["saved inputs"] * layers // few
    assert at_rest + saved_inputs == pytest.approx(108.2 * GIB, rel=1e-3)
    assert sum(held.device_bytes.values()) + beside.peak == pytest.approx(5.26 * GIB, rel=0.01)
