"""On a GPU: models that were never whole, memory that is limited, taken once, and given back."""

from __future__ import annotations

import gc
import warnings
from contextlib import AbstractContextManager

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import streamer
from models.gpt2 import GPT
from streamer.backends.base import PIECE_BYTES
from streamer.backends.cuda import CudaBackend, PinnedBlocks
from streamer.backends.host_memory import give_back_freed
from streamer.engine.handle import wrapped
from streamer.planner.machine import H200, gpu_properties
from streamer.planner.step import workspace_bytes
from streamer.torch_private import allocator_settings, set_allocator
from tests.backends.test_cuda import allocated, loss_of
from tests.reference import VOCAB, batch, gradients, unwrapping

LAYERS = {"layers": "transformer.h", "device": "cuda"}
MIB = 1 << 20


def shape(layers: int = 4, width: int = 128) -> GPT:
    with torch.device("meta"):
        return GPT(vocab_size=VOCAB, block_size=16, n_layer=layers, n_head=2, n_embd=width)


def built(layers: int = 4, width: int = 128, **options: object) -> AbstractContextManager[GPT]:
    model = shape(layers, width)
    return unwrapping(streamer.wrap(model, init=model.init_weights, **(LAYERS | options)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> torch.Tensor:
    loss = loss_of(model, number)
    loss.backward()
    streamer.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


# Values from the meta device


@pytest.mark.cuda_values
def test_values_are_made_on_the_gpu_from_seeds_of_their_own() -> None:
    values, drawn, devices = [], [], set()
    for _ in range(2):
        torch.manual_seed(5)
        model = shape()

        def init(module: nn.Module, model: GPT = model) -> None:
            devices.update(param.device.type for param in module.parameters(recurse=False))
            devices.add(torch.empty(0).device.type)
            model.init_weights(module)

        streamer.unwrap(streamer.wrap(model, init=init, **LAYERS))
        values.append(model.state_dict())
        drawn.append((torch.rand(3), torch.rand(3, device="cuda").cpu()))
    assert devices == {"cuda"}
    assert all(torch.equal(values[1][name], value) for name, value in values[0].items())
    assert {value.device.type for value in values[0].values()} == {"cpu"}
    assert torch.equal(drawn[0][0], drawn[1][0])
    # the GPU's generator goes on as if nothing had been drawn
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3, device="cuda").cpu(), drawn[0][1])
    weights = values[0]["transformer.h.1.attn.c_attn.weight"]
    assert weights.std().item() == pytest.approx(0.02, rel=0.02)


@pytest.mark.cuda_api
def test_beside_the_buffers_the_gpu_never_holds_more_than_one_unit() -> None:
    with built():  # what CUDA takes for good
        pass
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with built(layers=12, width=512) as model:
        peak = torch.cuda.max_memory_allocated() - before
        owned = sum(streamer.stats(model).device_bytes.values())
        layer = sum(param.numel() * 4 for param in model.transformer.h[0].parameters())
    assert peak <= max(owned, layer) + 2 * MIB


# Limits


@pytest.mark.cuda_api
def test_a_limit_holds_until_unwrap() -> None:
    fraction = torch.cuda.get_per_process_memory_fraction()
    with built(device_memory="256MiB") as model:
        total = torch.cuda.get_device_properties(0).total_memory
        assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(256 * MIB / total)
        step(model, streamer.AdamW(model.parameters()), 0)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.get_per_process_memory_fraction() == fraction
    del model
    torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")


@pytest.mark.cuda_api
def test_what_is_beyond_the_limit_is_refused_before_anything_is_allocated() -> None:
    gc.collect()  # what tests before have left is not to go in between
    before = torch.cuda.memory_allocated()
    model = shape(width=1024)
    with pytest.raises(MemoryError, match="not enough memory for the model: the device needs"):
        streamer.wrap(model, init=model.init_weights, device_memory="16MiB", **LAYERS)
    assert torch.cuda.memory_allocated() == before
    assert all(param.is_meta for param in model.parameters())


@pytest.mark.cuda_api
def test_what_the_limit_leaves_holds_more_layers() -> None:
    gc.collect()
    # those of tests before lie in the middle of what the allocator would otherwise give back
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    # from compute capability 9.0 on PyTorch takes 64 MiB of it for cuBLAS
    with built(layers=12, width=512, device_memory="256MiB") as model:
        optimizer = streamer.AdamW(model.parameters())
        layer = sum(param.nbytes for param in model.transformer.h[0].parameters())
        slots = []
        for number in range(4):
            slots.append(streamer.stats(model).device_bytes["weight slots"] // layer)
            step(model, optimizer, number)
        assert slots[0] == 2 < slots[1]
        # what is left of a piece of the allocator may hold one more
        assert slots[1] <= slots[2] == slots[3]
        assert torch.cuda.max_memory_reserved() <= 256 * MIB


@pytest.mark.cuda_api
def test_what_the_process_has_allocated_already_counts_towards_the_limit() -> None:
    tokens = batch(0).cuda()
    # room enough for a step, were it not for the other tensor
    limits = {"device_memory": "512MiB", "example": tokens[:, :-1]}
    with built(**limits):
        pass
    other = torch.empty(500 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(MemoryError, match="device needs .* device_memory=.* would do"), built(**limits):
        pass
    assert other.numel()


def choose_allocator(settings: str) -> None:
    """Let the process have chosen just these ``settings`` of PyTorch's allocator."""
    for text in ("expandable_segments:False", settings):
        set_allocator(text)


@pytest.mark.cuda_api
@pytest.mark.parametrize(
    ("budget", "is_expandable"),
    # without expandable segments gaps are larger than what plans leave for them
    [(budget, True) for budget in (192, 248, 304, 352, 480)] + [(budget, False) for budget in (320, 416)],
)
def test_a_budget_is_refused_at_once_or_has_room_for_every_step(
    budget: int, is_expandable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_expandable:
        monkeypatch.setattr(CudaBackend, "_expand_segments", lambda backend: None)
    choose_allocator("")
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with torch.device("meta"):
        model = GPT(vocab_size=VOCAB, block_size=256, n_layer=12, n_head=8, n_embd=512)
    tokens = torch.zeros(8, 256, dtype=torch.long, device="cuda")
    slots = []
    limits = {"device_memory": budget * MIB, "example": tokens}
    # from compute capability 9.0 on cuBLAS takes more
    workspaces = workspace_bytes(gpu_properties(H200, torch.device("cuda"))) // MIB
    if budget < 228 + workspaces:
        with pytest.raises(MemoryError, match="not enough memory for a step with 'recompute'"):
            streamer.wrap(model, init=model.init_weights, **limits, **LAYERS)
        return
    streamer.wrap(model, init=model.init_weights, **limits, **LAYERS)
    try:
        optimizer = streamer.AdamW(model.parameters())
        for _ in range(4):
            F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            slots.append(len(wrapped(model).executor.pager.training.slots.buffers))
    finally:
        streamer.unwrap(model)
    assert slots == sorted(slots)
    # the allocator looks at its limit before it rounds up to whole pieces
    assert torch.cuda.max_memory_reserved() < budget * MIB + PIECE_BYTES
    assert budget < 400 or slots[-1] > 2


@pytest.mark.cuda_api
def test_the_allocator_s_settings_are_the_user_s_where_there_are_any() -> None:
    def are_expandable() -> bool:
        return bool(allocator_settings()["expandable_segments"])

    found = []
    try:
        for chosen in ("", "max_split_size_mb:256"):
            choose_allocator(chosen)
            with built(device_memory="256MiB"):
                found.append(are_expandable())
    finally:
        choose_allocator("")
    assert found == [True, False]


# Steady state


@pytest.mark.cuda_api
@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_after_the_second_step_nothing_is_allocated_or_left_behind(
    activations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[int] = []
    pin = PinnedBlocks.pin
    monkeypatch.setattr(PinnedBlocks, "pin", lambda self, block: registered.append(pin(self, block)) or None)
    with built(activations=activations) as model:
        optimizer = streamer.AdamW(model.parameters())
        taken = []
        for number in range(6):
            step(model, optimizer, number)
            streamer.synchronize(model)
            device, host = torch.cuda.memory_stats(), torch.cuda.host_memory_stats()
            counts = device["num_device_alloc"], host["num_host_alloc"], len(registered)
            taken.append((*counts, allocated()))
    assert registered
    assert taken[2:] == [taken[1]] * 4


@pytest.mark.cuda_api
@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_a_step_reads_the_gpu_once_for_clipping(activations: str) -> None:
    with built(activations=activations) as model:
        optimizer = streamer.AdamW(model.parameters())
        for number in range(2):
            step(model, optimizer, number)
        torch.cuda.synchronize()
        tokens = batch(2).cuda()
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                # says once that it is a prototype
                torch.cuda.set_sync_debug_mode("warn")
                caught.clear()
                logits = model(tokens[:, :-1])
                F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
                streamer.clip_grad_norm_(model, 1.0)
                optimizer.step()
                optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    said = [str(warning.message) for warning in caught if "synchroniz" in str(warning.message)]
    assert len(said) == 1, said


# The end


@pytest.mark.cuda_api
def test_host_memory_comes_back_at_unwrap() -> None:
    def resident() -> int:
        gc.collect()
        give_back_freed()
        return psutil.Process().memory_info().rss

    def once() -> int:
        with built(layers=16, width=1024) as model:
            streamer.AdamW(model.parameters())
            return sum(streamer.stats(model).host_bytes.values())

    for _ in range(2):  # what CUDA, the threads and the heap take for good
        once()
    before = resident()
    counted = once()
    # weights, gradients and moments in fp32
    assert counted == 4 * 4 * sum(param.numel() for param in shape(16, 1024).parameters())
    assert resident() - before <= 0.02 * counted


# Compiled layers


# of the compiler's modules when they are imported, and that fp32 products might be faster in TF32
COMPILING = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:TensorFloat32")


@pytest.mark.cuda_api
@COMPILING
def test_compiled_layers_take_no_more_memory_at_each_step() -> None:
    with built(compile=True) as model:
        optimizer = streamer.AdamW(model.parameters())
        taken = []
        for number in range(4):
            torch.cuda.reset_peak_memory_stats()
            step(model, optimizer, number)
            streamer.synchronize(model)
            taken.append((allocated(), torch.cuda.max_memory_allocated()))
    assert taken[2:] == [taken[1]] * 2


@pytest.mark.cuda_values
@COMPILING
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_layers_give_the_same_gradients(dtype: torch.dtype) -> None:
    found = []
    for compile in (False, True):
        torch.manual_seed(0)
        with built(compile=compile, dtype=dtype) as model:
            loss_of(model, 0).backward()
            found.append({name: gradient.float() for name, gradient in gradients(model).items()})
    # fused code rounds to bf16 at fewer places, of 2**-9 each
    error = {torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    for name, expected in found[0].items():
        difference = (found[1][name] - expected).norm()
        assert difference <= error * expected.norm(), name
