"""What the loss of a large vocabulary takes in a step of a trainer."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("trl", reason="needs trl (pip install '.[hf]')")

import datasets
import transformers
import trl

import streamer
from streamer.integrations.transformers import Streamed, Trainer
from streamer.integrations.trl import SFTTrainer
from tests import tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own
VOCABULARY, TOKENS, ROWS = 128_000, 64, 4
LOGITS = VOCABULARY * TOKENS * ROWS * 4  # bytes in fp32


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that operators have returned and somebody still holds."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                storage = leaf.untyped_storage()
                if (key := storage._cdata) not in self._known:
                    self._known.add(key)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._freed, key, storage.nbytes())
        self.most = max(self.most, self.now)
        return found

    def _freed(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


def test_storages_are_counted_while_they_are_held() -> None:
    with Live() as live:
        tensor = torch.zeros(1000)
        part = tensor[:10]  # of the same storage
        assert live.now == 4000
        del tensor
        gc.collect()
        assert live.now == 4000
        del part
        assert (live.now, live.most) == (0, 4000)
        leaf = torch.ones(1000, requires_grad=True)
        (leaf * leaf).exp().sum().backward()
    assert live.most >= 4 * 4000  # the leaf, the product, the exponential and its gradient


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("llama")
    tiny_llama.write(path, vocab_size=VOCABULARY, tie_word_embeddings=True)
    return path


def peak(kind: Any, folder: Path, out: Path) -> tuple[int, float]:
    """The most bytes that a step of a trainer holds, and its loss."""
    usual = {
        "max_steps": 1, "per_device_train_batch_size": ROWS, "report_to": "none", "use_cpu": True,
        "disable_tqdm": True, "bf16": False, "gradient_checkpointing": False, "save_strategy": "no",
    }  # fmt: skip
    rows = [[(number * 7919 + row) % VOCABULARY for number in range(TOKENS)] for row in range(ROWS)]
    data = datasets.Dataset.from_list([{"input_ids": row, "labels": row} for row in rows])
    model = streamer.from_pretrained(folder, device="cpu")
    try:
        options: dict[str, Any] = {"train_dataset": data}
        if issubclass(kind, trl.SFTTrainer):
            args: Any = trl.SFTConfig(str(out), max_length=TOKENS, **usual)
            options["processing_class"] = transformers.AutoTokenizer.from_pretrained(folder)
        else:
            args = transformers.TrainingArguments(str(out), **usual)
        if not issubclass(kind, Streamed):
            options["optimizers"] = (streamer.AdamW(model.parameters(), lr=1e-5), None)
        trainer = kind(model, args, **options)
        with Live() as live:
            loss = trainer.train().training_loss
        return live.most, loss
    finally:
        streamer.unwrap(model)


def test_the_loss_in_chunks_takes_less_than_half(folder: Path, tmp_path: Path) -> None:
    usual, expected = peak(transformers.Trainer, folder, tmp_path)
    assert usual > 3 * LOGITS
    of_trl, loss = peak(trl.SFTTrainer, folder, tmp_path)
    assert loss == pytest.approx(expected, rel=1e-5)
    for kind in (Trainer, SFTTrainer):
        mine, loss = peak(kind, folder, tmp_path)
        assert loss == pytest.approx(expected, rel=1e-5)
        assert mine < usual / 2 and mine < 0.7 * of_trl, (mine / LOGITS, usual / LOGITS, of_trl / LOGITS)
