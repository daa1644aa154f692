"""A model of the right class without values, for weights to be read into, and tensors that join others.

The experts of a layer are one tensor in a model of transformers, and separate tensors in its files. The rules
of that library stack and concatenate them. If nothing else happens to them, the elements of the result are
those of whole tensors of the files, and it can be read from there piece by piece.
"""

from __future__ import annotations

import copy
import importlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from streamer.checkpoint.tensors import in_a_line
from streamer.model.units import DTYPES, keep_dtype
from streamer.pretrained.files import Stored

#: A class of the transformers library, one of its Auto classes, or a function that returns a model.
ModelClass = Callable[..., nn.Module]

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"


def build(path: Path, model_class: ModelClass | None, config: Any, dtype: torch.dtype | None) -> nn.Module:
    """The model with its parameters on the meta device and its buffers on the CPU with their values.

    ``dtype`` is the dtype in which a class of the transformers library is built; None is its config's.
    Tensors that this library keeps in another dtype have that, and `wrap` keeps it. Raises ValueError, naming
    the remedy, if the class is unknown, or if the model cannot be built.
    """
    if model_class is None or is_of_transformers(model_class):
        model = _of_transformers(path, model_class, config, dtype)
        _keep_dtypes(model, in_class=True, dtype=dtype or _dtype_of_config(model))
    else:
        model = _of_function(model_class, config)
        _keep_dtypes(model, in_class=False, dtype=dtype)
    for name, param in model.named_parameters():
        if not param.is_meta:
            raise ValueError(
                f"parameter '{name}' has values before any are read: let model_class build the model when it "
                "is called, from nn.Parameters"
            )
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ValueError(
                f"buffer '{name}' is on the meta device and has no values: let model_class build the model "
                "on the CPU, where its parameters take no memory, and buffers not be computed from them"
            )
    return model


def folder_of(path: Path) -> Path:
    """The folder of a pretrained model: ``path``, or the folder of the file ``path``. Raises ValueError if
    there is neither."""
    if path.is_dir():
        return path
    if not path.is_file():
        raise ValueError(f"{path}: no such folder, and nothing is downloaded: use a local one")
    return path.parent


def of_library(model: nn.Module) -> bool:
    """Whether ``model`` is one of the transformers library."""
    return hasattr(model, "_adjust_missing_and_unexpected_keys")


def is_quantized(model: nn.Module) -> bool:
    """Whether the weights of ``model`` are quantized by its config."""
    return getattr(getattr(model, "config", None), "quantization_config", None) is not None


def is_quantized_folder(folder: Path) -> bool:
    """`is_quantized` for the model in a ``folder``; False for a folder that cannot be read."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # building the model raises a better error
    return isinstance(config, dict) and config.get("quantization_config") is not None


def is_of_transformers(kind: object) -> bool:
    """Whether it is a class of models of the transformers library, or one of its Auto classes."""
    is_loaded = isinstance(kind, type) and hasattr(kind, "from_pretrained")
    return is_loaded and (hasattr(kind, "_from_config") or _is_auto(kind))


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside the block new modules have parameters without values, and buffers with values.

    Under ``torch.device("meta")`` buffers that are in no file (position embeddings, masks) would have no
    values either.
    """
    replacements = WeakTensorKeyDictionary()  # several modules may share one parameter

    def without_values(module: nn.Module, name: str, param: nn.Parameter | None) -> Any:
        if param is None or param.is_meta:
            return None
        if param not in replacements:
            # the same parameter without memory; its class and attributes are those of the original
            empty = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
            empty.__class__ = type(param)
            empty.__dict__.update(param.__dict__)
            replacements[param] = empty
        return replacements[param]

    hook = register_module_parameter_registration_hook(without_values)
    try:
        yield
    finally:
        hook.remove()


def _of_function(function: ModelClass, config: Any) -> nn.Module:
    if isinstance(function, nn.Module) or not callable(function):
        raise ValueError(
            f"model_class={type(function).__name__}(...): use a class of transformers, or a function that "
            "returns a model"
        )
    if config is not None:
        raise ValueError("config= is for classes of transformers: let model_class be a function that uses it")
    with parameters_on_meta():
        model = function()
    if not isinstance(model, nn.Module):
        raise ValueError(f"model_class has returned a {type(model).__name__}, not an nn.Module")
    return model


def _of_transformers(
    path: Path, model_class: ModelClass | None, config: Any, dtype: torch.dtype | None
) -> nn.Module:
    transformers = transformers_library()
    folder = folder_of(path)
    config = _config(transformers, folder, model_class, config)
    kind: Any = model_class or _named_in(transformers, config, folder)
    if _is_auto(kind) and type(config) not in kind._model_mapping:
        raise ValueError(f"{kind.__name__} has no class for a {type(config).__name__}: use another")
    options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    with parameters_on_meta():
        if _is_auto(kind):
            model = kind.from_config(config, trust_remote_code=False, **options)
        else:
            model = kind._from_config(config, **options)
    if model.can_generate():
        _read_generation_config(transformers, folder, model)
    model.eval()
    return model  # type: ignore[no-any-return]


def _dtype_of_config(model: nn.Module) -> torch.dtype:
    """The dtype of a model that transformers built with no dtype in the call."""
    dtype = getattr(model.config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.get_default_dtype()


def _keep_dtypes(model: nn.Module, *, in_class: bool, dtype: torch.dtype | None) -> None:
    """Keep the dtypes of tensors that transformers does not load in ``dtype``: fp32 for those that the
    model's class names (routers, for one), and, if the model was built in ``dtype`` (``in_class``), the dtype
    of any tensor that the class created in another one."""
    if not of_library(model) or dtype is None:
        return
    named = kept_in_fp32(model, dtype)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in DTYPES:
            continue
        if named(name):
            tensor.data = tensor.data.to(torch.float32)
        elif not in_class or tensor.dtype == dtype:
            continue
        keep_dtype(tensor)


def kept_in_fp32(model: nn.Module, dtype: torch.dtype | None) -> Callable[[str], bool]:
    """Whether transformers keeps the tensor of a name in fp32 when it loads ``model`` in ``dtype``."""
    plan = getattr(model, "_get_dtype_plan", None)
    rules = [re.compile(rule.replace("*", ".*")) for rule in (plan(dtype) if plan and dtype else ())]
    return lambda name: any(rule.search(name) for rule in rules)


def _config(transformers: Any, folder: Path, model_class: Any, config: Any) -> Any:
    """A config of the model that may be changed: a copy of ``config``, or that of ``folder``."""
    if isinstance(config, transformers.PreTrainedConfig):
        return copy.deepcopy(config)
    if config is not None:
        raise ValueError(f"config={config!r}: it must be a config of the transformers library")
    if (folder / "adapter_config.json").is_file() and not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} holds only adapters: merge them into their base model, and use that")
    if not (folder / CONFIG).is_file():
        raise ValueError(
            f"{folder} has no {CONFIG}: set model_class= to a function that returns the model, or config="
        )
    kind = getattr(model_class, "config_class", None) or transformers.AutoConfig
    try:
        # otherwise the library would ask whether to run code in the folder
        return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # any error of the library for a damaged or unknown config
        raise ValueError(f"{folder / CONFIG}: {in_a_line(error)}") from error


def _read_generation_config(transformers: Any, folder: Path, model: Any) -> None:
    """Load the options of generation; older folders have them in their config."""
    options: dict[str, Any] = {"config_file_name": GENERATION_CONFIG}
    if not (folder / GENERATION_CONFIG).is_file():
        options = {"config_file_name": CONFIG, "_from_model_config": True}
    file = folder / options["config_file_name"]
    if not file.is_file():
        return
    try:
        model.generation_config = transformers.GenerationConfig.from_pretrained(
            folder, local_files_only=True, **options
        )
    except Exception as error:  # as for the config
        raise ValueError(f"{file}: {in_a_line(error)}") from error


def _is_auto(kind: object) -> bool:
    return hasattr(kind, "_model_mapping")


def _named_in(transformers: Any, config: Any, folder: Path) -> Any:
    names = getattr(config, "architectures", None) or []
    for name in names:
        if is_of_transformers(kind := getattr(transformers, name, None)):
            return kind
    raise ValueError(
        f"{folder / CONFIG} names no class of transformers {transformers.__version__} (architectures: "
        f"{', '.join(names) or 'none'}): set model_class=, such as transformers.AutoModelForCausalLM"
    )


def transformers_library() -> Any:
    """The transformers library. Raises ValueError, with the command that installs it, if it is missing."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ValueError(
            "models and tokenizers of Hugging Face need the transformers library: "
            f"pip install 'layer-streamer[hf]' ({error})"
        ) from error


#: In the order of elements in memory; empty for a tensor computed in any other way.
Pieces = tuple[Stored, ...]


class Joining(TorchFunctionMode):
    """Inside the block, follows tensors through ``torch.stack`` and ``torch.cat``. It reads no values, so
    tensors may be on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        # holds the tensors too, so that their ids are not reused
        self._known: dict[int, tuple[torch.Tensor, Pieces]] = {}

    def empty(self, stored: Stored) -> torch.Tensor:
        """A tensor without values that stands for a ``stored`` one."""
        tensor = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
        self._known[id(tensor)] = tensor, (stored,)
        return tensor

    def pieces(self, tensor: torch.Tensor) -> Pieces:
        """The stored tensors whose elements, one after the other, are those of ``tensor``. Empty for a tensor
        computed in any other way, or written since."""
        _, pieces = self._known.get(id(tensor), (tensor, ()))
        return pieces if tensor._version == 0 else ()

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.stack or function is torch.cat:
            self._follow(result, *args, **(kwargs or {}))
        return result

    def _follow(
        self, result: torch.Tensor, tensors: Sequence[torch.Tensor], dim: int = 0, **other: object
    ) -> None:
        # of each tensor in turn, for every index of the dimensions before
        rows = prod(result.shape[:dim])
        columns = [_divided(self.pieces(tensor), rows) for tensor in tensors]
        if not other and all(columns):
            pieces = (piece for row in zip(*columns, strict=True) for group in row for piece in group)
            self._known[id(result)] = result, tuple(pieces)


def _divided(pieces: Pieces, count: int) -> list[list[Stored]]:
    """``pieces`` in ``count`` groups of equal size; empty if a piece would be in two of them."""
    numel = sum(prod(piece.shape) for piece in pieces)
    if not numel:
        return []
    groups: list[list[Stored]] = [[]]
    room = numel // count
    for piece in pieces:
        if not room:
            groups.append([])
            room = numel // count
        groups[-1].append(piece)
        if (room := room - prod(piece.shape)) < 0:
            return []
    return groups
