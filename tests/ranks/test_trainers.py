"""Other people's trainers, with two processes as torchrun starts them: what they train is what they train in
one process with batches twice as large.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import streamer
from tests.ranks.common import listening, run_ranks
from tests.ranks.programs import Arrays, arrays

REQUIRED = ("transformers", "accelerate", "lightning")
STEPS, BATCH, TIME, WORDS = 2, 4, 8, 32


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        made = torch.randint(WORDS, (TIME,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": made, "labels": made}


def wrapped(size: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=TIME, **shape))
    group = {"process_group": dist.group.WORLD} if size > 1 else {}
    return streamer.wrap(model, layers="model.layers", device="cpu", host_threads=1, **group)


def by_accelerate(folder: str, size: int) -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = wrapped(size)
    optimizer = streamer.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(Tokens(), batch_size=BATCH // size, shuffle=False)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.unwrap_model(model)  # type: ignore[no-any-return]


def by_trainer(folder: str, size: int) -> nn.Module:
    from transformers import Trainer, TrainingArguments

    given = TrainingArguments(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH // size,
        max_grad_norm=0.5,
        lr_scheduler_type="constant",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    model = wrapped(size)
    optimizer = streamer.AdamW(model.parameters(), lr=1e-2)
    trainer = Trainer(model, given, train_dataset=Tokens(), optimizers=(optimizer, None))  # type: ignore[arg-type]
    trainer.train()
    trainer.save_model()
    assert (Path(folder) / "model.safetensors").exists() or dist.get_rank()
    return model  # type: ignore[no-any-return]


def by_lightning(folder: str, size: int) -> nn.Module:
    import lightning as L
    from lightning.pytorch.strategies import DDPStrategy

    class Streamed(DDPStrategy):  # type: ignore[misc]
        def _setup_model(self, model: nn.Module) -> nn.Module:
            return model

    class Finetune(L.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = wrapped(size)

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return streamer.AdamW(self.model.parameters(), lr=1e-2)

        def configure_gradient_clipping(self, optimizer: object, *given: object, **named: object) -> None:
            streamer.clip_grad_norm_(self.model, 0.5)

    module = Finetune()
    strategy: dict[str, Any] = {"strategy": Streamed(process_group_backend="gloo")} if size > 1 else {}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    given = {"max_steps": STEPS, "use_distributed_sampler": False, "accelerator": "cpu", "devices": size}
    trainer = L.Trainer(**given, enable_model_summary=False, **quiet, **strategy)
    # in order, where Lightning's own would shuffle
    part = DistributedSampler(Tokens(), shuffle=False) if size > 1 else None  # type: ignore[var-annotated]
    trainer.fit(module, DataLoader(Tokens(), batch_size=BATCH // size, sampler=part))
    return module.model  # type: ignore[no-any-return]


TRAINERS: tuple[Callable[[str, int], nn.Module], ...] = (by_accelerate, by_trainer, by_lightning)


#: What takes seconds to import.
IMPORTS = ("transformers.models.llama.modeling_llama", "transformers.trainer", "lightning.pytorch")


def autocasts() -> str:
    """The error of an Accelerator that would have to put something around the model of ranks."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = wrapped(2)
    try:
        accelerator.prepare(model)
    except RuntimeError as error:
        return str(error)
    return ""


def train(number: int, folder: str, place: Mapping[str, str]) -> tuple[list[Arrays], str]:
    """What each of `TRAINERS` trains, and what `autocasts` is refused with. The first process trains alone,
    the others are ranks."""
    size, rank = (2, number - 1) if number else (1, 0)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    if size > 1:
        os.environ.update({name: str(value) for name, value in names.items()})
        os.environ.update(place)
        dist.init_process_group("gloo")
    into = f"{folder}/{size}"
    trained = [arrays(streamer.unwrap(train_by(into, size)).state_dict()) for train_by in TRAINERS]
    return trained, autocasts() if number else ""


# all in one test: what they need is imported once
@pytest.mark.skipif(not all(map(find_spec, REQUIRED)), reason=f"needs {', '.join(REQUIRED)}")
def test_trainers_train_as_in_one_process(tmp_path: Path) -> None:
    """What a trainer would have to put around the model is refused."""
    _store, place = listening()
    found, refused = zip(*run_ranks(3, train, str(tmp_path), place, kind=None, imports=IMPORTS), strict=True)
    for train_by, expected, first, second in zip(TRAINERS, *found, strict=True):
        assert expected.keys() == first.keys()
        for name, value in expected.items():
            told = f"{train_by.__name__}: {name}"
            assert (first[name] == second[name]).all(), told
            np.testing.assert_allclose(first[name], value, rtol=1e-4, atol=1e-5, err_msg=told)
    for answer in refused[1:]:
        assert answer.startswith("mixed_precision='bf16'")
        assert "pass streamer.wrap dtype=torch.bfloat16" in answer
