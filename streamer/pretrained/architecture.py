"""A model of the right class without values, as it is before its weights are read."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

#: A class of the transformers library, one of its Auto classes, or a function that returns a model.
ModelClass = Callable[..., nn.Module]

CONFIG = "config.json"


def build(path: Path, model_class: ModelClass | None, config: Any, dtype: torch.dtype | None) -> nn.Module:
    """The model with its parameters on the meta device and its buffers on the CPU with their values.

    Raises ValueError, naming the mend, where nothing says which class it is of, or where it cannot be built.
    """
    if model_class is not None and not callable(model_class):
        raise ValueError(
            f"model_class={model_class!r}: give a class of transformers, or a function that makes a model"
        )
    if model_class is None or is_of_transformers(model_class):
        return _of_transformers(path, model_class, config, dtype)
    if config is not None:
        raise ValueError("config= is for classes of transformers: let model_class be a function that uses it")
    with parameters_on_meta():
        model = model_class()
    if not isinstance(model, nn.Module):
        raise ValueError(f"model_class has returned a {type(model).__name__}, not an nn.Module")
    return model


def is_of_transformers(kind: object) -> bool:
    """Whether it is a class of models of the transformers library, or one of its Auto classes."""
    return hasattr(kind, "from_pretrained") and _maker(kind) is not None


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Let modules built inside the block have parameters without values; buffers have theirs.

    Under ``torch.device("meta")`` buffers that are in no file (position embeddings, masks) would have none
    either.
    """

    def without_values(module: nn.Module, name: str, param: nn.Parameter | None) -> Any:
        if param is None or param.is_meta:
            return None
        # as it is, but for its memory: a tensor that nobody has written takes none
        empty = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
        empty.__class__ = type(param)
        empty.__dict__.update(param.__dict__)
        return empty

    hook = register_module_parameter_registration_hook(without_values)
    try:
        yield
    finally:
        hook.remove()


def _of_transformers(
    path: Path, model_class: ModelClass | None, config: Any, dtype: torch.dtype | None
) -> nn.Module:
    transformers = transformers_library()
    folder = path if path.is_dir() else path.parent
    if config is None:
        if not (folder / CONFIG).is_file():
            raise ValueError(
                f"{folder} has no {CONFIG}: give model_class= a function that makes the model, or config="
            )
        kind = getattr(model_class, "config_class", None) or transformers.AutoConfig
        config = kind.from_pretrained(folder, local_files_only=True)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{folder}: its weights are quantised, and cannot be trained: dequantise them first")
    if model_class is None:
        model_class = _named_in(transformers, config, folder)
    make = _maker(model_class)
    assert make is not None
    with parameters_on_meta():
        model: nn.Module = make(config, **({} if dtype is None else {"dtype": dtype}))
    if (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model.eval()


def _maker(kind: object) -> Callable[..., nn.Module] | None:
    """What makes a model from a config, in a class of models or in an Auto class."""
    return getattr(kind, "_from_config", None) or getattr(kind, "from_config", None)


def _named_in(transformers: Any, config: Any, folder: Path) -> ModelClass:
    names = getattr(config, "architectures", None) or []
    for name in names:
        if (kind := getattr(transformers, name, None)) is not None:
            return kind  # type: ignore[no-any-return]
    raise ValueError(
        f"{folder / CONFIG} names no class of transformers {transformers.__version__} (architectures: "
        f"{', '.join(names) or 'none'}): give model_class=, such as transformers.AutoModelForCausalLM"
    )


def transformers_library() -> Any:
    """The transformers library. Raises ValueError, naming the mend, where there is none or one too old."""
    try:
        transformers = importlib.import_module("transformers")
        importlib.import_module("transformers.core_model_loading")
    except ImportError as error:
        raise ValueError(
            f"models of Hugging Face need transformers 5 or newer: pip install 'streamer[hf]' ({error})"
        ) from error
    return transformers
