"""Models of transformers in which some layers attend to the keys and values of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.libraries.test_huggingface import loss
from tests.reference import VOCAB, assert_parity, train_plain, train_streamed

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:::transformers")

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 64,
}
KINDS: dict[str, dict[str, Any]] = {
    "Gemma3n": {"laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4},
    "Gemma4": {"global_head_dim": 8},
}


def gemma(kind: str, sharing: int) -> nn.Module:
    """A model whose last layers, ``sharing`` of them, have no keys of their own."""
    if not hasattr(transformers, f"{kind}ForCausalLM"):
        pytest.skip(f"this transformers has no {kind}")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}TextConfig")(**SIZES, **KINDS[kind], num_kv_shared_layers=sharing)
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model.train()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sharing", [0, 2])
def test_layers_share_keys_through_a_mapping(kind: str, sharing: int) -> None:
    """Some leave their keys for others also where none uses them. [Note: containers]"""
    model = gemma(kind, sharing)
    expected = train_plain(model, loss_of=loss, steps=2)
    for activations in ("recompute", "keep") if sharing else ("recompute",):
        assert_parity(train_streamed(model, loss_of=loss, steps=2, activations=activations), expected)
