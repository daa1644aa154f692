"""A run as one TOML file: read strictly into frozen dataclasses, and written back in full."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from streamer.app.kinds import (
    ACTIVATIONS,
    BATCH_DIMS,
    BYTES,
    COUNT_OR_AUTO,
    DTYPE,
    FACTORY,
    FOLDER,
    LAYERS,
    METHOD,
    NONFINITE,
    SAVE_FAILURE,
    STATE_DTYPE,
    TEXT,
    TEXTS,
    UPDATE,
    unreadable,
)
from streamer.app.sections import ConfigError as ConfigError
from streamer.app.sections import read_toml, section
from streamer.app.toml import toml_pairs, toml_value
from streamer.kinds import (
    BETAS,
    COUNT,
    COUNT_OR_0,
    FLAG,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    TABLE,
    nearest,
)


@dataclass(frozen=True)
class RunConfig:
    """``[run]``: how long, how often it is looked at and saved (in steps), and where its files go
    (``out/name``).

    ``save_every`` 0 saves only when the run is stopped; ``keep`` checkpoints are kept. ``save_failure``
    says what to do when one cannot be written. ``nonfinite`` says what a gradient that is NaN or infinite
    leads to: skip the step, stop, or go back to the last checkpoint and draw other batches from there.
    """

    name: Annotated[str, FOLDER]
    steps: Annotated[int, COUNT]
    seed: Annotated[int, COUNT_OR_0] = 0
    eval_every: Annotated[int, COUNT] = 100
    eval_batches: Annotated[int, COUNT] = 8
    sample_tokens: Annotated[int, COUNT_OR_0] = 256
    out: Annotated[str, TEXT] = "runs"
    save_every: Annotated[int, COUNT_OR_0] = 0
    keep: Annotated[int, COUNT] = 2
    save_failure: Annotated[str, SAVE_FAILURE] = "stop"
    nonfinite: Annotated[str, NONFINITE] = "skip"


@dataclass(frozen=True)
class ModelConfig:
    """``[model]``: the factory ``module:callable`` and the keyword arguments it is called with, or the folder
    of a pretrained model.

    ``init`` names the model's method that gives one of its modules first values. With it the model is built
    without any and gets them a layer at a time: see ``streamer.wrap(init=...)``. With ``pretrained``, see
    ``streamer.from_pretrained``, ``factory`` is the class, if it is not that of the folder's config, ``args``
    change that config, and ``init`` is for what is not in the files.
    """

    factory: Annotated[str | None, FACTORY] = None
    args: Annotated[dict[str, Any], TABLE] = field(default_factory=dict)
    init: Annotated[str | None, METHOD] = None
    pretrained: Annotated[str | None, TEXT] = None


@dataclass(frozen=True)
class DataConfig:
    """``[data]``: text files and directories (none: the Python standard library), and the batches.

    A token is a byte or, with a folder for ``tokenizer``, one of that; a pretrained model has its own.
    """

    context: Annotated[int, COUNT]  # tokens in a sequence
    batch_size: Annotated[int, COUNT]
    tokenizer: Annotated[str | None, TEXT] = None
    paths: Annotated[tuple[str, ...], TEXTS] = ()
    val_fraction: Annotated[float, FRACTION] = 0.05  # of the bytes, held out


@dataclass(frozen=True)
class StreamConfig:
    """``[stream]``: the arguments of ``streamer.wrap`` of the same names; None is what wrap chooses, and is
    "none" in ``batch_dims``, where TOML has to say it. "auto" is chosen for the run's own step."""

    layers: Annotated[str | tuple[str, ...] | None, LAYERS] = None
    num_slots: Annotated[int | Literal["auto"] | None, COUNT_OR_AUTO] = None
    activations: Annotated[str | tuple[str, ...], ACTIVATIONS] = "recompute"
    micro_batch_size: Annotated[int | Literal["auto"] | None, COUNT_OR_AUTO] = None
    batch_dims: Annotated[dict[str, int | str] | None, BATCH_DIMS] = None
    update: Annotated[str, UPDATE] = "step"
    dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, DTYPE] = None
    device: Annotated[str | None, TEXT] = None
    host_threads: Annotated[int | None, COUNT] = None
    compile: Annotated[bool, FLAG] = False
    device_memory: Annotated[str | None, BYTES] = None


@dataclass(frozen=True)
class OptimizerConfig:
    """``[optimizer]``: AdamW, clipping (0: none), linear warm-up to lr, then a cosine down to min_lr."""

    lr: Annotated[float, POSITIVE]
    betas: Annotated[tuple[float, float], BETAS] = (0.9, 0.95)
    eps: Annotated[float, POSITIVE] = 1e-8
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.1
    grad_clip: Annotated[float, NOT_NEGATIVE] = 1.0
    state_dtype: Annotated[str, STATE_DTYPE] = "float32"
    warmup_steps: Annotated[int, COUNT_OR_0] = 0
    min_lr: Annotated[float, NOT_NEGATIVE] = 0.0


@dataclass(frozen=True)
class Config:
    """A whole run."""

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    stream: StreamConfig = field(default_factory=StreamConfig)


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Config:
    """The config in the TOML file ``path``, with ``overrides`` of the form ``section.key=TOML value``.

    Raises ConfigError, in one line that names the mend, for a file that cannot be read or is not TOML, an
    unknown or missing section or key, a value of the wrong type or out of range, and a bad override.
    """
    path, where = Path(path), " ".join([str(path), *overrides])
    tables = read_toml(path)
    for override in overrides:
        _override(tables, override)
    if fault := unreadable(tables):
        raise ConfigError(f"{where}: {fault}")
    known = get_type_hints(Config)
    for name, table in tables.items():
        if name not in known:
            raise ConfigError(f"{where}: unknown section [{name}]; {nearest(name, known)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{where}: {name} must be a section: write [{name}] and its keys below")
    config = Config(**{name: section(known[name], name, tables.get(name, {}), where) for name in known})
    _check(config, where)
    return config


def _check(config: Config, where: str) -> None:
    """Raise ConfigError for keys that do not go together."""
    if config.model.factory is None and config.model.pretrained is None:
        raise ConfigError(
            f"{where}: model.factory is missing: give {FACTORY.words}; or a pretrained model's folder as "
            "model.pretrained (--model)"
        )
    if config.optimizer.min_lr > config.optimizer.lr:
        raise ConfigError(f"{where}: optimizer.min_lr is above optimizer.lr, from which it decays; lower it")
    if config.stream.update == "backward" and config.optimizer.grad_clip:
        raise ConfigError(
            f'{where}: stream.update = "backward" has no norm to clip by: set optimizer.grad_clip = 0'
        )


def _override(tables: dict[str, Any], override: str) -> None:
    """Put ``section.key=TOML value`` into ``tables``."""
    name, equals, text = override.partition("=")
    *path, key = map(str.strip, name.split("."))
    if not equals or not path:
        raise ConfigError(f"override {override!r} must be section.key=value, such as run.steps=100")
    try:
        (value,) = tomllib.loads(f"value = {text}").values()
    except (ValueError, RecursionError):
        mend = f"quote a string: '{name}={toml_value(text)}'"
        raise ConfigError(f"override {override!r}: not a TOML value; {mend}") from None
    for part in path:
        tables = tables.setdefault(part, {})
        if not isinstance(tables, dict):
            raise ConfigError(f"override {override!r}: {part} is not a table; set {part} itself")
    tables[key] = value


def dump_config(config: Config) -> str:
    """``config`` as TOML that ``load_config`` reads back to an equal one; a None is left out."""
    sections = {section.name: vars(getattr(config, section.name)) for section in fields(config)}
    return "\n".join("\n".join([f"[{name}]", *toml_pairs(table), ""]) for name, table in sections.items())
