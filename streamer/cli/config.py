"""The configuration of a run: a TOML file with a table for each part of it, read by `load_config`.

    [model]      path (a Hugging Face folder or hub id), or factory and args of your own model
    [stream]     arguments of streamer.wrap
    [train]      trl.SFTConfig; for your own model the keys of TrainConfig, with the same names
    [lora]       peft.LoraConfig
    [data]       files or a dataset
    [optimizer]  the optimizer, and its options that [train] has no names for
    [sample]     prompts that the model answers during training
    [callbacks]  NAME = {arguments}, callbacks of transformers

docs/configurations.md explains the keys. A relative path is relative to the folder in which the command runs.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from streamer.config_values import (
    BETA,
    COUNT,
    COUNT_OR_0,
    FLAG,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    TABLE,
    Kind,
    array,
    either,
    nearest,
    one_of,
    string,
)
from streamer.errors import notes

MANY = range(2**31)
TEXT = string("a string that is not empty", r"(?s).+")
FACTORY = string('a module and a callable in it, such as "models.gpt2:GPT"', r"\w[\w.]*:\w+")
DTYPE = one_of("float32", "bfloat16", "float16")
TEXTS = array("an array of strings, none empty", TEXT, sizes=MANY)
ONE_OR_MORE = either("a string or an array of strings, none empty", TEXT, TEXTS)
POLICIES = either("a string, or an array of one for each layer", TEXT, TEXTS)
STEPS = either("a number of steps, or a share of them in (0, 1)", COUNT_OR_0, FRACTION)
COUNT_OR_AUTO = either('an integer of 1 or more, or "auto"', COUNT, one_of("auto"))
BYTES = string('a string of a number and its unit, such as "16GiB"', r"\d+(\.\d+)?\s*(k|[KMGT]i?)?B")
MESSAGES = array("messages", Kind("a message", lambda value: {"role", "content"} <= set(value)), sizes=MANY)
PROMPTS = array(
    'an array of texts and of chats: [{role = "user", content = "Hello"}]',
    either("a text or a chat", TEXT, MESSAGES),
    sizes=MANY,
)


class ConfigError(ValueError):
    """An unusable configuration or data: one line with the file, the key and the remedy. A ``table`` may
    follow the line."""

    def __init__(self, message: str, *, table: str = "") -> None:
        line = " ".join(message.splitlines())
        super().__init__("\n".join([line, table] if table else [line]))

    @staticmethod
    def of(section: str, error: Exception) -> ConfigError:
        """The ConfigError for an ``error`` of the library, with keys of ``section`` in its message."""
        line, _, table = (
            str(error).partition("\n") if isinstance(error, MemoryError) else (str(error), "", "")
        )
        return ConfigError(f"{section}: {in_keys('; '.join([line, *notes(error)]))}", table=table)


class RunError(RuntimeError):
    """A run that cannot continue: one line."""


#: Our defaults of ``[train]`` for Hugging Face folders, in place of those of `trl.SFTConfig`.
TRAINER: dict[str, Any] = {
    "assistant_only_loss": True,
    "bf16": False,  # not autocast: weights are streamed in [stream] dtype
    "gradient_checkpointing": False,  # the engine recomputes layers in backward anyway
    "report_to": "none",
    "packing": True,
    "restore_callback_states_from_checkpoint": True,
    "logging_nan_inf_filter": False,
    "save_total_limit": 2,
}


@dataclass(frozen=True)
class ModelConfig:
    """``[model]``: a pretrained model by its folder, or a function that builds one."""

    path: Annotated[str | None, TEXT] = None
    factory: Annotated[str | None, FACTORY] = None
    args: Annotated[dict[str, Any], TABLE] = field(default_factory=dict)
    init: Annotated[str | None, TEXT] = None
    quantize: Annotated[str, one_of("none", "int8", "nf4")] = "none"
    quantize_skip: Annotated[tuple[str, ...], TEXTS] = ()


@dataclass(frozen=True)
class StreamConfig:
    """``[stream]``: the arguments of `streamer.wrap` of the same names; "auto" is chosen for the run's
    step."""

    layers: Annotated[str | tuple[str, ...] | None, ONE_OR_MORE] = None
    num_slots: Annotated[int | Literal["auto"] | None, COUNT_OR_AUTO] = None
    activations: Annotated[str | tuple[str, ...], POLICIES] = "recompute"
    micro_batch_size: Annotated[int | Literal["auto"] | None, COUNT_OR_AUTO] = None
    batch_dims: Annotated[dict[str, int | str] | None, TABLE] = None
    update: Annotated[str, one_of("step", "backward")] = "step"
    dtype: Annotated[str | None, DTYPE] = None
    device: Annotated[str | None, TEXT] = None
    host_threads: Annotated[int | None, COUNT] = None
    compile: Annotated[bool, FLAG] = False
    device_memory: Annotated[str | None, BYTES] = None
    host_memory: Annotated[str | None, BYTES] = None
    disk: Annotated[str | tuple[str, ...] | None, ONE_OR_MORE] = None
    gather_weights: Annotated[bool, FLAG] = False


@dataclass(frozen=True)
class TrainConfig:
    """``[train]`` for your own model: transformers' names and meanings. For a Hugging Face folder the table
    is `trl.SFTConfig`; these of its keys are read to plan the run."""

    output_dir: Annotated[str, TEXT] = "runs/streamer"
    max_steps: Annotated[int, COUNT_OR_0] = 0
    per_device_train_batch_size: Annotated[int, COUNT] = 8
    gradient_accumulation_steps: Annotated[int, COUNT] = 1
    max_length: Annotated[int, COUNT] = 1024
    learning_rate: Annotated[float, POSITIVE] = 2e-5
    warmup_steps: Annotated[float, STEPS] = 0
    lr_scheduler_type: Annotated[str, one_of("cosine", "linear", "constant", "cosine_with_min_lr")] = "cosine"
    lr_scheduler_kwargs: Annotated[dict[str, Any], TABLE] = field(default_factory=dict)
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.0
    adam_beta1: Annotated[float, BETA] = 0.9
    adam_beta2: Annotated[float, BETA] = 0.999
    adam_epsilon: Annotated[float, POSITIVE] = 1e-8
    max_grad_norm: Annotated[float, NOT_NEGATIVE] = 1.0
    seed: Annotated[int, COUNT_OR_0] = 42
    logging_steps: Annotated[int, COUNT] = 10
    eval_steps: Annotated[int, COUNT] = 100
    eval_batches: Annotated[int, COUNT] = 8
    save_steps: Annotated[int, COUNT_OR_0] = 0
    save_total_limit: Annotated[int, COUNT] = 2

    @property
    def batch_size(self) -> int:
        """Sequences of a step on one GPU."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps


@dataclass(frozen=True)
class DataConfig:
    """``[data]``: files, or a dataset of the datasets library."""

    paths: Annotated[tuple[str, ...], TEXTS] = ()
    val_paths: Annotated[tuple[str, ...], TEXTS] = ()
    val_fraction: Annotated[float, FRACTION] = 0.05
    dataset: Annotated[str | None, TEXT] = None
    name: Annotated[str | None, TEXT] = None
    split: Annotated[str, TEXT] = "train"
    columns: Annotated[dict[str, str], TABLE] = field(default_factory=dict)


@dataclass(frozen=True)
class OptimizerConfig:
    """``[optimizer]``: its class, and its options that `[train]` has no names for."""

    name: Annotated[str, TEXT] = "adamw"
    args: Annotated[dict[str, Any], TABLE] = field(default_factory=dict)
    state_dtype: Annotated[str, one_of("float32", "bfloat16", "int8")] = "float32"
    skip_nonfinite: Annotated[bool, FLAG] = True


@dataclass(frozen=True)
class SampleConfig:
    """``[sample]``: texts that the model writes after prompts, to the terminal and ``samples.jsonl``."""

    prompts: Annotated[tuple[Any, ...], PROMPTS] = ()
    chat: Annotated[bool, FLAG] = False
    every: Annotated[int, COUNT_OR_0] = 0
    tokens: Annotated[int, COUNT_OR_0] = 64
    temperature: Annotated[float, NOT_NEGATIVE] = 0.8
    top_k: Annotated[int, COUNT_OR_0] = 0


@dataclass(frozen=True)
class Config:
    """A run. ``train`` has the keys of ``[train]`` that streamer reads; ``trainer`` is the whole table."""

    model: ModelConfig
    stream: StreamConfig = field(default_factory=StreamConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    lora: dict[str, Any] = field(default_factory=dict)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)


#: Tables that become dataclasses; the others pass through.
SECTIONS: dict[str, type[Any]] = {
    "model": ModelConfig,
    "stream": StreamConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "sample": SampleConfig,
}
PASSED = ("train", "lora", "callbacks")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in the TOML file ``path`` after ``overrides``, ``"table.key=TOML value"``; a string
    needs no quotes there.

    Raises ConfigError, in one line that names the remedy, for a file that cannot be read or is not TOML, an
    unknown table or key, and a value of another type.
    """
    where, tables = str(path), read_tables(Path(path), (*SECTIONS, *PASSED), overrides)
    found = {name: section(kind, name, tables.get(name, {}), where) for name, kind in SECTIONS.items()}
    trainer, lora = tables.get("train", {}), tables.get("lora", {})
    model: ModelConfig = found["model"]
    if model.path is None and model.factory is None:
        raise ConfigError(
            f"{where}: model.path is missing: set it to a Hugging Face folder (--model), or set model.factory"
        )
    own = trainer
    if model.path is not None:
        # SFTConfig checks its own keys, and has other defaults: streamer reads the size of a step
        sizes = ("max_steps", "max_length", "per_device_train_batch_size", "gradient_accumulation_steps")
        own = {key: trainer[key] for key in ("output_dir", *sizes) if trainer.get(key, -1) != -1}
    train = section(TrainConfig, "train", own, where)
    if model.path is None and not train.max_steps:
        raise ConfigError(f"{where}: train.max_steps is missing: set it to an integer of 1 or more")
    if lora and model.path is None:
        raise ConfigError(f"{where}: [lora] is for a Hugging Face folder: set model.path (--model)")
    if model.quantize != "none" and not lora:
        raise ConfigError(f"{where}: model.quantize is for the frozen base of [lora]: set lora.r, to 16 say")
    if found["stream"].update == "backward" and trainer.get("max_grad_norm", 1.0):
        raise ConfigError(
            f'{where}: stream.update = "backward" cannot clip gradients: set train.max_grad_norm = 0'
        )
    return Config(**found, train=train, lora=lora, callbacks=tables.get("callbacks", {}), trainer=trainer)


def with_keys(config: Config, **tables: Mapping[str, Any]) -> Config:
    """``config`` with changes to some keys of some tables: ``with_keys(config, stream={"num_slots": 3})``."""
    changed: dict[str, Any] = {}
    for name, keys in tables.items():
        before = getattr(config, name)
        changed[name] = {**before, **keys} if isinstance(before, dict) else replace(before, **keys)
    if "train" in tables:
        changed["trainer"] = {**config.trainer, **tables["train"]}
    return replace(config, **changed)


def dump_config(config: Config) -> str:
    """``config`` as TOML that `load_config` reads back to an equal one."""
    tables: dict[str, Any] = {}
    for name, kind in SECTIONS.items():
        usual, table = kind(), vars(getattr(config, name))
        tables[name] = {key: value for key, value in table.items() if value != getattr(usual, key)}
    tables |= {"train": config.trainer, "lora": config.lora, "callbacks": config.callbacks}
    return dump_tables({name: table for name, table in tables.items() if table})


# TOML


def read_tables(path: Path, known: Iterable[str], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The tables of a TOML file after ``overrides``; raises ConfigError for one that is not ``known``."""
    try:
        tables: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        folder = path if path.is_dir() else path.parent
        there = ", ".join(sorted(map(str, folder.glob("*.toml")))) or "none"
        raise ConfigError(f"{path}: {error.strerror}; TOML files in {folder}: {there}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not TOML in UTF-8: {error}") from None
    for override in overrides:
        _override(tables, override)
    for name, table in tables.items():
        if name not in known:
            raise ConfigError(f"{path}: unknown table [{name}]; {nearest(name, known)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name} must be a table: write [{name}] and its keys below")
    return tables


#: A string without quotes, which a shell removes.
BARE = re.compile(r"\s*[\w./~-][^\n\"'\[\]{}#=]*")


def _override(tables: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    *path, key = map(str.strip, name.split("."))
    if not equals or not path:
        raise ConfigError(f"--set {override!r} must be table.key=value, such as train.max_steps=100")
    try:
        (value,) = tomllib.loads(f"value = {text}").values()
    except (ValueError, RecursionError):
        if not BARE.fullmatch(text):
            remedy = f"quote a string: {shlex.quote(f'{name}={toml_value(text)}')}"
            raise ConfigError(f"--set {override!r}: not a TOML value; {remedy}") from None
        value = text.strip()
    for part in path:
        tables = tables.setdefault(part, {})
        if not isinstance(tables, dict):
            raise ConfigError(f"--set {override!r}: {part} is not a table; set {part} itself")
    tables[key] = value


def section(
    kind: type[Any], name: str, table: Mapping[str, Any], where: str, kinds: Mapping[str, Kind] | None = None
) -> Any:
    """The dataclass ``kind`` of a table; the `Kind` in each annotation, or in ``kinds``, checks its values.
    Raises ConfigError for a key that is unknown or missing, and for a value of another kind."""
    if kinds is None:
        hints = get_type_hints(kind, include_extras=True)
        kinds = {key: hint.__metadata__[0] for key, hint in hints.items()}
    values = {}
    for key, value in table.items():
        if key not in kinds:
            raise ConfigError(f"{where}: unknown key {key!r} in [{name}]; {nearest(key, kinds)}")
        if not kinds[key].accepts(value):
            raise ConfigError(f"{where}: {name}.{key} must be {kinds[key].words}, not {toml_value(value)}")
        values[key] = kinds[key].convert(value)
    for item in fields(kind):
        if item.default is MISSING and item.default_factory is MISSING and item.name not in values:
            raise ConfigError(f"{where}: {name}.{item.name} is missing: set it to {kinds[item.name].words}")
    return kind(**values)


def dump_tables(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """A TOML file of these tables, each key on one line. A None is left out."""
    return "\n".join("\n".join([f"[{name}]", *_pairs(table), ""]) for name, table in tables.items())


def toml_value(value: Any) -> str:
    """A value in TOML, on one line."""
    if isinstance(value, str):  # JSON's escapes are valid in TOML, but JSON does not escape DEL
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool | int | float):
        return repr(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(_pairs(value)) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return str(value.isoformat())  # a date, a time or both


def quoted(key: str, value: Any) -> str:
    """The argument of ``--set`` for a key and its value, to be pasted into a shell."""
    bare = isinstance(value, str) and BARE.fullmatch(value) and not _is_toml(value)
    return shlex.quote(f"{key}={value if bare else toml_value(value)}")


def _is_toml(text: str) -> bool:
    try:
        tomllib.loads(f"value = {text}")
    except ValueError:
        return False
    return True


def _pairs(table: Mapping[str, Any]) -> list[str]:
    keys = {key: key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key) for key in table}
    return [f"{keys[key]} = {toml_value(value)}" for key, value in table.items() if value is not None]


#: Arguments of Python in the library's messages, and the keys that set them.
KEYS = {
    **{item.name: f"stream.{item.name}" for item in fields(StreamConfig)},
    "state_dtype": "optimizer.state_dtype",
    "lr": "train.learning_rate",
    "model_class": "model.factory",
    "config": "model.args",
    "init": "model.init",
    "quantize": "model.quantize",
    "skip": "model.quantize_skip",
}


def in_keys(message: str) -> str:
    """A ``message`` of the library with keys in place of the Python arguments that they set: arguments before
    a ``=``, and those that are not English words."""

    def key(found: re.Match[str]) -> str:
        return KEYS.get(found[1], found[1])

    message = re.sub(r"(?:streamer\.)?(?:wrap|from_pretrained)\((\w+)=\.\.\.\)", key, message)
    message = re.sub(r"\btorch\.(float32|bfloat16|float16|int8)\b", r"\1", message)
    names = "|".join(name if "_" in name else f"{name}(?==(?!=))" for name in KEYS)
    no_value = r"(?:=(?=[\s,;:.)]|$))?"
    return re.sub(rf"(?<![\w./'\"])({names})\b(?![\w.(]){no_value}", key, message)
