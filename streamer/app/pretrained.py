"""A pretrained model of a config: how it is read, and how it is written in the end."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import streamer
from streamer.app.config import Config, ConfigError, ModelConfig
from streamer.app.data import TokenData
from streamer.app.factory import import_factory
from streamer.app.report import amount
from streamer.files.folder import new_folder
from streamer.kinds import nearest
from streamer.pretrained.architecture import ModelClass, build, is_of_transformers, transformers_library

#: Room for what is written beside the tensors.
MARGIN_BYTES = 1 << 26


def load_pretrained(config: Config, options: Mapping[str, Any]) -> nn.Module:
    """The model of ``model.pretrained``, wrapped with ``options``, arguments of `streamer.wrap`.

    Raises ConfigError for a folder, files or an option that cannot be used.
    """
    model = config.model
    assert model.pretrained is not None
    kind, changed = _class(model)
    try:
        return streamer.from_pretrained(model.pretrained, kind, init=model.init, config=changed, **options)
    except (OSError, TypeError, ValueError, MemoryError) as error:
        raise ConfigError.of("[model] and [stream]", error) from error


def without_values(config: ModelConfig) -> Any:
    """The config's model with its parameters on the meta device, or what its factory makes there."""
    if config.pretrained is not None:
        kind, changed = _class(config)
        return build(Path(config.pretrained), kind, changed, None)
    assert config.factory is not None
    factory = import_factory(config.factory)
    with torch.device("meta"):
        return factory(**config.args)


def streamed_dtype(config: Config, model: nn.Module | None) -> str:
    """The name of the dtype that a run streams weights in, as far as ``model``, `without_values`, tells."""
    if config.stream.dtype is not None:
        return config.stream.dtype
    own = getattr(model, "dtype", None) if config.model.pretrained is not None else None
    return "float32" if own is None else str(own).removeprefix("torch.")


def _class(model: ModelConfig) -> tuple[ModelClass | None, Any]:
    """The class or function that makes a pretrained model, and its config, None for those of the folder."""
    kind = None if model.factory is None else import_factory(model.factory)
    if kind is not None and not is_of_transformers(kind):
        return partial(kind, **model.args), None
    assert model.pretrained is not None
    return kind, _changed_config(model.pretrained, model.args) if model.args else None


def _changed_config(folder: str, args: Mapping[str, Any]) -> Any:
    known = transformers_library().AutoConfig.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    for name in args:
        if not hasattr(known, name):
            raise ConfigError(
                f"model.args.{name}: the config of {folder} has no such key; {nearest(name, known.to_dict())}"
            )
    return type(known).from_dict(known.to_dict() | args)


def check_fits(model: nn.Module, data: TokenData, context: int) -> None:
    """Raise ConfigError where the data has tokens, or sequences of ``context`` tokens, that are beyond what a
    model of transformers says it was made for."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    rows = getattr(embedding, "num_embeddings", None)
    highest = max(int(data.train.max()), int(data.val.max()))
    if rows is not None and highest >= rows:
        raise ConfigError(
            f"the data has token {highest} and the model embeds {rows}: give the model's own tokenizer as "
            "data.tokenizer"
        )
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(longest, int) and context > longest:
        raise ConfigError(
            f"data.context = {context} is above the model's max_position_embeddings = {longest}: lower it, "
            "or set model.args.max_position_embeddings"
        )


def write_pretrained(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Write the whole model and its tokenizer as Hugging Face does; complete, or not at all. A model that
    cannot write itself so is left to `streamer export`, which a line says."""
    save = getattr(model, "save_pretrained", None)
    if not callable(save):
        print(f"{type(model).__name__} is not of transformers: streamer export writes its weights")
        return
    streamer.synchronize(model)
    nbytes = sum(param.nbytes for param in model.parameters())
    with new_folder(folder, nbytes=nbytes + MARGIN_BYTES) as hidden, torch.no_grad():
        save(hidden)
        if tokenizer is not None:
            tokenizer.save_pretrained(hidden)
        for path in hidden.iterdir():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
    print(
        f"All {amount(nbytes)} of weights are in {folder}: "
        f"transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})"
    )
