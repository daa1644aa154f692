"""On a GPU: the same numbers as plain PyTorch there, lanes that keep their order, memory that comes back."""

from __future__ import annotations

import copy
import gc
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import streamer
import streamer.backends.cuda
import streamer.engine.executor
from streamer.backends.base import SPECIAL, Event, Lane
from streamer.backends.cuda import CudaBackend
from streamer.engine.handle import wrapped
from streamer.engine.schedule.hazards import Hazards
from tests.engine.layer.test_micro_batches import sliced
from tests.model.test_parity import TorchMasters
from tests.reference import (
    History,
    LossOf,
    assert_parity,
    assert_same,
    batch,
    gradients,
    streamed,
    tiny_gpt,
    train,
)

STEPS = 4
#: With this eps Adam's step follows the gradient smoothly, so that two kernels' roundings do not part.
SETTINGS = {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-4}
#: Clock cycles of a GPU, which runs at 1 to 2 GHz.
MILLISECOND = 1_500_000


@pytest.fixture(autouse=True)
def attention_without_atomics() -> Iterator[None]:
    """The fused backward of attention adds up in whatever order its blocks end."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


@cache
def gpt(layers: int = 4, width: int = 128) -> nn.Module:
    """Its sizes put every parameter of a slot at a multiple of 256 bytes, as PyTorch puts its own tensors:
    cuBLAS looks at that when it chooses a kernel. Its weights are the same in bf16."""
    model = tiny_gpt(layers, width, dropout=0.1)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.bfloat16())
    return model


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    tokens = batch(step).cuda()
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def on_cpu(history: History) -> History:
    history.weights = {name: value.cpu() for name, value in history.weights.items()}
    return history


def train_by_torch(model: nn.Module, loss_of: LossOf = loss_of) -> History:
    optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS)
    clip = partial(nn.utils.clip_grad_norm_, list(model.parameters()), 0.5)
    return on_cpu(train(model, optimizer, clip, steps=STEPS, loss_of=loss_of))


@cache
def plain(loss_of: LossOf = loss_of) -> History:
    return train_by_torch(copy.deepcopy(gpt()).cuda(), loss_of)


def paged(*, loss_of: LossOf = loss_of, **options: Any) -> History:
    with streamed(gpt(), **({"device": "cuda"} | options)) as model:
        return train_in_place(model, loss_of)


def train_in_place(model: nn.Module, loss_of: LossOf = loss_of) -> History:
    optimizer = streamer.AdamW(model.parameters(), **SETTINGS)
    clip = partial(streamer.clip_grad_norm_, model, 0.5)
    return on_cpu(train(model, optimizer, clip, steps=STEPS, loss_of=loss_of))


@cache
def undisturbed(activations: str) -> History:
    return paged(activations=activations)


class SlowLane(CudaBackend):
    """One lane is late with everything, and slots are poisoned."""

    def __init__(self, slow: Lane, milliseconds: int = 3) -> None:
        super().__init__(torch.device("cuda"), poison=True)
        self._slow = slow
        self._milliseconds = milliseconds

    def queue(self, lane: Lane, work: Callable[[], object], waits: Sequence[Event], nbytes: int) -> Event:
        def late() -> object:
            if lane is Lane.HOST:
                time.sleep(0.001 * self._milliseconds)
            else:
                torch.cuda._sleep(self._milliseconds * MILLISECOND)
            return work()

        return super().queue(lane, late if lane is self._slow else work, waits, nbytes)

    @contextmanager
    def computing(self, waits: Sequence[Event]) -> Iterator[Event]:
        with super().computing(waits) as event:
            if self._slow is Lane.COMPUTE:
                torch.cuda._sleep(self._milliseconds * MILLISECOND)
            yield event


# Numbers


@pytest.mark.cuda_values
@pytest.mark.parametrize(
    ("activations", "num_slots"), [("recompute", 1), ("recompute+offload", 3), ("keep", 2)]
)
def test_training_in_fp32_equals_plain_pytorch(activations: str, num_slots: int) -> None:
    assert max(plain().norms) > 0.5, "clipping must have something to do"
    backend = CudaBackend(torch.device("cuda"), poison=True)
    actual = paged(activations=activations, num_slots=num_slots, backend=backend)
    assert_parity(actual, plain())


@pytest.mark.cuda_values
@pytest.mark.parametrize("activations", ["recompute", "recompute+offload", "keep"])
def test_micro_batches_equal_plain_pytorch_on_the_same_slices(activations: str) -> None:
    model = copy.deepcopy(gpt()).cuda()
    for block in model.transformer.h:
        block.forward = sliced(block.forward, 2)  # type: ignore[method-assign]
    expected = train_by_torch(model)
    backend = CudaBackend(torch.device("cuda"), poison=True)
    assert_parity(paged(activations=activations, micro_batch_size=2, backend=backend), expected)


@pytest.mark.cuda_values
@pytest.mark.parametrize("slow", [Lane.H2D, Lane.D2H])
def test_saved_inputs_are_right_however_slow_the_bus_is(slow: Lane) -> None:
    actual = paged(activations="recompute+offload", backend=SlowLane(slow))
    assert_same(actual, undisturbed("recompute"))


class Greedy(nn.Module):
    """Memory that is let go while its copy runs may be taken at once: this layer takes some and fills it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.full_like(x, math.nan)
        return x * self.scale


@contextmanager
def greedy() -> Iterator[nn.Module]:
    layers = nn.Sequential(*(Greedy() for _ in range(12)))
    with streamed(layers, device="cuda", layers="", activations="recompute+offload") as model:
        yield model


@pytest.mark.cuda_api
def test_inputs_that_wait_in_host_memory_leave_the_device() -> None:
    x = torch.randn(1 << 24, device="cuda", requires_grad=True)
    with greedy() as model:
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model(x * 2).sum().backward()
            peak = torch.cuda.max_memory_allocated() - before
    assert peak < 8 * x.nbytes


@pytest.mark.cuda_values
def test_inputs_that_wait_in_host_memory_are_not_overwritten() -> None:
    x = torch.randn(1 << 24, device="cuda", requires_grad=True)
    with greedy() as model:
        for _ in range(2):
            model(x * 2).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 4.0))
        streamer.synchronize(model)
        for layer in model:
            assert torch.allclose(layer.scale.grad, 2 * x.double().sum().float().cpu() * 2, rtol=1e-3)


@pytest.mark.cuda_values
@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_training_in_bf16_equals_a_plain_bf16_model_with_fp32_masters(activations: str) -> None:
    model = copy.deepcopy(gpt()).cuda()
    reference = copy.deepcopy(model).bfloat16()
    masters = TorchMasters(reference, dict(model.named_parameters()), **SETTINGS)
    expected = on_cpu(train(reference, masters, None, steps=STEPS, loss_of=loss_of))  # type: ignore[arg-type]
    with streamed(gpt(), device="cuda", dtype=torch.bfloat16, activations=activations) as paged_model:
        optimizer = streamer.AdamW(paged_model.parameters(), **SETTINGS)
        actual = on_cpu(train(paged_model, optimizer, None, steps=STEPS, loss_of=loss_of))
    assert_alike_in_bf16(actual, expected)


def assert_alike_in_bf16(actual: History, expected: History) -> None:
    assert actual.losses[0] == expected.losses[0]
    for name, gradient in expected.first_gradients.items():
        assert torch.equal(actual.first_gradients[name], gradient), name
    # weights that differ in the last bit of an fp32 master may be rounded to different bf16 neighbours
    torch.testing.assert_close(torch.tensor(actual.losses), torch.tensor(expected.losses), rtol=2e-3, atol=0)


@pytest.mark.cuda_values
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_a_model_that_is_on_the_gpu_already_is_moved_out(dtype: torch.dtype | None) -> None:
    model = copy.deepcopy(gpt()).cuda()
    with (
        streamed(model, device="cuda", dtype=dtype) as moved,
        streamed(gpt(), device="cuda", dtype=dtype) as own,
    ):
        assert_same(train_in_place(moved), train_in_place(own))


@pytest.mark.cuda_values
def test_inputs_are_moved_to_the_gpu() -> None:
    tokens = batch(0)[:, :-1]
    with streamed(gpt(), device=None) as model, torch.no_grad():
        logits = model.eval()(tokens)
        assert logits.device.type == "cuda"
        assert torch.equal(logits, model(tokens.cuda()))


@pytest.mark.cuda_api
def test_a_device_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="device='cuda:99' does not exist: PyTorch finds"):
        streamer.wrap(copy.deepcopy(gpt()), device="cuda:99")


# Order


Copy = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.mark.cuda_api
@pytest.mark.parametrize(
    "copy_of",
    [
        lambda tensor, _: tensor.to("cuda", non_blocking=True),
        lambda tensor, _: tensor.cuda(non_blocking=True),
        lambda tensor, device: device.copy_(tensor, non_blocking=True),
        lambda tensor, device: torch._foreach_copy_([device], [tensor], True)[0],
    ],
    ids=["to", "cuda", "copy_", "foreach"],
)
@pytest.mark.parametrize("attribute", ["", "grad"])
def test_what_is_copied_to_the_gpu_may_be_written_at_once(copy_of: Copy, attribute: str) -> None:
    """As it may where parameters are on the GPU, and the write waits there for the copy."""
    with streamed(gpt(), device="cuda") as model, torch.enable_grad():
        loss_of(model, 0).backward()
        param = model.transformer.h[1].mlp.c_fc.weight
        tensor = getattr(param, attribute) if attribute else param
        into = torch.zeros(tensor.shape).cuda()
        with torch.no_grad():
            tensor.fill_(1.0)
            torch.cuda._sleep(100 * MILLISECOND)
            copied = copy_of(tensor, into)
            tensor.fill_(2.0)
        assert torch.equal(copied.cpu(), torch.ones(tensor.shape))


@pytest.mark.cuda_api
@pytest.mark.parametrize("attribute", ["", "grad"])
def test_what_is_copied_from_the_gpu_may_be_read_at_once(attribute: str) -> None:
    with streamed(gpt(), device="cuda") as model:
        loss_of(model, 0).backward()
        param = model.transformer.h[1].mlp.c_fc.weight
        tensor = getattr(param, attribute) if attribute else param
        source = torch.full(tensor.shape, 3.0).cuda()
        torch.cuda._sleep(100 * MILLISECOND)
        with torch.no_grad():
            tensor.copy_(source, non_blocking=True)
        assert torch.equal(tensor, torch.full(tensor.shape, 3.0))


@pytest.mark.cuda_api
def test_inputs_in_pinned_memory_may_be_written_once_forward_returns() -> None:
    seen = []
    tokens = torch.ones(2, 8, dtype=torch.long).pin_memory()
    with streamed(gpt(), device="cuda") as model, torch.no_grad():
        model.transformer.wte.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        for _ in range(2):
            tokens.fill_(1)
            torch.cuda._sleep(300 * MILLISECOND)
            model(tokens)
            tokens.fill_(2)
    assert all(torch.equal(moved.cpu(), torch.ones(2, 8, dtype=torch.long)) for moved in seen)


@pytest.mark.cuda_values
@pytest.mark.parametrize("slow", [lane for lane in Lane if lane not in SPECIAL], ids=str)
@pytest.mark.parametrize(("activations", "num_slots"), [("recompute", 1), ("keep", 2)])
def test_a_slow_lane_changes_nothing(slow: Lane, activations: str, num_slots: int) -> None:
    actual = paged(activations=activations, num_slots=num_slots, backend=SlowLane(slow))
    assert_same(actual, undisturbed(activations))


@pytest.mark.cuda_values
def test_without_the_waits_the_result_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = batch(0)[:, :-1].cuda()
    with torch.no_grad():
        expected = copy.deepcopy(gpt()).cuda().eval()(tokens)
        with streamed(gpt(), backend=SlowLane(Lane.H2D)) as model:
            assert torch.equal(model.eval()(tokens), expected)
        no_waits = partial(Hazards, read_after_write=False)
        monkeypatch.setattr(streamer.engine.executor, "Hazards", no_waits)
        # longer than the host takes to queue the whole forward, where others use the GPU too
        with streamed(gpt(), backend=SlowLane(Lane.H2D, milliseconds=200)) as model:
            assert not torch.equal(model.eval()(tokens), expected)


@pytest.mark.cuda_values
@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_a_stream_of_the_callers_own(activations: str) -> None:
    own = torch.cuda.Stream()
    own.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(own):
        actual = paged(activations=activations)
    assert_same(actual, undisturbed(activations))


@pytest.mark.cuda_values
def test_backward_outside_of_the_stream_of_the_forward() -> None:
    with streamed(gpt(), device="cuda") as model:
        own = torch.cuda.Stream()
        own.wait_stream(torch.cuda.current_stream())
        torch.manual_seed(0)
        with torch.cuda.stream(own):
            torch.cuda._sleep(20 * MILLISECOND)
            loss = loss_of(model, 0)
        torch.cuda.current_stream().wait_stream(own)
        loss.backward()
        torch.testing.assert_close(gradients(model), plain().first_gradients, rtol=0, atol=0)


@pytest.mark.cuda_values
def test_a_layer_on_a_late_stream_keeps_its_weights_when_the_caller_goes_on_on_another() -> None:
    late, early = torch.cuda.Stream(), torch.cuda.Stream()
    tokens = batch(0)[:, :-1].cuda()
    # every layer has its slot, so both streams read the same ones before they are written
    with streamed(gpt(), device="cuda", num_slots=4) as model:
        optimizer = streamer.AdamW(model.parameters(), lr=0.1)
        with torch.no_grad():
            expected = model.eval()(tokens)
        torch.cuda.synchronize()
        with torch.cuda.stream(late), torch.no_grad():
            torch.cuda._sleep(400 * MILLISECOND)
            actual = model(tokens)
        with torch.cuda.stream(early):
            loss_of(model, 0).backward()
            optimizer.step()
            with torch.no_grad():
                changed = model(tokens)
        torch.cuda.synchronize()
        assert torch.equal(actual, expected)
        assert not torch.equal(changed, expected)


@pytest.mark.cuda_values
def test_gradients_are_in_host_memory_when_backward_ends() -> None:
    with streamed(gpt(layers=3, width=1024), device="cuda") as model:
        loss_of(model, 0).backward()
        at_once = {name: param.grad.clone() for name, param in model.named_parameters()}
        torch.cuda.synchronize()
        time.sleep(0.05)
        for name, param in model.named_parameters():
            assert torch.equal(param.grad, at_once[name]), name
            assert param.grad.any(), name
            assert param.grad.device.type == ("cpu" if ".h." in name else "cuda"), name


# What was when


@pytest.mark.cuda_api
@pytest.mark.parametrize(("origin_seconds", "tolerance"), [(math.inf, 1e-5), (0.0, 0.02)])
def test_lanes_are_in_order_on_the_clock_of_the_host(
    monkeypatch: pytest.MonkeyPatch, origin_seconds: float, tolerance: float
) -> None:
    monkeypatch.setattr(streamer.backends.cuda, "ORIGIN_SECONDS", origin_seconds)
    begin = time.perf_counter()
    with streamed(gpt(), device="cuda") as model:
        train_in_place(model)
        streamer.synchronize(model)
        records = wrapped(model).executor.issuer.trace.records()
        busy = streamer.stats(model).busy_seconds
    end = time.perf_counter()
    assert {lane for lane in Lane if not busy[lane.value]} == {*SPECIAL}
    for lane in Lane:
        before = begin
        for record in sorted((r for r in records if r.op.lane is lane), key=lambda r: r.span.ready):
            span = record.span
            assert before - tolerance <= span.ready, str(record.op)
            assert span.ready <= span.start <= span.end, str(record.op)
            before = span.end
        assert before <= end + 0.02


# Errors


class Trouble(Exception):
    """What the tests raise."""


@pytest.mark.cuda_api
def test_an_error_in_a_copy_reaches_the_user_and_the_model_can_be_unwrapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken_copy(*_: Any) -> None:
        raise Trouble("in the H2D lane")

    model = streamer.wrap(copy.deepcopy(gpt()), device="cuda")
    with monkeypatch.context() as patch:
        patch.setattr(CudaBackend, "copy", broken_copy)
        with pytest.raises(Trouble, match="in the H2D lane"):
            loss_of(model, 0).backward()
    streamer.unwrap(model)
    torch.testing.assert_close(model.state_dict(), gpt().state_dict(), rtol=0, atol=0)


class Twice:
    """CUDA's runtime, asked to register every block a second time, which it refuses."""

    def __init__(self, cudart: Any) -> None:
        self._cudart = cudart
        self.cudaGetErrorString = cudart.cudaGetErrorString
        self.registered: list[int] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> Any:
        assert int(self._cudart.cudaHostRegister(address, nbytes, flags)) == 0
        self.registered.append(address)
        return self._cudart.cudaHostRegister(address, nbytes, flags)


@pytest.mark.cuda_values
def test_a_refusal_to_page_lock_is_not_blamed_on_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.ones(1, device="cuda")
    cudart = torch.cuda.cudart()
    twice = Twice(cudart)
    backend = CudaBackend(torch.device("cuda"))
    try:
        with (
            monkeypatch.context() as patch,
            pytest.warns(UserWarning, match="could not page-lock 5000 bytes"),
        ):
            patch.setattr(torch.cuda, "cudart", lambda: twice)
            block = backend.host_buffer(5000)
        assert torch.arange(4, device="cuda").sum().item() == 6
        assert not block.any()
        for address in twice.registered:
            assert int(cudart.cudaHostUnregister(address)) == 0
    finally:
        backend.close()


@pytest.mark.cuda_api
def test_copies_keep_their_order_whoever_enqueues_them() -> None:
    """Copies behind one that waits for the host are enqueued by the lane, others by the caller."""
    backend = CudaBackend(torch.device("cuda"))
    nbytes, release = 1 << 20, threading.Event()
    on_device = backend.device_buffer(nbytes)
    host = [backend.host_buffer(nbytes).fill_(value) for value in (1, 2)]
    back = [backend.host_buffer(nbytes) for _ in range(2)]
    callers: list[int] = []

    def copying(into: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        def work() -> None:
            callers.append(threading.get_ident())
            backend.copy(into, source)

        return work

    try:
        late = backend.submit(Lane.HOST, release.wait, (), 0)
        backend.submit(Lane.H2D, copying(on_device, host[0]), [late], nbytes)
        behind = backend.submit(Lane.H2D, copying(on_device, host[1]), [], nbytes)
        out = backend.submit(Lane.D2H, copying(back[0], on_device), [behind], nbytes)
        assert not callers
        release.set()
        out.wait()
        assert back[0].unique().tolist() == [2]
        assert threading.get_ident() not in callers
        callers.clear()
        again = backend.submit(Lane.H2D, copying(on_device, host[0]), [out], nbytes)
        backend.submit(Lane.D2H, copying(back[1], on_device), [again], nbytes).wait()
        assert back[1].unique().tolist() == [1]
        assert set(callers) == {threading.get_ident()}
    finally:
        release.set()
        backend.close()


CHILD = """
import sys, torch
sys.path.insert(0, {root!r})
import streamer
from models.gpt2 import GPT
model = streamer.wrap(GPT(vocab_size=64, block_size=16, n_layer=3, n_head=2, n_embd=128), device="cuda")
optimizer = streamer.AdamW(model.parameters())
model(torch.zeros(2, 16, dtype=torch.int64)).mean().backward()
optimizer.step()
"""


@pytest.mark.cuda_api
def test_a_process_may_end_while_updates_run() -> None:
    root = str(Path(__file__).parents[2])
    child = subprocess.run(
        [sys.executable, "-c", CHILD.format(root=root)], capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 0, child.stderr
    assert "Traceback" not in child.stderr


# Memory


def allocated() -> int:
    gc.collect()
    return torch.cuda.memory_allocated()


@pytest.mark.cuda_api
def test_device_bytes_do_not_grow_with_depth() -> None:
    taken = []
    for layers in (4, 16):
        before = allocated()
        with streamed(gpt(layers), device="cuda") as model:
            taken.append((allocated() - before, dict(streamer.stats(model).device_bytes)))
    assert taken[0] == taken[1]


@pytest.mark.cuda_api
@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("end", ["unwrap", "drop"])
def test_the_memory_comes_back(activations: str, end: str) -> None:
    def once() -> None:
        model = streamer.wrap(copy.deepcopy(gpt()), device="cuda", activations=activations)
        train_in_place(model)
        if end == "unwrap":
            streamer.unwrap(model)

    # the first time cuBLAS takes memory for good
    once()
    before = allocated()
    once()
    assert allocated() == before
