"""Optimizers that trainers make over the parameters of a wrapped model: transformers, Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers (pip install '.[hf]')")
pytest.importorskip("lightning", reason="lightning is not installed")

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import Trainer

import streamer
from streamer.integrations.transformers import Trainer as StreamedTrainer
from tests.libraries.common import LIGHTNINGS_OWN, fit
from tests.libraries.test_lightning import DATA as TOKENS
from tests.libraries.test_lightning import Automatic, Net
from tests.libraries.test_trainer import DATA, assert_alike, llama, trainer, wrapped
from tests.optim.masters import master
from tests.reference import assert_equal, streamed

pytestmark = [pytest.mark.filterwarnings(warning) for warning in LIGHTNINGS_OWN]


def trained(model: Any, folder: Path, name: str, kind: Any = Trainer) -> Trainer:
    """By the optimizer that the trainer makes."""
    args = trainer(model, folder, optim=name, learning_rate=1e-3, weight_decay=0.1, max_grad_norm=0.2).args
    run: Trainer = kind(model, args, train_dataset=DATA)
    run.train()
    return run


@pytest.mark.parametrize("name", ["adamw_torch", "sgd", "rmsprop", "adagrad", "adafactor"])
def test_optimizers_that_transformers_makes(name: str, tmp_path: Path) -> None:
    expected = trained(llama(), tmp_path / "plain", name)
    with wrapped(llama()) as model:
        assert_alike(trained(model, tmp_path / "run", name), expected)


def test_bf16_weights_have_masters_whatever_trainer_trains_them(tmp_path: Path) -> None:
    """Of a run at a small learning rate, that no bf16 weight shows."""
    with wrapped(llama().bfloat16()) as model:
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        args = trainer(model, tmp_path, optim="adamw_torch", learning_rate=1e-7, weight_decay=0.0).args
        Trainer(model, args, train_dataset=DATA).train()
        for name, param in model.named_parameters():
            moved = (master(param) - before[name].float()).abs().max().item()
            assert 1e-9 < moved < 1e-5, name


def test_lion_of_transformers_is_ours(tmp_path: Path) -> None:
    with wrapped(llama()) as model:
        run = trained(model, tmp_path, "lion_32bit", StreamedTrainer)
        assert isinstance(run.optimizer.optimizer, streamer.Lion)  # accelerate has put one around it


class WithMuon(Automatic):
    def configure_optimizers(self) -> Any:
        matrices = [param for param in self.net.layers.parameters() if param.dim() == 2]
        return torch.optim.Muon(matrices, lr=1e-2)


def test_an_optimizer_that_lightning_configures(tmp_path: Path) -> None:
    def weights(module: Any, folder: Path) -> Any:
        fit(module, ModelCheckpoint(folder), TOKENS, TOKENS, gradient_clip_val=0.2)
        return {name: value.clone() for name, value in module.state_dict().items()}

    expected = weights(WithMuon(Net(), None), tmp_path / "plain")
    with streamed(Net()) as net:
        assert_equal(weights(WithMuon(net, None), tmp_path / "streamed"), expected, atol=1e-5)
