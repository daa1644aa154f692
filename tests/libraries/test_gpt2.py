"""models/gpt2.py against Hugging Face's GPT-2 with the same weights, and its own promises."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from models.gpt2 import GPT

TINY = {"vocab_size": 61, "block_size": 16, "n_layer": 3, "n_head": 2, "n_embd": 12}


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def tokens(batch: int = 2, time: int = 16) -> torch.Tensor:
    return torch.randint(TINY["vocab_size"], (batch, time), generator=torch.Generator().manual_seed(1))


def shaken(model: torch.nn.Module) -> torch.nn.Module:
    """The model with every parameter moved: as initialised, biases of 0 and norms of 1 hide mistakes."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_hugging_face_weights_give_the_same_logits(tied: bool) -> None:
    config = GPT2Config(
        vocab_size=61, n_positions=16, n_layer=3, n_head=2, n_embd=12, tie_word_embeddings=tied,
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    theirs = shaken(GPT2LMHeadModel(config))
    # Hugging Face keeps the four matrices of a block as [in, out], torch.nn.Linear as [out, in].
    transposed = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    ours = GPT(**TINY, tied=tied)
    ours.load_state_dict(
        {name: w.T if name.endswith(transposed) else w for name, w in theirs.state_dict().items()}
    )

    logits = ours(tokens())
    assert logits.shape == (2, 16, 61)
    torch.testing.assert_close(logits, theirs(tokens()).logits, rtol=0, atol=1e-5)


def test_a_token_changes_no_logits_before_it() -> None:
    model = shaken(GPT(**TINY))
    before = tokens()
    after = before.clone()
    after[:, 9] = (after[:, 9] + 1) % 61
    changed = (model(before) != model(after)).any(-1).any(0)
    assert changed.tolist() == [False] * 9 + [True] * 7


def test_initialisation_is_gpt2s() -> None:
    model = GPT(vocab_size=512, block_size=128, n_layer=8, n_head=4, n_embd=128, tied=False)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif parameter.dim() == 1:
            assert parameter.eq(1).all(), name
        else:
            std = 0.02 / math.sqrt(16) if name.endswith("c_proj.weight") else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name


def test_generate_is_repeatable_and_slides_over_long_text() -> None:
    model = shaken(GPT(**TINY)).eval()

    def sample(seed: int) -> torch.Tensor:
        return model.generate(tokens(time=4), 20, generator=torch.Generator().manual_seed(seed))

    assert sample(3).shape == (2, 24)
    assert torch.equal(sample(3)[:, :4], tokens(time=4))
    assert torch.equal(sample(3), sample(3))
    assert not torch.equal(sample(3), sample(4))
    assert not sample(3).requires_grad
