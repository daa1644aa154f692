"""Folders of tiny pretrained models, and what of them `streamer.from_pretrained` has loaded."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import streamer
from bench.architectures import ALL
from models.gpt2 import GPT
from tests.reference import VOCAB

FILE = "model.safetensors"
SIZES = {"vocab_size": VOCAB, "block_size": 16, "n_layer": 3, "n_head": 2, "n_embd": 16}


def load(path: Path, *args: Any, **options: Any) -> Any:
    return streamer.from_pretrained(path, *args, **({"device": "cpu"} | options))


def unwrapped(path: Path, *args: Any, **options: Any) -> Any:
    return streamer.unwrap(load(path, *args, **options))


def saved(folder: Path, name: str, **options: Any) -> nn.Module:
    """A model in ``folder``, no two tensors of which are alike, with statistics of a batch."""
    architecture = ALL[name]
    model: Any = architecture.build()
    architecture.loss(model, 0)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(torch.randn_like(param), alpha=0.02)
        for module in model.modules():  # the library makes some of these zero again
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx].zero_()
    model.save_pretrained(folder, **options)
    return model


def rewritten(file: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Let ``change`` have the tensors of ``file`` and write what is left."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def differing(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not equal to the bit, or of another dtype."""
    assert list(actual) == list(expected)
    return [
        name
        for name, value in expected.items()
        if actual[name].dtype != value.dtype or not torch.equal(actual[name], value)
    ]


def in_use(path: Path) -> list[str]:
    """The open files and mappings of this process that are below ``path``."""

    def found() -> list[str]:
        maps = Path("/proc/self/maps").read_text().splitlines()
        opened = [os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
        return [line for line in (*maps, *opened) if str(path) in line]

    if found():
        gc.collect()
    return found()


def untied() -> GPT:
    return GPT(**SIZES, tied=False)


class Shared(nn.Module):
    """A parameter that two modules are given, a buffer that is in files, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Parameter(torch.ones(4))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scales = nn.ModuleList(nn.LayerNorm(4) for _ in range(2))
        for scale in self.scales:
            scale.weight = shared
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("mask", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.scales[1](self.scales[0](x)) * self.mask + self.table
