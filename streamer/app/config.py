"""A run as one TOML file: read strictly into frozen dataclasses, and written back in full.

Tables are checked key by key, and written as TOML, which tomllib only reads.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from streamer.config_values import (
    BETA,
    BETAS,
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


def dump_tables(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """A TOML file of these sections, each key on one line. A None is left out."""
    return "\n".join("\n".join([f"[{name}]", *_pairs(table), ""]) for name, table in tables.items())


def toml_value(value: Any) -> str:
    """A value of a TOML file, as tomllib gives it, in TOML and on one line."""
    if isinstance(value, str):  # JSON's escapes are TOML's too, but JSON lets a DEL stand as it is
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool | int | float):
        return repr(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(_pairs(value)) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return str(value.isoformat())  # a date, a time or both


def quoted(key: str, value: Any) -> str:
    """What follows ``--set`` for a key (``section.key``) and its value, to be pasted into a shell."""
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


def _is_message(value: Any) -> bool:
    """Whether it is a message of a chat."""
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


TEXT = string("a string that is not empty", r"(?s).+")
FOLDER = string("a string that can name a folder", r"\w[\w.+-]*")
FACTORY = string('a module and a callable in it, such as "models.gpt2:GPT"', r"\w[\w.]*:\w+")
DTYPE = one_of("float32", "bfloat16", "float16")
TEXTS = array("an array of strings, none empty", TEXT, sizes=range(sys.maxsize))
FOLDERS = either(
    "a folder, or an array of folders on different drives, none empty",
    TEXT,
    array("an array of folders", TEXT, sizes=range(1, sys.maxsize)),
)
LAYERS = either("a string or an array of strings, none empty", TEXT, TEXTS)
ACTIVATIONS = either("a string, or an array of one for each layer", TEXT, TEXTS)
STEPS = either("a number of steps, or a share of them in (0, 1)", COUNT_OR_0, FRACTION)
COUNT_OR_AUTO = either('an integer of 1 or more, or "auto"', COUNT, one_of("auto"))
BATCH_DIMS = Kind(
    'a table from names of arguments, or paths or globs of lists of layers, to integers, or "none"',
    lambda value: TABLE.accepts(value) and all(type(x) is int or x == "none" for x in value.values()),
)
METHOD = string("a string that can name a method", r"[A-Za-z_]\w*")
REPORTS = array('an array of "tensorboard", "wandb" or both', one_of("tensorboard", "wandb"), sizes=range(3))
MESSAGES = Kind(
    "an array of messages",
    lambda value: isinstance(value, list) and bool(value) and all(map(_is_message, value)),
)
PROMPTS = array(
    'an array of texts, none empty, and of chats: [{role = "user", content = "Hello"}]',
    either("a text or a chat", TEXT, MESSAGES),
    sizes=range(sys.maxsize),
)
BYTES = string('a string of a number and its unit, such as "16GiB"', r"\d+(\.\d+)?\s*(k|[KMGT]i?)?B")

#: The deepest nesting of tables and arrays that is read, far below Python's recursion limit.
MOST_LEVELS = 32


def _unreadable(value: Any, name: str = "", level: int = 0) -> str:
    """Why ``value`` cannot be used: a part is nested too deeply, or an integer is beyond TOML's 64 bits.

    Empty if it can.
    """
    if isinstance(value, dict | list):
        if level > MOST_LEVELS:
            return f"{name} is nested in more than {MOST_LEVELS} tables and arrays: flatten it"
        items = value.items() if isinstance(value, dict) else enumerate(value)
        faults = (_unreadable(item, f"{name}.{key}".lstrip("."), level + 1) for key, item in items)
        return next(filter(None, faults), "")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return f"{name} is an integer of more than 64 bits: give a smaller one"
    return ""


class ConfigError(ValueError):
    """A config that cannot be used: one line with the file, the key and the remedy. A ``table`` may follow
    the line."""

    def __init__(self, message: str, *, table: str = "") -> None:
        line = " ".join(message.splitlines())  # names and overrides may hold line breaks
        super().__init__("\n".join([line, table] if table else [line]))

    @staticmethod
    def of(section: str, error: Exception) -> ConfigError:
        """The error where streamer refuses a value of ``section``, `in_keys`, with the table of a
        MemoryError."""
        line, _, table = (
            str(error).partition("\n") if isinstance(error, MemoryError) else (str(error), "", "")
        )
        return ConfigError(f"{section}: {in_keys('; '.join([line, *notes(error)]))}", table=table)


def read_sections(path: Path, known: Iterable[str], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The sections of a TOML file after ``overrides`` of the form ``section.key=TOML value``.

    Raises ConfigError for a file that cannot be read or is not TOML, a bad override, a section that is not
    ``known``, and a value that no key may hold.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        folder, where = (path, "it") if path.is_dir() else (path.parent, "its folder")
        there = ", ".join(sorted(map(str, folder.glob("*.toml")))) or "none"
        raise ConfigError(f"{path}: {error.strerror}; TOML files in {where}: {there}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not TOML in UTF-8, correct it there: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: tables or arrays are nested too deeply: flatten them") from None
    for override in overrides:
        _override(tables, override)
    if fault := _unreadable(tables):
        raise ConfigError(f"{path}: {fault}")
    for name, table in tables.items():
        if name not in known:
            raise ConfigError(f"{path}: unknown section [{name}]; {nearest(name, known)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name} must be a section: write [{name}] and its keys below")
    return tables


#: A value of an override that is a string though it has no quotes.
BARE = re.compile(r"\s*[\w./~-][^\n\"'\[\]{}#=]*")


def _override(tables: dict[str, Any], override: str) -> None:
    """Put ``section.key=TOML value`` into ``tables``. What is not TOML, such as a word without quotes, which
    a shell takes away, is a string."""
    name, equals, text = override.partition("=")
    *path, key = map(str.strip, name.split("."))
    if not equals or not path:
        raise ConfigError(f"override {override!r} must be section.key=value, such as run.steps=100")
    try:
        (value,) = tomllib.loads(f"value = {text}").values()
    except (ValueError, RecursionError):
        if not BARE.fullmatch(text):
            remedy = f"quote a string: {shlex.quote(f'{name}={toml_value(text)}')}"
            raise ConfigError(f"override {override!r}: not a TOML value; {remedy}") from None
        value = text.strip()
    for part in path:
        tables = tables.setdefault(part, {})
        if not isinstance(tables, dict):
            raise ConfigError(f"override {override!r}: {part} is not a table; set {part} itself")
    tables[key] = value


def section(
    made: type[Any],
    name: str,
    table: Mapping[str, Any],
    where: str,
    *,
    kinds: Mapping[str, Kind] | None = None,
) -> Any:
    """The dataclass ``made`` of the table ``name``, whose keys are checked one by one.

    What a key may hold is its annotation's `Kind`, or that of ``kinds``. Raises ConfigError, ``where`` first,
    for a key that is unknown or missing, and for a value of another kind.
    """
    if kinds is None:
        hints = get_type_hints(made, include_extras=True)
        kinds = {key: hint.__metadata__[0] for key, hint in hints.items()}
    values = {}
    for key, value in table.items():
        if key not in kinds:
            raise ConfigError(f"{where}: unknown key {key!r} in [{name}]; {nearest(key, kinds)}")
        if not kinds[key].accepts(value):
            raise ConfigError(f"{where}: {name}.{key} must be {kinds[key].words}, not {toml_value(value)}")
        values[key] = kinds[key].convert(value)
    for item in fields(made):
        if item.default is MISSING and item.default_factory is MISSING and item.name not in values:
            raise ConfigError(f"{where}: {name}.{item.name} is missing: give {kinds[item.name].words}")
    return made(**values)


@dataclass(frozen=True)
class RunConfig:
    """``[run]``: how long the run is, how often it is validated and saved, and where its files go."""

    name: Annotated[str, FOLDER, "of the run's folder in `out`; `NAME-2` and so on where that is taken"]
    steps: Annotated[
        int, COUNT_OR_0, "updates; 0 leaves it to `epochs`. With both, what ends first ends the run"
    ] = 0
    seed: Annotated[int, COUNT_OR_0, "of the first values of a model, of batches and of samples"] = 0
    eval_every: Annotated[int, COUNT, "steps from one validation to the next"] = 100
    eval_batches: Annotated[int, COUNT, "batches of a validation, spaced evenly over its data"] = 8
    sample_tokens: Annotated[
        int,
        COUNT_OR_0,
        "tokens that the model writes at the end, after the beginning of the validation text; 0: none",
    ] = 256
    out: Annotated[str, TEXT, "the folder that runs' folders are in"] = "runs"
    save_every: Annotated[
        int,
        COUNT_OR_0,
        "steps from one checkpoint to the next; 0: only when the run is stopped, and at its end",
    ] = 0
    keep: Annotated[int, COUNT, "checkpoints that are kept: the last ones"] = 2
    save_failure: Annotated[
        str,
        one_of("stop", "warn"),
        'what a checkpoint that cannot be written does: "stop" the run, or "warn" and go on. '
        "Before it stops, and at the end, another folder is asked for on a terminal",
    ] = "stop"
    nonfinite: Annotated[
        str,
        one_of("skip", "stop", "back"),
        'what follows a gradient that is NaN or infinite: "skip" the step, "stop", or go "back" '
        "to the last checkpoint and draw other batches from there",
    ] = "skip"
    save_wait: Annotated[
        int,
        COUNT_OR_0,
        "minutes for which writing is tried again where there is no terminal; then the folder for "
        "temporary files is taken",
    ] = 60
    keep_best: Annotated[
        bool,
        FLAG,
        "also save after each validation whose loss is the lowest so far, and keep that "
        "checkpoint beside the others",
    ] = False
    patience: Annotated[
        int,
        COUNT_OR_0,
        "validations in a row without a lower loss after which the run ends early; 0: it never "
        "does. The one before the first step does not count",
    ] = 0
    report: Annotated[
        tuple[str, ...],
        REPORTS,
        "what else gets the values of `metrics.jsonl`: TensorBoard, Weights & Biases",
    ] = ()
    epochs: Annotated[
        int,
        COUNT_OR_0,
        "how often the run goes through all of its data, in a new order each time; 0 leaves it to `steps`",
    ] = 0


@dataclass(frozen=True)
class ModelConfig:
    """``[model]``: a function of the user's that makes the model, or the folder of a pretrained one."""

    factory: Annotated[
        str | None,
        FACTORY,
        "what makes the model; with `pretrained` its class, if it is not that of the folder's config",
    ] = None
    args: Annotated[
        dict[str, Any],
        TABLE,
        "keyword arguments of `factory`; with `pretrained` changes of the folder's config",
    ] = field(default_factory=dict)
    init: Annotated[
        str | None,
        METHOD,
        "the method that initialises one module of the model. With it the model is built without "
        "values and initialised a layer at a time (`streamer.wrap(init=...)`); with `pretrained` "
        "it initialises what is not in the files",
    ] = None
    pretrained: Annotated[
        str | None, TEXT, "a Hugging Face folder with the model, and its tokenizer, to go on from (`--model`)"
    ] = None
    quantize: Annotated[
        str,
        one_of("none", "int8", "nf4"),
        "quantize the linear layers and experts of the frozen base of `[lora]` while it is read: to 8 bits "
        "by torchao, to 4 by bitsandbytes (`pip install '.[quantize]'`). A folder that is quantized already "
        "is read as it is",
    ] = "none"
    quantize_skip: Annotated[
        tuple[str, ...],
        TEXTS,
        "regular expressions; linear layers and experts are not quantized if one is found in their name",
    ] = ()


@dataclass(frozen=True)
class DataConfig:
    """``[data]``: what is learnt from, and in which batches. A token is a byte, or one of a tokenizer's."""

    context: Annotated[int, COUNT, "tokens in a sequence"]
    batch_size: Annotated[int, COUNT, "sequences that a step learns from"]
    tokenizer: Annotated[
        str | None,
        TEXT,
        "a folder with a tokenizer; with a pretrained model it is the model's if this is not given",
    ] = None
    paths: Annotated[
        tuple[str, ...],
        TEXTS,
        "text, JSON lines, files of tokens (`.bin`, `.npy`), or folders of them (`--data`); none: "
        "the Python standard library, and for a pretrained model nothing, which is refused",
    ] = ()
    val_fraction: Annotated[float, FRACTION, "the share of the data that is for validation"] = 0.05
    val_paths: Annotated[tuple[str, ...], TEXTS, "data for validation, in place of a share"] = ()
    cache: Annotated[
        str | None,
        TEXT,
        "the folder where tokens of large data are kept; one in the user's cache if it is not given",
    ] = None
    packing: Annotated[
        bool, FLAG, "put several short conversations into a row, none of which sees another"
    ] = True
    accumulate: Annotated[
        int,
        COUNT,
        "passes, each a forward and a backward of its own, in which a step takes its sequences "
        "before it updates once. Changes what a step takes, not what it learns; "
        "`stream.micro_batch_size` does so at less cost where layers can be cut",
    ] = 1

    @property
    def pass_size(self) -> int:
        """Sequences of a pass."""
        return -(-self.batch_size // self.accumulate)


@dataclass(frozen=True)
class StreamConfig:
    """``[stream]``: the arguments of ``streamer.wrap`` of the same names. What is not given is left to
    ``wrap``. "auto" is chosen for the run's own step."""

    layers: Annotated[
        str | tuple[str, ...] | None,
        LAYERS,
        "the name of the layers' list in the model, a glob of modules (`model.layers.*.mlp`), or several of "
        "them; found if it is not given",
    ] = None
    num_slots: Annotated[
        int | Literal["auto"] | None,
        COUNT_OR_AUTO,
        "layers whose weights are on the device at a time; if it is not given two, and more where "
        "`device_memory` leaves room",
    ] = None
    activations: Annotated[
        str | tuple[str, ...],
        ACTIVATIONS,
        'what is kept from forward to backward: "recompute" (each layer\'s input), '
        '"recompute+offload" (that in host memory), "keep" (all that autograd saves)',
    ] = "recompute"
    micro_batch_size: Annotated[
        int | Literal["auto"] | None,
        COUNT_OR_AUTO,
        "sequences that a layer runs at a time while its weights are on the device; all of them "
        "if it is not given",
    ] = None
    batch_dims: Annotated[
        dict[str, int | str] | None,
        BATCH_DIMS,
        "the dimension of the batch in arguments of layers, by their names, or in the hidden states "
        "of a list of layers, by its path or a glob, where it is not the first or not clear; "
        '"none": such an argument, or list, is not cut',
    ] = None
    update: Annotated[
        str,
        one_of("step", "backward"),
        'update all layers in the "step", or each in "backward" as soon as it has its gradient, '
        "of which only a few are held then. That allows no clipping",
    ] = "step"
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        DTYPE,
        "of weights on the device; the masters that are updated are exact fp32. If it is not "
        "given that of the model; fp16 files are streamed in bf16. With float16 the loss is "
        "scaled",
    ] = None
    device: Annotated[str | None, TEXT, '"cuda", "cuda:1" or "cpu"; CUDA where there is one'] = None
    host_threads: Annotated[
        int | None,
        COUNT,
        "threads of the update on the host; as many as there are cores, but for one, if it is not given",
    ] = None
    compile: Annotated[bool, FLAG, "put layers through torch.compile"] = False
    device_memory: Annotated[str | None, BYTES, "the most that the run may take of a GPU, such as 16GiB"] = (
        None
    )
    gather_weights: Annotated[
        bool,
        FLAG,
        "of several processes: each copies a part of each layer to its GPU, and the GPUs gather the parts "
        "from one another, which pays where they have links of their own (NVLink); else each copies it all",
    ] = False


@dataclass(frozen=True)
class MemoryConfig:
    """``[memory]``: what the model may take of host memory, and disk for the rest."""

    host: Annotated[
        str | None,
        BYTES,
        "the most that the model may take of host memory, such as 48GiB, in all processes of a run together; "
        "what is free if it is not given",
    ] = None
    disk: Annotated[
        str | tuple[str, ...] | None,
        FOLDERS,
        "a folder, or several on different drives, for what host memory has no room for; the processes of a "
        "run share what is there",
    ] = None


@dataclass(frozen=True)
class LoraConfig:
    """``[lora]``: with a ``rank`` a pretrained model's own weights stay as they are, and low-rank adapters
    beside its linear layers are trained (Hu et al., 2021, arXiv:2106.09685), through the peft library."""

    rank: Annotated[int, COUNT_OR_0, "of the adapters; 0: there are none, and the whole model is trained"] = 0
    alpha: Annotated[
        float | None,
        POSITIVE,
        "what adapters add is multiplied by `alpha` / `rank`; twice the rank if it is not given",
    ] = None
    dropout: Annotated[float, BETA, "of the adapters' inputs"] = 0.0
    targets: Annotated[
        str | tuple[str, ...],
        LAYERS,
        'the layers that are adapted: "all-linear" (all but the head), a regular expression, or '
        "the ends of their names",
    ] = "all-linear"
    rank_stabilized: Annotated[bool, FLAG, "multiply by `alpha` / sqrt(`rank`)"] = False


@dataclass(frozen=True)
class SampleConfig:
    """``[sample]``: what the model writes after prompts, to ``samples.jsonl`` and the terminal."""

    prompts: Annotated[
        tuple[Any, ...], PROMPTS, "texts, and chats, which are put into the tokenizer's template"
    ] = ()
    chat: Annotated[bool, FLAG, "a text is what a user says in a chat"] = False
    every: Annotated[int, COUNT_OR_0, "steps from one time to the next; 0: only at the end"] = 0
    tokens: Annotated[int, COUNT, "the most that is written after a prompt"] = 64
    temperature: Annotated[float, NOT_NEGATIVE, "divides the logits; 0: always the most likely token"] = 0.8
    top_k: Annotated[int, COUNT_OR_0, "a token is drawn from so many most likely ones; 0: from all"] = 0


@dataclass(frozen=True)
class OptimizerConfig:
    """``[optimizer]``: AdamW, clipping, and how the learning rate moves."""

    lr: Annotated[float, POSITIVE, "the learning rate after the warm-up"]
    betas: Annotated[tuple[float, float], BETAS, "of the averages of gradients and of their squares"] = (
        0.9,
        0.95,
    )
    eps: Annotated[float, POSITIVE, "added to the root of the squares"] = 1e-8
    weight_decay: Annotated[float, NOT_NEGATIVE, "decoupled from the gradient, as AdamW's is"] = 0.1
    grad_clip: Annotated[
        float, NOT_NEGATIVE, "the norm that all gradients together are clipped to; 0: none"
    ] = 1.0
    state_dtype: Annotated[
        str,
        one_of("float32", "bfloat16", "int8"),
        "of the moments, with bf16 weights: 8, 4 or 2 bytes a parameter",
    ] = "float32"
    warmup_steps: Annotated[
        int | float,
        STEPS,
        "steps in which the rate rises in a line to `lr`, or their share of the run, such as 0.1",
    ] = 0
    min_lr: Annotated[float, NOT_NEGATIVE, "where the rate falls to"] = 0.0
    schedule: Annotated[
        str,
        one_of("cosine", "linear", "constant", "wsd"),
        'after the warm-up "cosine" and "linear" fall until the run\'s end, "constant" stays, '
        '"wsd" stays and falls in a line in the end',
    ] = "cosine"
    decay_steps: Annotated[
        int | float | None,
        STEPS,
        'steps of that fall of "wsd", or their share of the run; a tenth of it if it is not given',
    ] = None


@dataclass(frozen=True)
class Config:
    """A whole run."""

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    stream: StreamConfig = field(default_factory=StreamConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Config:
    """The config in the TOML file ``path``, with ``overrides`` of the form ``section.key=TOML value``; a
    string needs no quotes there.

    Raises ConfigError, in one line that names the remedy, for a file that cannot be read or is not TOML, an
    unknown or missing section or key, a value of the wrong type or out of range, and a bad override.
    """
    try:
        return _loaded(Path(path), overrides)
    except ConfigError as error:
        if not overrides or str(error).startswith("override "):
            raise
        raise ConfigError(f"{error} (with {' '.join(map(shlex.quote, overrides))})") from None


def _loaded(path: Path, overrides: Sequence[str]) -> Config:
    where = str(path)
    known = get_type_hints(Config)
    tables = read_sections(path, known, overrides)
    config = Config(**{name: section(known[name], name, tables.get(name, {}), where) for name in known})
    if not config.run.steps and not config.run.epochs:
        raise ConfigError(f"{where}: run.steps is missing: give an integer of 1 or more, or run.epochs")
    if config.model.factory is None and config.model.pretrained is None:
        raise ConfigError(
            f"{where}: model.factory is missing: give {FACTORY.words}; or a pretrained model's folder as "
            "model.pretrained (--model)"
        )
    _check_batch(config, where)
    if config.lora.rank and config.model.pretrained is None:
        raise ConfigError(
            f"{where}: [lora] adapts a pretrained model: give its folder as model.pretrained (--model)"
        )
    if config.model.quantize != "none" and not config.lora.rank:
        raise ConfigError(
            f"{where}: model.quantize is for a frozen base, beside which adapters are trained: set "
            "lora.rank, to 16 say, or leave it out"
        )
    if config.model.quantize_skip and config.model.quantize == "none":
        raise ConfigError(f"{where}: model.quantize_skip without model.quantize does nothing: set that too")
    if config.lora != LoraConfig() and not config.lora.rank:
        raise ConfigError(f"{where}: [lora] without lora.rank does nothing: set it, to 16 say")
    if config.sample != SampleConfig() and not config.sample.prompts:
        raise ConfigError(f"{where}: [sample] without sample.prompts does nothing: give some")
    _check_schedule(config.optimizer, where)
    if config.run.steps and not config.run.epochs:
        check_steps(config.optimizer, config.run.steps, f"{where}: ")
    if config.stream.update == "backward" and config.optimizer.grad_clip:
        raise ConfigError(
            f'{where}: stream.update = "backward" has no norm to clip by: set optimizer.grad_clip = 0'
        )
    if config.stream.update == "backward" and config.stream.dtype == "float16":
        raise ConfigError(f"{where}: {FP16_IN_BACKWARD}")
    return config


def steps_of(given: float, steps: int) -> int:
    """A number of steps that may be given as a share of a run's ``steps``."""
    return round(given * steps) if isinstance(given, float) else given


def _check_schedule(given: OptimizerConfig, where: str) -> None:
    """Raise ConfigError for keys that contradict each other."""
    if given.min_lr > given.lr:
        raise ConfigError(f"{where}: optimizer.min_lr is above optimizer.lr, from which it decays; lower it")
    if given.min_lr and given.schedule == "constant":
        raise ConfigError(
            f'{where}: optimizer.schedule = "constant" never falls to optimizer.min_lr = {given.min_lr:g}: '
            "set that to 0, or take another schedule"
        )
    if given.decay_steps is not None and given.schedule != "wsd":
        raise ConfigError(
            f'{where}: optimizer.decay_steps is of optimizer.schedule = "wsd" and does nothing with '
            f'"{given.schedule}": leave it out'
        )


def check_steps(given: OptimizerConfig, steps: int, where: str = "") -> None:
    """Raise ConfigError where a run of so many ``steps`` ends before its warm-up does, or where its decay
    begins before that."""
    warmup = steps_of(given.warmup_steps, steps)
    if warmup and warmup >= steps:
        raise ConfigError(
            f"{where}optimizer.warmup_steps = {given.warmup_steps} does not end within the run's {steps} "
            "steps: lower it, to a share of them such as 0.1 say"
        )
    if given.decay_steps is not None and warmup + steps_of(given.decay_steps, steps) > steps:
        raise ConfigError(
            f"{where}optimizer.warmup_steps = {given.warmup_steps} and optimizer.decay_steps = "
            f"{given.decay_steps} are together more than the run's {steps} steps: lower one of them"
        )


#: What is wrong with updates in backward of weights in fp16.
FP16_IN_BACKWARD = (
    'stream.update = "backward" updates layers before it is known whether a gradient in fp16 has overflowed: '
    'set stream.dtype = "bfloat16", or stream.update = "step"'
)

#: Tokens of a step, and slices of its batch, beyond which a number is a mistake: not even planning them ends.
MOST_TOKENS, MOST_SLICES = 2**26, 2**14


def _check_batch(config: Config, where: str) -> None:
    """Raise ConfigError for a step that nobody means."""
    batch, micro = config.data, config.stream.micro_batch_size
    tokens = batch.batch_size * batch.context
    if tokens > MOST_TOKENS:
        raise ConfigError(
            f"{where}: data.batch_size = {batch.batch_size} sequences of data.context = {batch.context} are "
            f"{tokens:,} tokens a step, and {MOST_TOKENS:,} is the most: lower one of them"
        )
    if batch.accumulate > batch.batch_size:
        raise ConfigError(
            f"{where}: data.accumulate = {batch.accumulate} passes are more than the sequences of a step, "
            f"data.batch_size = {batch.batch_size}: lower the one or raise the other"
        )
    if batch.accumulate > 1 and config.stream.update == "backward":
        raise ConfigError(
            f"{where}: data.accumulate = {batch.accumulate} adds up gradients, and stream.update = "
            '"backward" keeps none: use stream.micro_batch_size in its place'
        )
    if isinstance(micro, int) and (slices := -(-batch.batch_size // micro)) > MOST_SLICES:
        raise ConfigError(
            f"{where}: stream.micro_batch_size = {micro} cuts data.batch_size = {batch.batch_size} into "
            f"{slices:,} slices, and {MOST_SLICES:,} are the most: raise the one or lower the other"
        )


def dump_config(config: Config) -> str:
    """``config`` as TOML that ``load_config`` reads back to an equal one; a None is left out."""
    tables = {item.name: vars(getattr(config, item.name)) for item in fields(config)}
    for name, usual in (("memory", MemoryConfig()), ("lora", LoraConfig()), ("sample", SampleConfig())):
        if getattr(config, name) == usual:
            del tables[name]
    return dump_tables(tables)


def in_keys(message: str) -> str:
    """A ``message`` of the library with keys of a config in place of the arguments of Python that they stand
    for: those that a value or a ``=`` follows, and those that are no words of English."""
    keys = {
        **{item.name: f"stream.{item.name}" for item in fields(StreamConfig)},
        **{item.name: f"optimizer.{item.name}" for item in fields(OptimizerConfig)},
        "host_memory": "memory.host",
        "disk": "memory.disk",
        "model_class": "model.factory",
        "config": "model.args",
        "init": "model.init",
        "quantize": "model.quantize",
        "skip": "model.quantize_skip",
    }

    def key(found: re.Match[str]) -> str:
        name, then = found.groups()
        if then == "=None":
            return f"no {keys[name]}"
        return keys[name] + ("=" if then == "=" and found.string[found.end() :][:1].strip(" ,;:.)") else "")

    message = re.sub(r"(?:streamer\.)?(?:wrap|from_pretrained)\((\w+)=\.\.\.\)", r"\1=", message)
    message = re.sub(r"\btorch\.(float32|bfloat16|float16|int8)\b", r"\1", message)
    # not within a name, a path or quotes
    before, names = r"(?<![\w./'\"])", "|".join(keys)
    no_words = "|".join(name for name in keys if "_" in name)
    message = re.sub(rf"{before}({names})(=None\b|=(?!=)|(?=\[\d))", key, message)
    return re.sub(rf"{before}({no_words})()\b(?![\w.(='])", key, message)
