"""What the tests of several trainers share."""

from __future__ import annotations

import logging
from typing import Any

import lightning as L
from torch.utils.data import DataLoader

#: With the usual eps Adam makes a whole step of a gradient that is all rounding; with this one it does not.
CALM = {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.1}
#: What Lightning warns of in so small a run.
LIGHTNINGS_OWN = (
    "ignore:.*LeafSpec.*:FutureWarning",
    "ignore:.*does not have many workers",
    "ignore:.*number of training batches",
    "ignore:Checkpoint directory .* is not empty",
)


def fit(
    module: L.LightningModule, callback: L.Callback, training: Any, validation: Any, **options: Any
) -> None:
    """Two epochs on the CPU, in batches of four samples, with a validation after each."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    resumed = options.pop("ckpt_path", None)
    trainer = L.Trainer(
        accelerator="cpu",
        logger=False,
        callbacks=[callback],
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"max_epochs": 2} | options),
    )
    trainer.fit(module, DataLoader(training, 4), DataLoader(validation, 12), ckpt_path=resumed)
