"""Lightning with a wrapped module inside of a LightningModule, and with a LightningModule that is wrapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="lightning is not installed")

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

import streamer
from tests.libraries.common import CALM, LIGHTNINGS_OWN, fit
from tests.reference import VOCAB, History, assert_equal, assert_parity, batch, flat, streamed

pytestmark = [pytest.mark.filterwarnings(warning) for warning in LIGHTNINGS_OWN]
DATA = list(batch(0, size=12))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16)) for _ in range(2)
        )
        self.head = nn.Linear(16, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Automatic(L.LightningModule):
    def __init__(self, net: nn.Module, kind: Any) -> None:
        super().__init__()
        self.net = net
        self.kind = kind
        self.losses: list[float] = []

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.net(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())

    def on_train_batch_start(self, *_: Any) -> None:
        torch.manual_seed(self.trainer.global_step)

    def training_step(self, tokens: torch.Tensor, _: int) -> torch.Tensor:
        loss = self.loss(tokens)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, tokens: torch.Tensor, _: int) -> None:
        self.losses.append(self.loss(tokens).item())

    def configure_optimizers(self) -> Any:
        optimizer = self.kind(self.net.parameters(), **CALM)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ClipsItself(Automatic):
    """As Lightning's mixed precision wants it of optimizers that work with a GradScaler by themselves."""

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: float, **_: Any) -> None:
        if self.kind is streamer.AdamW:
            streamer.clip_grad_norm_(self.net, gradient_clip_val)
        else:
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), gradient_clip_val)


class Manual(Automatic):
    def __init__(self, net: nn.Module, kind: Any) -> None:
        super().__init__(net, kind)
        self.automatic_optimization = False

    def training_step(self, tokens: torch.Tensor, _: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(tokens, _)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.2)
        optimizer.step()
        self.lr_schedulers().step()


def fitted(module: Any, folder: Path, **options: Any) -> History:
    fit(module, ModelCheckpoint(folder, every_n_epochs=1, save_top_k=-1), DATA, DATA, **options)
    return History(module.losses, weights=flat(module.state_dict()))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Automatic, {"gradient_clip_val": 0.2}),
        (Automatic, {"accumulate_grad_batches": 2}),
        # one step: afterwards weights that differ in their last bit are rounded to other bf16 numbers
        (ClipsItself, {"gradient_clip_val": 0.2, "precision": "bf16-mixed", "max_steps": 1}),
        (Manual, {}),
    ],
)
def test_a_wrapped_module_inside(kind: Any, options: dict[str, Any], tmp_path: Path) -> None:
    expected = fitted(kind(Net(), torch.optim.AdamW), tmp_path / "plain", **options)
    with streamed(Net()) as net:
        assert_parity(fitted(kind(net, streamer.AdamW), tmp_path / "streamed", **options), expected)


def test_a_wrapped_lightning_module(tmp_path: Path) -> None:
    expected = fitted(Automatic(Net(), torch.optim.AdamW), tmp_path / "plain", gradient_clip_val=0.2)
    with streamed(Automatic(Net(), streamer.AdamW), layers="net.layers") as module:
        assert_parity(fitted(module, tmp_path / "streamed", gradient_clip_val=0.2), expected)


def test_a_checkpoint_of_lightning(tmp_path: Path) -> None:
    with streamed(Net()) as net:
        whole = fitted(Automatic(net, streamer.AdamW), tmp_path)
    first = tmp_path / "epoch=0-step=3.ckpt"
    with streamed(Net()) as net:
        resumed = fitted(Automatic(net, streamer.AdamW), tmp_path, ckpt_path=first)
    assert resumed.losses[-4:] == whole.losses[-4:]
    assert_equal(resumed.weights, whole.weights)
    # with no classes of ours in it
    held = torch.load(first, weights_only=True)
    assert len(held["optimizer_states"][0]["state"]) == len(whole.weights)
    assert [f"/{name}" for name in held["state_dict"]] == list(whole.weights)
