"""Unmodified architectures of the transformers library, one or two for each thing that layers do; these and
others are in the table that ``python -m bench.architectures`` makes."""

from __future__ import annotations

import pytest

from bench import architectures
from bench.architectures import ALL, POLICIES, compare, plain_run

CHOSEN = [
    "gpt2",
    "llama",
    "gemma3",
    "mixtral",
    "gpt_oss",
    "mamba2",
    "jamba",
    "bert",
    "deberta_v2",
    "albert",
    "t5",
    "whisper",
    "swin",
    "resnet",
    "clip",
    "llava",
]


@pytest.mark.filterwarnings("ignore")  # the library's own, on tiny configs
@pytest.mark.parametrize("name", CHOSEN)
def test_parity_with_plain_pytorch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architectures, "STEPS", 2)
    architecture = ALL[name]
    plain = plain_run(architecture)
    for activations in POLICIES:
        parity = compare(architecture, activations, plain)
        assert parity.first_loss_equal and parity.keys_equal
        # to the bit, unless sums are added up in another order
        assert parity.gradients <= (5e-7 if architecture.order else 0)
        assert max(parity.losses, parity.norms, parity.weights) < 1e-5
