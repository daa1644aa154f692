"""The configuration of a run: a TOML file with a table for each part of it, read by `load_config`.

    [model]      path (a Hugging Face folder or hub id), or factory and args of your own model
    [stream]     arguments of streamer.wrap
    [train]      trl.SFTConfig; for your own model the keys of TrainConfig, with the same names
    [lora]       peft.LoraConfig
    [data]       files or a dataset
    [optimizer]  the optimizer, and its options that [train] has no names for
    [sample]     prompts that the model answers during training
    [callbacks]  NAME = {arguments}, callbacks of transformers

A relative path is relative to the folder in which the command runs.
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
OPTIMIZER = string(
    'a name, or a module and a class in it ("lion", "schedulefree:SGDScheduleFree")', r"[\w.]+(:\w+)?"
)
METHOD = string("a string that can name a method", r"[A-Za-z_]\w*")
DTYPE = one_of("float32", "bfloat16", "float16")
TEXTS = array("an array of strings, none empty", TEXT, sizes=MANY)
ONE_OR_MORE = either("a string or an array of strings, none empty", TEXT, TEXTS)
STEPS = either("a number of steps, or a share of them in (0, 1)", COUNT_OR_0, FRACTION)
COUNT_OR_AUTO = either('an integer of 1 or more, or "auto"', COUNT, one_of("auto"))
BYTES = string('a string of a number and its unit, such as "16GiB"', r"\d+(\.\d+)?\s*(k|[KMGT]i?)?B")
BATCH_DIMS = Kind(
    'a table from names of arguments, or paths or globs of lists of layers, to integers, or "none"',
    lambda value: TABLE.accepts(value) and all(type(x) is int or x == "none" for x in value.values()),
)
MESSAGE = Kind(
    "a message",
    lambda value: (
        isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))
    ),
)
PROMPTS = array(
    'an array of texts and of chats: [{role = "user", content = "Hello"}]',
    either("a text or a chat", TEXT, array("messages", MESSAGE, sizes=range(1, 2**31))),
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


@dataclass(frozen=True)
class ModelConfig:
    """``[model]``: a pretrained model by its folder, or a function that builds one."""

    path: Annotated[
        str | None, TEXT, "a Hugging Face folder, or the id of a model on the hub (`--model`)"
    ] = None
    factory: Annotated[
        str | None, FACTORY, "builds the model; with `path` its class, if config.json does not"
    ] = None
    args: Annotated[dict[str, Any], TABLE, "of `factory`; with `path` changes of the folder's config"] = (
        field(default_factory=dict)
    )
    init: Annotated[
        str | None,
        METHOD,
        "method that initialises one module. With it the model is built without values and initialised one "
        "layer at a time",
    ] = None
    quantize: Annotated[
        str,
        one_of("none", "int8", "nf4"),
        "quantize the linear layers and experts of the frozen base of `[lora]`: to 8 bits by torchao, to 4 "
        "by bitsandbytes. A folder that is already quantized is read unchanged",
    ] = "none"
    quantize_skip: Annotated[
        tuple[str, ...], TEXTS, "regular expressions: layers with a matching name are not quantized"
    ] = ()


@dataclass(frozen=True)
class StreamConfig:
    """``[stream]``: the arguments of `streamer.wrap` of the same names; "auto" is chosen for the run's
    step."""

    layers: Annotated[
        str | tuple[str, ...] | None, ONE_OR_MORE, "lists of layers, or globs; found by default"
    ] = None
    num_slots: Annotated[int | Literal["auto"] | None, COUNT_OR_AUTO, "layers on the device at a time"] = None
    activations: Annotated[
        str | tuple[str, ...],
        either("a string, or an array of one for each layer", TEXT, TEXTS),
        '"recompute", "recompute+offload", "keep" or "auto"',
    ] = "recompute"
    micro_batch_size: Annotated[
        int | Literal["auto"] | None, COUNT_OR_AUTO, "sequences that a layer runs at a time"
    ] = None
    batch_dims: Annotated[dict[str, int | str] | None, BATCH_DIMS, "dimension of the batch in arguments"] = (
        None
    )
    update: Annotated[str, one_of("step", "backward"), "when layers are updated"] = "step"
    dtype: Annotated[str | None, DTYPE, "of weights on the device; that of the model by default"] = None
    device: Annotated[str | None, TEXT, '"cuda", "cuda:1" or "cpu"; default: CUDA if there is one'] = None
    host_threads: Annotated[int | None, COUNT, "threads of the update on the host"] = None
    compile: Annotated[bool, FLAG, "compile layers by torch.compile"] = False
    device_memory: Annotated[str | None, BYTES, "the most that the run may take of a GPU, such as 16GiB"] = (
        None
    )
    host_memory: Annotated[
        str | None,
        BYTES,
        "the most that the run may take of host memory, all ranks together; default: what is free",
    ] = None
    disk: Annotated[
        str | tuple[str, ...] | None, ONE_OR_MORE, "a folder, or folders on several drives, to spill to"
    ] = None
    gather_weights: Annotated[bool, FLAG, "ranks copy a part of each layer and all-gather it (NVLink)"] = (
        False
    )


@dataclass(frozen=True)
class TrainConfig:
    """``[train]`` for your own model: transformers' names and meanings. For a Hugging Face folder the table
    is `trl.SFTConfig`; these of its keys are read to plan the run."""

    output_dir: Annotated[str, TEXT, "folder of the run; a number is added if it exists"] = "runs/streamer"
    max_steps: Annotated[int, COUNT_OR_0, "updates"] = 0
    per_device_train_batch_size: Annotated[int, COUNT, "sequences of a forward, on each GPU"] = 8
    gradient_accumulation_steps: Annotated[int, COUNT, "forwards and backwards before an update"] = 1
    max_length: Annotated[int, COUNT, "tokens of a sequence"] = 1024
    learning_rate: Annotated[float, POSITIVE, "after the warm-up"] = 2e-5
    warmup_steps: Annotated[float, STEPS, "steps, or a share of them, in which the rate rises linearly"] = 0
    lr_scheduler_type: Annotated[
        str, one_of("cosine", "linear", "constant", "cosine_with_min_lr"), "how the rate decays"
    ] = "cosine"
    lr_scheduler_kwargs: Annotated[dict[str, Any], TABLE, "min_lr of cosine_with_min_lr"] = field(
        default_factory=dict
    )
    weight_decay: Annotated[float, NOT_NEGATIVE, "decoupled from the gradient"] = 0.0
    adam_beta1: Annotated[float, BETA, "of the average of gradients"] = 0.9
    adam_beta2: Annotated[float, BETA, "of the average of their squares"] = 0.999
    adam_epsilon: Annotated[float, POSITIVE, "added to the root of the squares"] = 1e-8
    max_grad_norm: Annotated[float, NOT_NEGATIVE, "norm that gradients are clipped to; 0: none"] = 1.0
    seed: Annotated[int, COUNT_OR_0, "of weights, batches and samples"] = 42
    logging_steps: Annotated[int, COUNT, "steps between lines, if output is not a terminal"] = 10
    eval_steps: Annotated[int, COUNT, "steps between validations"] = 100
    eval_batches: Annotated[int, COUNT, "batches of a validation"] = 8
    save_steps: Annotated[int, COUNT_OR_0, "steps between checkpoints; 0: at the end only"] = 0
    save_total_limit: Annotated[int, COUNT, "checkpoints to keep"] = 2

    @property
    def batch_size(self) -> int:
        """Sequences of a step on one GPU."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps


@dataclass(frozen=True)
class DataConfig:
    """``[data]``: files, or a dataset of the datasets library."""

    paths: Annotated[
        tuple[str, ...],
        TEXTS,
        "files or folders (`--data`): text, JSON lines, Parquet; for your own model text or tokens "
        "(`.bin`, `.npy`). None: the Python standard library, for your own model only",
    ] = ()
    val_paths: Annotated[tuple[str, ...], TEXTS, "files for validation, instead of a share"] = ()
    val_fraction: Annotated[float, FRACTION, "share of the data for validation"] = 0.05
    dataset: Annotated[str | None, TEXT, "instead of `paths`: a dataset's name on the hub, or its folder"] = (
        None
    )
    name: Annotated[str | None, TEXT, "configuration of the dataset"] = None
    split: Annotated[str, TEXT, "of the dataset"] = "train"
    columns: Annotated[dict[str, str], TABLE, 'new names of columns: {question = "prompt"}'] = field(
        default_factory=dict
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """``[optimizer]``: its class, and its options that `[train]` has no names for."""

    name: Annotated[
        str, OPTIMIZER, "adamw, lion, muon, sgd, adafactor, adagrad, rmsprop, or module:Class"
    ] = "adamw"
    args: Annotated[dict[str, Any], TABLE, "options of the class: {momentum = 0.9}"] = field(
        default_factory=dict
    )
    state_dtype: Annotated[
        str,
        one_of("float32", "bfloat16", "int8"),
        "of adamw's moments, with bf16 weights: 8, 4 or 2 bytes a parameter",
    ] = "float32"
    skip_nonfinite: Annotated[
        bool, FLAG, "adamw skips steps with non-finite gradients; else they are an error"
    ] = True


@dataclass(frozen=True)
class SampleConfig:
    """``[sample]``: texts that the model writes after prompts, to the terminal and ``samples.jsonl``."""

    prompts: Annotated[tuple[Any, ...], PROMPTS, "texts, and chats for the tokenizer's template"] = ()
    chat: Annotated[bool, FLAG, "a text is the user's message in a chat"] = False
    every: Annotated[int, COUNT_OR_0, "steps between samples; 0: only at the end"] = 0
    tokens: Annotated[int, COUNT_OR_0, "the most tokens written after a prompt"] = 64
    temperature: Annotated[float, NOT_NEGATIVE, "divides the logits; 0: always the most likely token"] = 0.8
    top_k: Annotated[int, COUNT_OR_0, "draw from this many most likely tokens; 0: from all"] = 0


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

#: Keys of version 0.1, and their replacements.
MOVED = {
    "run.name": "train.output_dir",
    "run.out": "train.output_dir",
    "run.steps": "train.max_steps",
    "run.epochs": "train.num_train_epochs",
    "run.seed": "train.seed",
    "run.eval_every": "train.eval_steps",
    "run.eval_batches": "train.eval_batches",
    "run.save_every": "train.save_steps",
    "run.keep": "train.save_total_limit",
    "run.keep_best": "train.load_best_model_at_end",
    "run.patience": "callbacks.EarlyStoppingCallback = {early_stopping_patience = ...}",
    "run.report": "train.report_to",
    "run.sample_tokens": "sample.tokens",
    "run.nonfinite": "optimizer.skip_nonfinite",
    "model.pretrained": "model.path",
    "data.context": "train.max_length",
    "data.batch_size": "train.per_device_train_batch_size",
    "data.accumulate": "train.gradient_accumulation_steps",
    "data.packing": "train.packing",
    "data.tokenizer": "the tokenizer in model.path",
    "optimizer.lr": "train.learning_rate",
    "optimizer.betas": "train.adam_beta1 and train.adam_beta2",
    "optimizer.eps": "train.adam_epsilon",
    "optimizer.weight_decay": "train.weight_decay",
    "optimizer.grad_clip": "train.max_grad_norm",
    "optimizer.warmup_steps": "train.warmup_steps",
    "optimizer.schedule": "train.lr_scheduler_type",
    "optimizer.min_lr": "train.lr_scheduler_kwargs = {min_lr = ...}",
    "optimizer.decay_steps": "train.lr_scheduler_kwargs = {num_decay_steps = ...}",
    "memory.host": "stream.host_memory",
    "memory.disk": "stream.disk",
    "lora.rank": "lora.r",
    "lora.alpha": "lora.lora_alpha",
    "lora.dropout": "lora.lora_dropout",
    "lora.targets": "lora.target_modules",
    "lora.rank_stabilized": "lora.use_rslora",
}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in the TOML file ``path`` after ``overrides``, ``"table.key=TOML value"``; a string
    needs no quotes there.

    Raises ConfigError, in one line that names the remedy, for a file that cannot be read or is not TOML, an
    unknown table or key, and a value of another type.
    """
    try:
        return _config(str(path), read_tables(Path(path), (*SECTIONS, *PASSED), overrides, MOVED))
    except ConfigError as error:
        if not overrides or str(error).startswith("--set "):
            raise
        raise ConfigError(f"{error} (with {' '.join(map(shlex.quote, overrides))})") from None


def _config(where: str, tables: Mapping[str, dict[str, Any]]) -> Config:
    found = {name: section(kind, name, tables.get(name, {}), where) for name, kind in SECTIONS.items()}
    trainer, lora = tables.get("train", {}), tables.get("lora", {})
    model: ModelConfig = found["model"]
    if model.path is None and model.factory is None:
        raise ConfigError(
            f"{where}: model.path is missing: set it to a Hugging Face folder (--model), or set model.factory"
        )
    own = {key: value for key, value in trainer.items() if key in TrainConfig.__dataclass_fields__}
    if model.path is not None:
        # SFTConfig checks its own keys, and has other defaults: streamer reads the size of a step
        sizes = (
            "output_dir",
            "max_steps",
            "max_length",
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
        )
        own = {key: own[key] for key in sizes if key in own and own[key] != -1}
    train = section(TrainConfig, "train", own if model.path is not None else trainer, where)
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


def read_tables(
    path: Path, known: Iterable[str], overrides: Sequence[str] = (), moved: Mapping[str, str] | None = None
) -> dict[str, Any]:
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
        keys = [f"{name}.{key}" for key in table] if isinstance(table, dict) else []
        if old := next((key for key in keys if moved and key in moved), None):
            raise ConfigError(f"{path}: {old} is {(moved or {})[old]} now")
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
        name, then = found.groups()
        if then == "=None":
            return f"no {KEYS[name]}"
        return KEYS[name] + ("=" if then == "=" and found.string[found.end() :][:1].strip(" ,;:.)") else "")

    message = re.sub(r"(?:streamer\.)?(?:wrap|from_pretrained)\((\w+)=\.\.\.\)", r"\1=", message)
    message = re.sub(r"\btorch\.(float32|bfloat16|float16|int8)\b", r"\1", message)
    before, names = r"(?<![\w./'\"])", "|".join(KEYS)  # not within a name, a path or quotes
    no_words = "|".join(name for name in KEYS if "_" in name)
    message = re.sub(rf"{before}({names})(=None\b|=(?!=)|(?=\[\d))", key, message)
    return re.sub(rf"{before}({no_words})()\b(?![\w.(='])", key, message)
