"""What a run is made of, by its config: the wrapped model (of the user's function, or pretrained) and the
optimizer.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import streamer
from streamer.app.config import (
    FACTORY,
    Config,
    ConfigError,
    LoraConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    StreamConfig,
)
from streamer.app.data.documents import JSON_LINES
from streamer.app.data.splits import TokenData
from streamer.app.run.adapters import add_adapters
from streamer.app.run.beside import bytes_beside, copy_beside, files_beside
from streamer.app.shipped import model_module
from streamer.backends.base import Backend
from streamer.checkpoint.manifest import new_folder
from streamer.checkpoint.tensors import in_a_line
from streamer.config_values import nearest
from streamer.errors import DiskError, amount
from streamer.model.layers import find_layers
from streamer.pretrained.architecture import (
    ModelClass,
    build,
    folder_of,
    is_of_transformers,
    is_quantized,
    transformers_library,
)
from streamer.pretrained.files import has_weights, stored_tensors
from streamer.pretrained.quantize import quantize_weights
from streamer.pretrained.quantized_files import usual_dtype


def import_factory(spec: str) -> Callable[..., Any]:
    """The callable named by ``spec``, ``module:callable``, found with the working directory importable, or
    among streamer's own models.

    Raises ConfigError where there is no such module, no such attribute, or it cannot be called. Any other
    exception of the module while it is imported is the module's own, and comes through as it is.
    """
    if not FACTORY.accepts(spec):
        raise ConfigError(f"the factory must be {FACTORY.words}, not {spec!r}")
    module_name, _, attribute = spec.partition(":")
    # First, as with `python -m`, and for good: the module may import its neighbours later.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise
        own = model_module(module_name)
        if own is None:
            raise ConfigError(f"{spec}: no module {error.name!r} in {os.getcwd()} or installed") from None
        module = own
    factory: Callable[..., Any] | None = getattr(module, attribute, None)
    if not callable(factory):
        remedy = nearest(attribute, [name for name, value in vars(module).items() if callable(value)])
        raise ConfigError(f"{spec}: {module_name} has no callable {attribute!r}; {remedy}")
    return factory


def without_values(
    config: ModelConfig, lora: LoraConfig | None = None, dtype: torch.dtype | None = None
) -> Any:
    """The config's model with its parameters on the meta device, or what its factory makes there; with the
    adapters that ``lora`` asks for. A pretrained one is made to be streamed in ``dtype``, or in the dtype
    that its folder says. No parameter is quantized."""
    if config.pretrained is not None:
        kind, changed = _class(config)
        model = build(Path(config.pretrained), kind, changed, dtype)
        return add_adapters(model, lora) if lora is not None and lora.rank else model
    assert config.factory is not None
    factory = import_factory(config.factory)
    with torch.device("meta"), _NothingDrawn():
        return factory(**config.args)


class _NothingDrawn(TorchFunctionMode):
    """Inside the block no numbers of a normal distribution are drawn for tensors without values. PyTorch
    would import its compiler to draw none, which takes longer than all else that begins a run."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (nn.init.normal_, torch.Tensor.normal_):
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


def quantized_without_values(config: ModelConfig, lora: LoraConfig, dtype: torch.dtype | None) -> nn.Module:
    """`without_values` as it is trained: with linear layers quantized as ``config`` says, for inputs of
    ``dtype``, or of the dtype that its folder says. Raises ValueError for a model that is quantized in its
    files, which only they could tell of."""
    assert config.pretrained is not None
    kind, changed = _class(config)
    model = build(Path(config.pretrained), kind, changed, dtype)
    if is_quantized(model):
        raise ValueError(
            f"{config.pretrained}: its weights are quantized, and only its safetensors files tell how: put "
            "them there"
        )
    if (word := _quantize(config)) is not None:
        quantize_weights(model, find_layers(model, None), word, config.quantize_skip, None, dtype)
    return add_adapters(model, lora) if lora.rank else model


def _quantize(config: ModelConfig) -> str | None:
    """As `streamer.from_pretrained` takes it."""
    return None if config.quantize == "none" else config.quantize


def streamed_dtype(config: Config, model: nn.Module | None) -> str:
    """The name of the dtype that a run streams weights in, as far as ``model``, `without_values`, tells."""
    if config.stream.dtype is not None:
        return config.stream.dtype
    own = getattr(model, "dtype", None) if config.model.pretrained is not None else None
    return "float32" if own is None else str(own).removeprefix("torch.")


def settle_fp16(config: Config) -> tuple[Config, str | None]:
    """``config`` with the fp16 weights of a pretrained model streamed in bf16, unless ``stream.dtype`` says
    in what, and the line that says so; None where nothing changes.

    fp16 ends at 65,504 and 6e-8, so that gradients overflow or vanish unless the loss is scaled. bf16 has the
    range of fp32.
    """
    folder = config.model.pretrained
    if folder is None or config.stream.dtype is not None:
        return config, None
    try:
        if has_weights(Path(folder)):
            dtype = usual_dtype(stored_tensors(Path(folder)))
        else:
            dtype = getattr(without_values(config.model), "dtype", None)
    except (OSError, TypeError, ValueError):
        return config, None  # which building the model is about to refuse, in better words
    if dtype is not torch.float16:
        return config, None
    frozen = " (those that are not trained are rounded to it)" if config.lora.rank else ""
    line = (
        f"{folder} has fp16 weights: they are streamed in bfloat16{frozen}, whose range needs no scaling of "
        "the loss; --set stream.dtype=float16 trains in fp16, with torch.amp.GradScaler"
    )
    return replace(config, stream=replace(config.stream, dtype="bfloat16")), line


def _class(model: ModelConfig) -> tuple[ModelClass | None, Any]:
    """The class or function that makes a pretrained model, and its config, None for those of the folder."""
    kind = None if model.factory is None else import_factory(model.factory)
    if kind is not None and not is_of_transformers(kind):
        return partial(kind, **model.args), None
    assert model.pretrained is not None
    return kind, _changed_config(model.pretrained, model.args) if model.args else None


def _changed_config(folder: str, args: Mapping[str, Any]) -> Any:
    known = transformers_library().AutoConfig.from_pretrained(
        folder_of(Path(folder)), local_files_only=True, trust_remote_code=False
    )
    for name in args:
        if not hasattr(known, name):
            raise ConfigError(
                f"model.args.{name}: the config of {folder} has no such key; {nearest(name, known.to_dict())}"
            )
    try:
        return type(known).from_dict(known.to_dict() | args)
    except Exception as error:  # whatever the library's own checks raise
        raise ConfigError(f"model.args: the config of {folder} refuses them: {in_a_line(error)}") from error


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


def write_pretrained(model: nn.Module, config: Config, folder: Path) -> None:
    """Write the whole model of a run of ``config`` as Hugging Face does, with what it is used with; complete,
    or not at all. For a model without ``save_pretrained`` a printed line names `streamer export` instead."""
    save = getattr(model, "save_pretrained", None)
    if not callable(save):
        print(f"{type(model).__name__} is not of transformers: streamer export writes its weights")
        return
    streamer.synchronize(model)
    sizes, beside = [param.nbytes for param in model.parameters()], files_beside(config)
    needed = sum(sizes) + bytes_beside(beside, len(sizes))
    with new_folder(folder, nbytes=needed, what="a folder of weights") as hidden, torch.no_grad():
        save(hidden)
        copy_beside(beside, hidden)
        for path in hidden.iterdir():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
    print(
        f"All {amount(sum(sizes))} of weights are in {folder}: "
        f"transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})"
    )


def build_model(config: Config, *, backend: Backend | None = None, process_group: Any = None) -> nn.Module:
    """The config's model, wrapped; on ``backend`` in place of that of ``stream.device``, if it is given, and
    for the ranks of ``process_group``.

    Raises ConfigError for what the factory, `streamer.from_pretrained` or `streamer.wrap` refuses.
    """
    beside = {"backend": backend, "process_group": process_group}
    wanted, options = config.model, {**wrap_options(config), **beside}
    if wanted.pretrained is not None:
        try:
            return from_files(wanted, config.lora, options)
        except ConfigError:
            raise
        except DiskError as error:
            raise ConfigError.of("[memory]", error) from error
        except (OSError, TypeError, ValueError, MemoryError) as error:
            raise ConfigError.of("[model] and [stream]", error) from error
    assert wanted.factory is not None, "load_config has looked"
    factory = import_factory(wanted.factory)
    # the virtual backend needs no values
    on_meta = wanted.init is not None or (backend is not None and backend.device.type == "meta")
    try:
        with torch.device("meta") if on_meta else contextlib.nullcontext():
            model = factory(**wanted.args)
        if not isinstance(model, nn.Module):
            raise ValueError(f"it returns a {type(model).__name__}, not an nn.Module")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model.factory {wanted.factory} with these args: {error}") from error
    init = None if wanted.init is None else getattr(model, wanted.init, None)
    if wanted.init is not None and not callable(init):
        raise ConfigError(f"model.init = {wanted.init!r}: {type(model).__name__} has no such method")
    try:
        return streamer.wrap(model, init=init, **options)
    except DiskError as error:
        raise ConfigError.of("[memory]", error) from error
    except (ValueError, MemoryError) as error:
        where = "[stream]" if config.memory == MemoryConfig() else "[stream] and [memory]"
        raise ConfigError.of(where, error) from error


def from_files(config: ModelConfig, lora: LoraConfig, options: Mapping[str, Any]) -> nn.Module:
    """The pretrained model, wrapped, with the adapters that ``lora`` asks for. Raises what
    `streamer.from_pretrained` raises for it and for its ``options``."""
    assert config.pretrained is not None
    kind, changed = _class(config)
    adapt = partial(add_adapters, config=lora) if lora.rank else None
    return streamer.from_pretrained(
        config.pretrained,
        kind,
        init=config.init,
        config=changed,
        adapt=adapt,
        quantize=_quantize(config),
        skip=config.quantize_skip,
        **options,
    )


def dtype_of(config: StreamConfig) -> torch.dtype | None:
    """The dtype that weights are streamed in; None for their own."""
    return None if config.dtype is None else getattr(torch, config.dtype)


def stream_options(config: StreamConfig) -> dict[str, Any]:
    """Keyword arguments of `streamer.wrap`."""
    dims: Mapping[str, Any] | None = config.batch_dims
    return vars(config) | {
        "dtype": dtype_of(config),
        "batch_dims": dims and {name: None if dim == "none" else dim for name, dim in dims.items()},
    }


def wrap_options(config: Config) -> dict[str, Any]:
    """Keyword arguments of `streamer.wrap`, those of ``[memory]`` with them."""
    memory = config.memory
    options = stream_options(config.stream) | {"host_memory": memory.host, "disk": memory.disk}
    if has_packed_rows(config) and options["micro_batch_size"] is not None:
        of_rows = _dims_of_rows(config.model, config.stream.layers)
        options["batch_dims"] = {**of_rows, **(options["batch_dims"] or {})}
    return options


def has_packed_rows(config: Config) -> bool:
    """Whether the rows of a batch may hold several conversations, which models of transformers keep apart by
    a mask."""
    documents = any(path.lower().endswith(JSON_LINES) for path in config.data.paths)
    return config.model.pretrained is not None and config.data.packing and documents


#: Arguments of layers of transformers that have a row of the batch each, where rows differ.
OF_ROWS = ("attention_mask", "position_ids", "position_embeddings")


def _dims_of_rows(model: ModelConfig, layers: str | Sequence[str] | None) -> dict[str, int]:
    """`streamer.wrap`'s ``batch_dims`` for packed rows: a mask has a row for each of them, however long it
    is."""
    try:
        found = find_layers(without_values(model), layers)
    except (TypeError, ValueError):
        return {}  # which wrapping the model is about to refuse, in better words
    taken = [inspect.signature(layer.forward).parameters.keys() for _, layer in found]
    return {name: 0 for name in OF_ROWS if all(name in names for names in taken)}


#: Keys of ``[optimizer]`` that are arguments of `streamer.AdamW`.
OPTIMIZER_KEYS = ("lr", "betas", "eps", "weight_decay", "state_dtype")


def build_optimizer(
    config: OptimizerConfig, model: nn.Module, *, skip_nonfinite: bool = True
) -> streamer.AdamW:
    """The config's optimizer of the wrapped model; ``skip_nonfinite`` is `streamer.AdamW`'s."""
    try:
        return streamer.AdamW(
            model.parameters(),
            **{key: getattr(config, key) for key in OPTIMIZER_KEYS},
            skip_nonfinite=skip_nonfinite,
        )
    except DiskError as error:
        raise ConfigError.of("[memory]", error) from error
    except (ValueError, MemoryError) as error:
        raise ConfigError.of("[optimizer]", error) from error
