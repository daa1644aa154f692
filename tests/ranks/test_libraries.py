"""Other libraries on two ranks, started as by torchrun: trainers, and adapters on a quantized base, give the
weights of one process with batches twice as large.
"""

from __future__ import annotations

import os
import warnings
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
from tests.reference import hugging_face

REQUIRED = ("transformers", "accelerate", "lightning", "torchao", "bitsandbytes")
STEPS, BATCH, TIME, WORDS = 2, 4, 8, 32


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        made = torch.randint(WORDS, (TIME,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": made, "labels": made}


def wrapped(size: int) -> Any:
    model = hugging_face(vocab_size=WORDS, max_position_embeddings=TIME)
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


QUANTIZED = "torchao int8", "bitsandbytes nf4"


def on_quantized_base(kind: str, size: int) -> tuple[Arrays, int]:
    """The adapters after some steps, and the bytes of the weights in host memory."""
    # takes seconds to import
    from tests.quantized import LAYERS, llama

    model = llama(kind)
    group = dist.group.WORLD if size > 1 else None
    streamer.wrap(model, layers=LAYERS, device="cpu", process_group=group, grad_dtype=None)
    adapters = {name: param for name, param in model.named_parameters() if param.requires_grad}
    optimizer = streamer.AdamW(adapters.values(), lr=1e-2)
    for step in range(STEPS):
        for index in [dist.get_rank()] if size > 1 else range(2):
            torch.manual_seed(100 * step + index)
            tokens = torch.randint(0, 128, (2, 16))
            loss = model(input_ids=tokens, labels=tokens).loss
            (loss if size > 1 else loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    streamer.synchronize(model)
    found = arrays(adapters)
    weights = streamer.stats(model).host_bytes["weights"]
    streamer.unwrap(model)
    return found, weights


#: What takes seconds to import.
IMPORTS = (
    *("transformers.models.llama.modeling_llama", "transformers.trainer", "lightning.pytorch"),
    *("torchao.quantization", "bitsandbytes"),
)


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


Found = tuple[list[Arrays], list[tuple[Arrays, int]], str]


def train(number: int, folder: str, place: Mapping[str, str]) -> Found:
    """What each of `TRAINERS` trains and each kind of `QUANTIZED` base leads to, and what `autocasts` is
    refused with. The first process trains alone, the others are ranks."""
    size, rank = (2, number - 1) if number else (1, 0)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    if size > 1:
        os.environ.update({name: str(value) for name, value in names.items()})
        os.environ.update(place)
        dist.init_process_group("gloo")
    into = f"{folder}/{size}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = [on_quantized_base(kind, size) for kind in QUANTIZED]
    trained = [arrays(streamer.unwrap(train_by(into, size)).state_dict()) for train_by in TRAINERS]
    return trained, quantized, autocasts() if number else ""


# for all tests: what they need is imported once
@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What `train` returns in the process that trains alone, and on both ranks."""
    if not all(map(find_spec, REQUIRED)):
        pytest.skip(f"needs {', '.join(REQUIRED)}")
    _store, place = listening()
    return run_ranks(3, train, str(tmp_path_factory.mktemp("run")), place, kind=None, imports=IMPORTS)


def test_trainers_train_as_in_one_process(found: list[Found]) -> None:
    for train_by, expected, first, second in zip(TRAINERS, *(each[0] for each in found), strict=True):
        assert expected.keys() == first.keys()
        for name, value in expected.items():
            told = f"{train_by.__name__}: {name}"
            assert (first[name] == second[name]).all(), told
            np.testing.assert_allclose(first[name], value, rtol=1e-4, atol=1e-5, err_msg=told)


def test_adapters_on_a_quantized_base_equal_those_of_one_process(found: list[Found]) -> None:
    """To the bit. Ranks share the base."""
    for kind, (alone, weights), *of_ranks in zip(QUANTIZED, *(each[1] for each in found), strict=True):
        for adapters, on_rank in of_ranks:
            assert on_rank <= weights
            for name, value in alone.items():
                np.testing.assert_array_equal(adapters[name], value, err_msg=f"{kind}: {name}")


def test_what_a_trainer_would_put_around_the_model_is_refused(found: list[Found]) -> None:
    for *_, answer in found[1:]:
        assert answer.startswith("mixed_precision='bf16'")
        assert "pass streamer.wrap dtype=torch.bfloat16" in answer
