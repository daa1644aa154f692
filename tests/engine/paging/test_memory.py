"""Bytes: what is planned is what is allocated, and the device does not grow with depth."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

import streamer
from models.gpt2 import GPT
from streamer.engine.paging.handle import wrapped
from streamer.memory.purposes import MOMENTS, host_bytes
from tests.reference import VOCAB, language_loss, streamed


def gpt(layers: int, width: int = 32) -> GPT:
    return GPT(vocab_size=VOCAB, block_size=16, n_layer=layers, n_head=2, n_embd=width)


def test_device_bytes_do_not_grow_with_depth() -> None:
    taken = []
    for layers in (4, 8, 16, 32, 64):
        with streamed(gpt(layers), layers="transformer.h") as model:
            taken.append(dict(streamer.stats(model).device_bytes))
    layer = gpt(1).transformer.h[0]
    layer_bytes = sum(param.nbytes for param in layer.parameters())
    assert taken == [taken[0]] * 5
    assert taken[0]["weight slots"] == taken[0]["gradient slots"] == 2 * layer_bytes


@pytest.mark.parametrize(
    ("state_dtype", "update", "bytes_per_parameter"),
    [
        # weight, remainder, both moments, gradient
        (torch.float32, "step", 2 + 2 + 8 + 2),
        (torch.bfloat16, "step", 2 + 2 + 4 + 2),
        ("int8", "step", 2 + 2 + 2 + 2),
        ("int8", "backward", 2 + 2 + 2),
    ],
    ids=str,
)
def test_bytes_of_bf16_by_moments_and_update(
    state_dtype: torch.dtype | str, update: str, bytes_per_parameter: int
) -> None:
    options = {"layers": "transformer.h", "dtype": torch.bfloat16, "update": update}
    with streamed(gpt(12, width=64), **options) as model:
        streamer.AdamW(model.parameters(), state_dtype=state_dtype)
        held = dict(streamer.stats(model).host_bytes)
        # the ring of update="backward", and the gradient of what is in no layer
        fixed = held.pop("gradient staging", 0) + (held.pop("gradients") if update == "backward" else 0)
        scales = sum(nbytes for name, nbytes in held.items() if name.endswith("scale"))
        parameters = sum(param.numel() for param in model.parameters())
        assert sum(held.values()) - scales == bytes_per_parameter * parameters
        # two scales of 4 bytes for every 256 elements begun, each unit's rounded up to 64 bytes
        units = len(model.transformer.h) + 1
        assert state_dtype != "int8" or 8 * blocks(model) <= scales < 8 * blocks(model) + 2 * 64 * units
        planned = wrapped(model).planned.host
        ring = planned.get("gradient staging", 0) + planned["gradients"]
        assert fixed == (ring if update == "backward" else 0)


def blocks(model: torch.nn.Module) -> int:
    return sum(-(-param.numel() // 256) for param in model.parameters())


@pytest.mark.parametrize("num_slots", [1, 2, 3])
@pytest.mark.parametrize(
    ("dtype", "bytes_per_parameter"),
    [
        # weight, both moments; then the gradient
        (torch.float32, 4 + 8 + 4),
        # weight, remainder, both moments; then the gradient
        (torch.bfloat16, 2 + 2 + 8 + 2),
        # weight, fp32 master, both moments; then the gradient
        (torch.float16, 2 + 4 + 8 + 2),
    ],
    ids=str,
)
def test_planned_bytes_are_allocated_bytes(
    dtype: torch.dtype, bytes_per_parameter: int, num_slots: int
) -> None:
    with streamed(gpt(6), layers="transformer.h", dtype=dtype, num_slots=num_slots) as model:
        streamer.AdamW(model.parameters())
        planned, stats = wrapped(model).planned, streamer.stats(model)
        layouts = [shard.layout for shard in wrapped(model).executor.store.shards]
        assert stats.host_bytes == {**planned.host, **host_bytes(layouts, MOMENTS[torch.float32])}
        assert stats.device_bytes == planned.device
        # every size in this model is a multiple of the alignment, so there is no padding
        parameters = sum(param.numel() for param in model.parameters())
        assert sum(stats.host_bytes.values()) == bytes_per_parameter * parameters


def test_frozen_parameters_take_nothing_but_their_weight() -> None:
    model = gpt(6).requires_grad_(False)
    model.transformer.h[2].mlp.c_fc.weight.requires_grad_(True)
    trained = model.transformer.h[2].mlp.c_fc.weight.numel()
    with streamed(model, layers="transformer.h", dtype=torch.bfloat16) as wrapped_model:
        optimizer = streamer.AdamW(wrapped_model.parameters())
        before = {name: value.clone() for name, value in wrapped_model.state_dict().items()}
        language_loss(wrapped_model, 0).backward()
        optimizer.step()
        stats = streamer.stats(wrapped_model)
        after = wrapped_model.state_dict()
    parameters = sum(param.numel() for param in model.parameters())
    assert sum(stats.host_bytes.values()) == 2 * parameters + 12 * trained
    assert [name for name in before if not torch.equal(before[name], after[name])] == [
        "transformer.h.2.mlp.c_fc.weight"
    ]


def test_saved_inputs_are_counted_and_released() -> None:
    with streamed(gpt(6), layers="transformer.h") as model:
        owned = sum(streamer.stats(model).device_bytes.values())
        assert streamer.stats(model).device_bytes_now == owned
        loss = language_loss(model, 0)
        # each of six layers keeps its input: [4, 16, 32] in fp32
        assert streamer.stats(model).device_bytes_now == owned + 6 * 4 * 16 * 32 * 4
        loss.backward()
        assert streamer.stats(model).device_bytes_now == owned
        assert streamer.stats(model).device_bytes_peak == owned + 6 * 4 * 16 * 32 * 4
        loss = language_loss(model, 0)
        del loss
        gc.collect()
        assert streamer.stats(model).device_bytes_now == owned


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_a_graph_that_is_dropped_leaves_nothing(activations: str) -> None:
    with streamed(gpt(3), layers="transformer.h", activations=activations) as model:
        owned = sum(streamer.stats(model).device_bytes.values())
        gc.collect()
        gc.disable()
        try:
            loss = language_loss(model, 0)
            assert streamer.stats(model).device_bytes_now > owned
            del loss
            assert streamer.stats(model).device_bytes_now == owned, "only a reference cycle could hold it"
        finally:
            gc.enable()


def test_a_model_that_is_dropped_ends_its_threads() -> None:
    model = streamer.wrap(gpt(2), layers="transformer.h", device="cpu")
    gone = weakref.ref(model)
    language_loss(model, 0).backward()
    del model
    gc.collect()
    assert gone() is None
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("streamer-")]
