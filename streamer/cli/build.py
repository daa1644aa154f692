"""The wrapped model and the optimizer of a configuration."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import streamer
from streamer.backends.base import Backend
from streamer.checkpoint.tensors import in_a_line
from streamer.cli.config import Config, ConfigError, ModelConfig, with_keys
from streamer.cli.shipped import model_module
from streamer.config_values import nearest
from streamer.errors import DiskError
from streamer.integrations.rows import ROWS
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

#: The defaults of ``[lora]``.
LORA = {"task_type": "CAUSAL_LM", "target_modules": "all-linear"}
#: Options of peft that compute initial values from those of the base, which is read after its adapters are
#: added.
OF_VALUES = ("use_dora", "modules_to_save", "trainable_token_indices")


def build_model(config: Config, *, backend: Backend | None = None, process_group: Any = None) -> nn.Module:
    """The wrapped model, on ``backend`` (default: that of ``stream.device``), for the ranks of
    ``process_group``. Raises ConfigError for any error of the model's function,
    `streamer.from_pretrained` or `streamer.wrap`."""
    options = {"backend": backend, "process_group": process_group}
    if config.model.path is not None:
        with refusals("[model] and [stream]"):
            without = without_values(replace(config, lora={}))
            return from_files(config, wrap_options(config, without) | options)
    model, init = _own_model(config.model, on_meta=backend is not None and backend.device.type == "meta")
    with refusals("[stream]"):
        return streamer.wrap(model, init=init, **wrap_options(config, model) | options)


def from_files(config: Config, options: Mapping[str, Any]) -> nn.Module:
    """The pretrained model with its adapters, wrapped with ``options``. Raises the errors of
    `streamer.from_pretrained`."""
    model = config.model
    kind, changed = _class(model)
    return streamer.from_pretrained(
        str(model.path),
        kind,
        init=model.init,
        config=changed,
        adapt=partial(add_adapters, lora=config.lora) if config.lora else None,
        quantize=None if model.quantize == "none" else model.quantize,
        skip=model.quantize_skip,
        **options,
    )


def wrap_options(config: Config, model: nn.Module) -> dict[str, Any]:
    """Keyword arguments of `streamer.wrap` for ``model``, with values or without."""
    options = dict(vars(config.stream))
    options["dtype"] = dtype_of(config)
    dims: Mapping[str, Any] = options["batch_dims"] or {}
    options["batch_dims"] = {name: None if dim == "none" else dim for name, dim in dims.items()} or None
    if config.model.path is not None and options["micro_batch_size"] is not None:
        layers = find_layers(model, config.stream.layers)
        taken = [inspect.signature(layer.forward).parameters for _, layer in layers]
        of_rows = {name: dim for name, dim in ROWS.items() if all(name in names for names in taken)}
        options["batch_dims"] = of_rows | (options["batch_dims"] or {})
    return options


#: The classes for names in ``optimizer.name``.
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": streamer.AdamW,
    "lion": streamer.Lion,
    "muon": streamer.Muon,
    "sgd": torch.optim.SGD,
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer over all trainable parameters of the wrapped model."""
    kind, options = optimizer_of(config)
    make = kind if kind is streamer.AdamW else partial(streamer.Optimizer, kind)
    with refusals("[optimizer]"):
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer: torch.optim.Optimizer = make(trained, **options)
    if hasattr(optimizer, "train"):  # schedule-free
        optimizer.train()
    return optimizer


def optimizer_of(config: Config) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The optimizer's class, and its options: those of `[train]` that it takes, then ``optimizer.args``.
    Raises ConfigError for a missing class."""
    train, own = config.train, config.optimizer
    kind = OPTIMIZERS.get(own.name) or _optimizer_at(own.name)
    takes = inspect.signature(kind.__init__).parameters
    usual: dict[str, Any] = {"lr": train.learning_rate, "weight_decay": train.weight_decay}
    if own.name in ("adamw", "muon"):
        usual |= {"betas": (train.adam_beta1, train.adam_beta2), "eps": train.adam_epsilon}
    if own.name == "adamw":
        usual |= {"state_dtype": own.state_dtype, "skip_nonfinite": own.skip_nonfinite}
    elif own.state_dtype != "float32":
        raise ConfigError(f"optimizer.state_dtype is for adamw: {own.name} keeps its state in fp32")
    return kind, {name: value for name, value in usual.items() if name in takes} | own.args


def _optimizer_at(place: str) -> type[torch.optim.Optimizer]:
    if ":" not in place:
        raise ConfigError(
            f"optimizer.name={place!r}: {nearest(place, OPTIMIZERS)}, or a class, as in "
            '"schedulefree:SGDScheduleFree"'
        )
    found = import_factory(place)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ConfigError(
            f"optimizer.name={place!r} is not an optimizer: name a subclass of torch.optim.Optimizer"
        )
    return found


@contextlib.contextmanager
def refusals(section: str, *, besides: type[Exception] = ConfigError) -> Iterator[None]:
    """Inside the block an error of the library becomes a ConfigError that names keys of ``section``; errors
    ``besides`` propagate unchanged."""
    try:
        yield
    except (ConfigError, besides):
        raise
    except (DiskError, OSError, TypeError, ValueError, MemoryError) as error:
        raise ConfigError.of(section, error) from error


def dtype_of(config: Config) -> torch.dtype | None:
    """The dtype in which weights are streamed; None for their own."""
    return None if config.stream.dtype is None else getattr(torch, config.stream.dtype)


def settle_fp16(config: Config) -> tuple[Config, str | None]:
    """``config`` with fp16 weights of a folder streamed in bf16 unless ``stream.dtype`` is set, and a line
    that reports it. fp16 ends at 65,504 and 6e-8, beyond which gradients overflow or vanish."""
    folder = config.model.path
    if folder is None or config.stream.dtype is not None:
        return config, None
    try:
        if has_weights(Path(folder)):
            dtype = usual_dtype(stored_tensors(Path(folder)))
        else:
            dtype = getattr(without_values(replace(config, lora={})), "dtype", None)
    except (OSError, TypeError, ValueError):
        return config, None  # building the model raises the error again
    if dtype is not torch.float16:
        return config, None
    line = (
        f"{folder} has fp16 weights: they are streamed in bfloat16, whose range needs no scaling of the "
        "loss; --set stream.dtype=float16 --set train.fp16=true trains in fp16"
    )
    return with_keys(config, stream={"dtype": "bfloat16"}), line


# without values


def without_values(config: Config, *, quantized: bool = False) -> Any:
    """The model and its adapters with parameters on the meta device, to be streamed in ``stream.dtype``. With
    ``quantized`` its linear layers are quantized by ``model.quantize``. Then a model that is quantized in its
    files raises ValueError, since the plan needs the files themselves."""
    model, dtype = config.model, dtype_of(config)
    if model.path is None:
        return _own_model(model, on_meta=True)[0]
    kind, changed = _class(model)
    with _NothingDrawn():
        built = build(Path(model.path), kind, changed, dtype)
    if quantized:
        if is_quantized(built):
            raise ValueError(f"{model.path}: its weights are quantized: add its safetensors files there")
        if model.quantize != "none":
            quantize_weights(
                built, find_layers(built, None), model.quantize, model.quantize_skip, None, dtype
            )
    if config.lora:
        with torch.device("meta"), _NothingDrawn():
            add_adapters(built, config.lora)
    return built


def _own_model(model: ModelConfig, *, on_meta: bool) -> tuple[nn.Module, Callable[..., Any] | None]:
    """The model of ``model.factory``, and the method ``model.init``; with this method the model is built
    without values."""
    factory = import_factory(str(model.factory))
    try:
        with contextlib.ExitStack() as stack:
            if on_meta or model.init is not None:
                stack.enter_context(torch.device("meta"))
                stack.enter_context(_NothingDrawn())
            built = factory(**model.args)
        if not isinstance(built, nn.Module):
            raise ValueError(f"it returns a {type(built).__name__}, not an nn.Module")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model.factory {model.factory} with these args: {error}") from error
    if model.init is None:
        return built, None
    init = getattr(built, model.init, None)
    if not callable(init):
        raise ConfigError(f"model.init = {model.init!r}: {type(built).__name__} has no such method")
    return built, init


class _NothingDrawn(TorchFunctionMode):
    """Inside the block tensors without values draw no normal numbers: PyTorch would import its compiler for
    that, which takes longer than anything else at the start of a run."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (nn.init.normal_, torch.Tensor.normal_):
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


def import_factory(spec: str) -> Callable[..., Any]:
    """The callable ``module:callable``, from the working directory, the installed modules or streamer's own
    models. Raises ConfigError if there is none; other errors of the module propagate unchanged."""
    module_name, _, attribute = spec.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as with `python -m`, and for later imports of the module
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


def _class(model: ModelConfig) -> tuple[ModelClass | None, Any]:
    """The class of a pretrained model and its config; None for the defaults of its folder."""
    kind = None if model.factory is None else import_factory(model.factory)
    if kind is not None and not is_of_transformers(kind):
        return partial(kind, **model.args), None
    return kind, _changed_config(str(model.path), model.args) if model.args else None


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
    except Exception as error:  # the library's own checks may raise anything
        raise ConfigError(f"model.args: the config of {folder} refuses them: {in_a_line(error)}") from error


# adapters


def add_adapters(model: nn.Module, lora: Mapping[str, Any]) -> nn.Module:
    """``model`` with the adapters of ``[lora]``, its own parameters frozen (Hu et al., 2021,
    arXiv:2106.09685). Raises ConfigError for options that peft refuses or that need the base's values."""
    import peft

    if lora.get("init_lora_weights", True) is not True:
        raise ConfigError("[lora] init_lora_weights: adapters start from peft's default values: leave it out")
    if name := next((name for name in OF_VALUES if lora.get(name)), None):
        raise ConfigError(f"[lora] {name} needs the base's values before they are read: leave it out")
    try:
        adapted: nn.Module = peft.inject_adapter_in_model(peft.LoraConfig(**LORA | dict(lora)), model)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"[lora]: {in_a_line(error)}") from error
    # as `add_adapter` of transformers does: its Trainer refuses a quantized model without adapters, and its
    # `save_pretrained` writes only the adapters
    adapted._hf_peft_config_loaded = True  # type: ignore[assignment]
    return adapted
