"""The keys of DeepSpeed's JSON by dotted name, and the values of a config, checked.

The keys are those of DeepSpeed's documentation (docs/_pages/config-json.md) and of the classes that read
them, as of version 0.19, with the deprecated ones that DeepSpeed still takes.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from streamer.config_values import BETAS, FLAG, NOT_NEGATIVE, Kind, nearest, string


def _whole(low: int, high: int | None = None) -> Kind:
    """An integer, which may be written as 1e5."""

    def accepts(value: Any) -> bool:
        is_whole = type(value) is int or (type(value) is float and value.is_integer())
        return is_whole and value >= low and (high is None or value <= high)

    words = f"an integer of {low} or more" if high is None else f"an integer from {low} to {high}"
    return Kind(words, accepts, int)


_TEXT = string("a string that is not empty", r"(?s).+")
_SUMMED = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SUMMED |= {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: Keys whose values become arguments, or are refused.
READ = {
    "train_batch_size": _whole(1),
    "train_micro_batch_size_per_gpu": _whole(1),
    "gradient_accumulation_steps": _whole(1),
    "gradient_clipping": NOT_NEGATIVE,
    "optimizer.type": _TEXT,
    "optimizer.params.lr": NOT_NEGATIVE,
    "optimizer.params.betas": BETAS,
    "optimizer.params.eps": NOT_NEGATIVE,
    "optimizer.params.weight_decay": NOT_NEGATIVE,
    "optimizer.params.adam_w_mode": FLAG,
    "optimizer.params.adamw_mode": FLAG,
    "optimizer.params.torch_adam": FLAG,
    "optimizer.params.bias_correction": FLAG,
    "optimizer.params.amsgrad": FLAG,
    "optimizer.params.maximize": FLAG,
    "optimizer.params.max_grad_norm": NOT_NEGATIVE,
    "scheduler.type": _TEXT,
    "scheduler.params.warmup_min_lr": NOT_NEGATIVE,
    "scheduler.params.warmup_max_lr": NOT_NEGATIVE,
    "scheduler.params.warmup_min_ratio": NOT_NEGATIVE,
    "scheduler.params.cos_min_ratio": NOT_NEGATIVE,
    "scheduler.params.warmup_num_steps": _whole(0),
    "scheduler.params.total_num_steps": _whole(1),
    "scheduler.params.warmup_type": string('"log" or "linear"', "log|linear"),
    "fp16.enabled": FLAG,
    "fp16.loss_scale": NOT_NEGATIVE,
    "fp16.initial_scale_power": _whole(0, 127),
    "fp16.loss_scale_window": _whole(1),
    "bf16.enabled": FLAG,
    "bf16.bf16_optimizer_states": FLAG,
    "data_types.grad_accum_dtype": Kind(
        '"fp32", "bf16" or "fp16"', lambda x: isinstance(x, str) and x in _SUMMED, _SUMMED.get
    ),
}
#: Tables that say where something is, and may say a folder of a drive.
OFFLOADS = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")
READ |= {f"{table}.nvme_path": _TEXT for table in OFFLOADS}
#: What streamer does always, by the key that asks for it: no other value is honoured.
ALWAYS = {
    "optimizer.params.fp32_optimizer_states": True,
    "optimizer.params.fused": False,
    "optimizer.params.foreach": False,
    "optimizer.params.capturable": False,
    "optimizer.params.differentiable": False,
    "optimizer.params.set_grad_none": True,
    "scheduler.params.last_batch_iteration": -1,
    "fp16.hysteresis": 1,
    "fp16.min_loss_scale": 0,
    "bf16.check_grad_overflow": True,
    "bf16.check_overflow": True,
    "zero_optimization.stage": 3,
    "zero_optimization.contiguous_gradients": True,
    "zero_optimization.ignore_unused_parameters": True,
    "zero_optimization.offload_param.device": "cpu",
    "zero_optimization.offload_param.pin_memory": True,
    "zero_optimization.offload_optimizer.device": "cpu",
    "zero_optimization.offload_optimizer.pin_memory": False,
    "zero_optimization.offload_optimizer.ratio": 1,
    "zero_optimization.cpu_offload": True,
    "zero_optimization.cpu_offload_param": True,
    "zero_optimization.cpu_offload_params": True,
    "zero_optimization.cpu_offload_use_pin_memory": True,
}
#: Keys and tables that may change the result; those of `ALWAYS` by any other value.
CHANGE_RESULT = {
    f"{table}.{name}".lstrip(".")
    for table, names in {
        "": "amp compression_training curriculum_learning data_efficiency dataloader_drop_last elasticity "
        "hybrid_engine progressive_layer_drop quantize_training sparse_attention torch_autocast "
        "weight_quantization",
        "optimizer.params": "fp32_optimizer_states",
        "scheduler.params": "last_batch_iteration",
        "fp16": "auto_cast consecutive_hysteresis fp16_master_weights_and_grads hysteresis min_loss_scale",
        "bf16": "bf16_master_weights_and_grads check_grad_overflow check_overflow",
        "data_types": "param_dtype buffer_dtype",
        "zero_optimization": "zenflow zero_quantized_gradients zero_quantized_nontrainable_weights "
        "zero_quantized_weights zeropp_loco_param",
    }.items()
    for name in names.split()
}
_KNOWN = {*READ, *ALWAYS, *CHANGE_RESULT}
#: The tables whose keys are looked at one by one.
_TABLES = {"zero_optimization", "optimizer", "scheduler"} | {key.rpartition(".")[0] for key in _KNOWN} - {""}
#: A name that is as like one of `_KNOWN` is a typing error. DeepSpeed's other names reach 0.75.
_LIKENESS = 0.8
#: Tables of which DeepSpeed, too, refuses unknown keys.
_STRICT = ("optimizer.params.", "scheduler.params.")

#: Stands in a config for what the training loop knows.
AUTO = "auto"
_NO_DEFAULT = object()
#: So many characters of a value are shown in an error.
_MOST_SHOWN = 60


@dataclass(frozen=True)
class Values:
    """A config's values by dotted key, without what is null, false or not enabled where that asks for
    nothing; and what stands in for those that are "auto" or missing."""

    given: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        value = self.given.get(key, AUTO)
        return default if value == AUTO else value

    def is_auto(self, key: str) -> bool:
        return bool(self.given.get(key) == AUTO)

    def pick(self, key: str, name: str, answer: Any, absent: Any, *, auto: Any = _NO_DEFAULT) -> Any:
        """The config's value, else ``answer``, the keyword argument ``name``, else ``auto`` or ``absent``.
        Raises ValueError for an answer that the config contradicts, and for "auto" without an answer."""
        if answer is not None:
            answer = _converted(key, name, answer)
            if self.get(key, answer) != answer:
                raise contradiction(key, self.given[key], name, answer)
            return answer
        if not self.is_auto(key):
            return self.given.get(key, absent)
        if auto is _NO_DEFAULT:
            raise unanswered(key, name)
        return auto

    def not_honoured(self) -> list[str]:
        """Keys that are given and change nothing here."""
        return [key for key, value in self.given.items() if not self._is_honoured(key, value)]

    def _is_honoured(self, key: str, value: Any) -> bool:
        table, _, name = key.rpartition(".")
        if table in OFFLOADS and name in ("device", "nvme_path") and self.is_on_nvme(table):
            return True
        return (key in READ and name != "nvme_path") or (key in ALWAYS and value in (AUTO, ALWAYS[key]))

    def is_on_nvme(self, table: str) -> bool:
        """Whether ``table``, one of `OFFLOADS`, asks for a drive."""
        return bool(self.given.get(f"{table}.device") == "nvme")

    def folders(self) -> list[str]:
        """The folders of drives that are asked for. Raises ValueError where a table names none."""
        found = []
        for table in filter(self.is_on_nvme, OFFLOADS):
            path = self.get(f"{table}.nvme_path")
            if path is None:
                raise ValueError(f'{table}.device is "nvme": give a folder of the drive as {table}.nvme_path')
            found.append(path)
        return list(dict.fromkeys(found))


def unanswered(key: str, name: str) -> ValueError:
    return ValueError(f'{key} is "auto": give {name}=... to from_deepspeed_config')


def contradiction(key: str, value: Any, name: str, answer: Any) -> ValueError:
    return ValueError(
        f'{key} is {shown(value)} in the config, and {name}={answer} was given: write "auto" there, or leave '
        "the argument out"
    )


def shown(value: Any) -> str:
    """``value`` in JSON, cut short."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def read_json(source: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    """The object in a JSON file, or ``source`` itself. Raises ValueError, naming the file, for what is not an
    object in JSON or has a key twice; OSError for a file that cannot be read."""
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, str | os.PathLike):
        raise ValueError(f"give a DeepSpeed config as a dict or as a path, not a {type(source).__name__}")
    try:
        config = json.loads(Path(source).read_text(encoding="utf-8"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{os.fspath(source)}: not a config in JSON, correct the file: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{os.fspath(source)}: not a config in JSON: it must be an object, in braces")
    return config


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"the key {twice[0]!r} is there twice in one object")
    return dict(pairs)


def walk(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted keys of a table that ask for something, and their values. Raises ValueError for a key that
    looks like a typing error or belongs in another table, and for a value that its key cannot have."""
    for name, value in table.items():
        key = f"{prefix}{name}"
        if key in _TABLES and value is not None and value is not False:
            if not isinstance(value, Mapping):
                raise ValueError(f"{key} must be an object, in braces, not {shown(value)}")
            yield from walk(value, f"{key}.")
            continue
        if key not in _KNOWN | _TABLES:
            _check_spelling(key, str(name), prefix)
        if key in READ and value is not None:
            yield key, value if value == AUTO else _converted(key, key, value)
        elif (key in ALWAYS and value is not None) or _asks(value):
            yield key, value


def _asks(value: Any) -> bool:
    """Whether a value that is not read asks for anything."""
    if isinstance(value, Mapping):
        return bool(value) and value.get("enabled") is not False
    return value is not None and value is not False


def _check_spelling(key: str, name: str, prefix: str) -> None:
    known = sorted(_KNOWN | _TABLES)
    beside = [other.removeprefix(prefix) for other in known if other.startswith(prefix)]
    if elsewhere := [other for other in known if other.rpartition(".")[2] == name]:
        fix = f"did you mean {elsewhere[0]!r}?"
    elif prefix in _STRICT or difflib.get_close_matches(name, beside, cutoff=_LIKENESS):
        fix = nearest(name, beside)
    else:
        return
    raise ValueError(f"unknown key {key!r} in this config; {fix}")


def _converted(key: str, name: str, value: Any) -> Any:
    value = list(value) if isinstance(value, tuple) else value
    if not READ[key].accepts(value):
        raise ValueError(f"{name} must be {READ[key].words}, not {shown(value)}")
    return READ[key].convert(value)
