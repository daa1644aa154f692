"""What transformers records inside of layers (router logits, weights of attention) is trained on as without
streaming."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.reference import gradients, hugging_face, in_turn, streamed

pytest.importorskip("transformers", reason="transformers is not installed")

EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}
KINDS: dict[str, Callable[[], nn.Module]] = {
    "mixtral": partial(hugging_face, "mixtral", **EXPERTS, num_local_experts=4),
    "qwen3 moe": partial(
        hugging_face, "qwen3_moe", **EXPERTS,
        num_experts=4, moe_intermediate_size=24, head_dim=8, decoder_sparse_step=2,
    ),
    "attention": partial(hugging_face, attn_implementation="eager", output_attentions=True),
}  # fmt: skip


@cache
def model(kind: str) -> nn.Module:
    return KINDS[kind]()


def run(of: nn.Module, tokens_each: int = 10) -> Any:
    """What the model returns for samples of which one has no first tokens, with all that it records."""
    generator = torch.Generator().manual_seed(tokens_each)
    tokens = torch.randint(64, (4, tokens_each), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    return of(input_ids=tokens, attention_mask=mask, labels=tokens, output_hidden_states=True)


def recorded(result: Any) -> list[torch.Tensor]:
    found = [
        result[name] or () for name in ("router_logits", "attentions", "hidden_states") if name in result
    ]
    return [tensor for several in found for tensor in several]


def trained_on(result: Any) -> torch.Tensor:
    """The loss, of which experts' is a part, and what a student would learn of a teacher's attention."""
    loss: torch.Tensor = result.loss
    return loss + sum(weights.square().mean() for weights in result.get("attentions") or ())


@pytest.mark.parametrize(
    ("kind", "activations", "micro_batch_size"),
    in_turn(2 * [*KINDS], ["recompute", "keep", "recompute+offload", "keep"], [None, 2, None, 1, 1]),
)
def test_it_is_trained_on(kind: str, activations: str, micro_batch_size: int | None) -> None:
    tolerance = 0.0 if micro_batch_size is None else 1e-5
    plain = copy.deepcopy(model(kind))
    options = {"activations": activations, "micro_batch_size": micro_batch_size}
    with streamed(model(kind), layers="model.layers", **options) as actual:
        # the second batch is longer, the rows of a sample are more
        for tokens_each in (10, 12):
            expected, found = run(plain, tokens_each), run(actual, tokens_each)
            assert [*found.keys()] == [*expected.keys()]
            for mine, theirs in zip(recorded(found), recorded(expected), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
            for each in (expected, found):
                trained_on(each).backward()
        largest = max(float(gradient.abs().max()) for gradient in gradients(plain).values())
        mine, theirs = gradients(actual), gradients(plain)
        assert mine.keys() == theirs.keys()
        for name, gradient in theirs.items():
            torch.testing.assert_close(mine[name], gradient, rtol=0, atol=tolerance * largest)


@pytest.mark.parametrize(("kind", "micro_batch_size"), in_turn(KINDS, [2, None]))
def test_it_is_shown_in_evaluation(kind: str, micro_batch_size: int | None) -> None:
    tolerance = 0.0 if micro_batch_size is None else 1e-5
    with (
        torch.no_grad(),
        streamed(model(kind), layers="model.layers", micro_batch_size=micro_batch_size) as actual,
    ):
        expected, found = run(copy.deepcopy(model(kind)).eval()), run(actual.eval())
    assert len(recorded(expected)) > 3
    for mine, theirs in zip(recorded(found), recorded(expected), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.loss, expected.loss, rtol=tolerance, atol=0)


@pytest.mark.parametrize("kind", ["mixtral"])
def test_layers_that_are_compiled_record_too(kind: str) -> None:
    plain = copy.deepcopy(model(kind))
    with streamed(model(kind), layers="model.layers", compile=True) as actual:
        for each in (plain, actual):
            run(each).loss.backward()
        mine, theirs = gradients(actual), gradients(plain)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], gradient) for name, gradient in theirs.items())
