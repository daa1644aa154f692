"""Bytes: what is planned is what is allocated, and the device does not grow with depth."""

from __future__ import annotations

import gc

import pytest
import torch

import streamer
from streamer.engine.handle import wrapped
from tests.reference import language_loss, one_step, streamed, tiny_gpt


@pytest.mark.parametrize("update", ["step", "backward"])
def test_bytes_that_do_not_grow_with_depth(update: str) -> None:
    """All on the device; with updates in backward the host's gradients too."""
    taken = []
    for layers in (4, 16):
        with streamed(tiny_gpt(layers), update=update) as model:
            stats = streamer.stats(model)
            taken.append(dict(stats.device_bytes))
            if update == "backward":
                taken[-1] |= {name: stats.host_bytes[name] for name in ("gradient staging", "gradients")}
    layer_bytes = sum(param.nbytes for param in tiny_gpt(1).transformer.h[0].parameters())
    assert taken == [taken[0]] * 2
    assert taken[0]["weight slots"] == taken[0]["gradient slots"] == 2 * layer_bytes
    assert update == "step" or taken[0]["gradient staging"] == 4 * layer_bytes


@pytest.mark.parametrize(
    ("dtype", "state_dtype", "update", "bytes_per_parameter"),
    [
        # weight, both moments, gradient
        (torch.float32, torch.float32, "step", 4 + 8 + 4),
        # weight, fp32 master, both moments, gradient
        (torch.float16, torch.float32, "step", 2 + 4 + 8 + 2),
        # weight, remainder, both moments, gradient
        (torch.bfloat16, torch.float32, "step", 2 + 2 + 8 + 2),
        (torch.bfloat16, torch.bfloat16, "step", 2 + 2 + 4 + 2),
        (torch.bfloat16, "int8", "step", 2 + 2 + 2 + 2),
        (torch.bfloat16, "int8", "backward", 2 + 2 + 2),
    ],
    ids=str,
)
def test_host_bytes_by_dtype_moments_and_update(
    dtype: torch.dtype, state_dtype: torch.dtype | str, update: str, bytes_per_parameter: int
) -> None:
    """Every size in this model is a multiple of the alignment, so there is no padding."""
    with streamed(tiny_gpt(5, width=64), dtype=dtype, update=update) as model:
        streamer.AdamW(model.parameters(), state_dtype=state_dtype)
        held = dict(streamer.stats(model).host_bytes)
        planned = wrapped(model).planned.host
        if update == "backward":
            # the ring of gradients, and those of what is in no layer
            for purpose in ("gradient staging", "gradients"):
                assert held.pop(purpose) == planned[purpose]
        scales = sum(nbytes for name, nbytes in held.items() if name.endswith("scale"))
        assert sum(held.values()) - scales == bytes_per_parameter * num_parameters(model)
        # two scales of 4 bytes for every 256 elements begun, each unit's rounded up to 64 bytes
        blocks = sum(-(-param.numel() // 256) for param in model.parameters())
        least = 8 * blocks if state_dtype == "int8" else 0
        assert least <= scales <= least + (2 * 64 * 6 if least else 0)


def num_parameters(model: torch.nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def test_frozen_parameters_take_nothing_but_their_weight() -> None:
    plain, name = tiny_gpt(6).requires_grad_(False), "transformer.h.2.mlp.c_fc.weight"
    trained = plain.get_parameter(name).requires_grad_(True).numel()
    with streamed(plain, dtype=torch.bfloat16) as model:
        optimizer = streamer.AdamW(model.parameters())
        before = {key: value.clone() for key, value in model.state_dict().items()}
        one_step(model, optimizer, 0)
        assert sum(streamer.stats(model).host_bytes.values()) == 2 * num_parameters(model) + 12 * trained
        assert [key for key, value in model.state_dict().items() if not torch.equal(before[key], value)] == [
            name
        ]


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_what_layers_save_is_counted_and_released(activations: str) -> None:
    with streamed(tiny_gpt(6), activations=activations) as model:
        owned = sum(streamer.stats(model).device_bytes.values())
        gc.collect()
        gc.disable()  # a reference cycle would hold what it saved
        try:
            for end in (torch.Tensor.backward, torch.Tensor.item):
                loss = language_loss(model, 0)
                saved = streamer.stats(model).device_bytes_now - owned
                assert saved > 0
                if activations == "recompute":
                    # each of six layers keeps its input: [4, 16, 32] in fp32
                    assert saved == 6 * 4 * 16 * 32 * 4
                    assert streamer.stats(model).device_bytes_peak == owned + saved
                end(loss)
                del loss
                assert streamer.stats(model).device_bytes_now == owned
        finally:
            gc.enable()
