"""Where a run's files go."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

from streamer.app.config import Config, ConfigError, dump_config


def _names(wanted: Path) -> Iterator[Path]:
    """``name`` and, for where there is something already, ``name-2`` and so on."""
    return itertools.chain([wanted], (wanted.with_name(f"{wanted.name}-{n}") for n in itertools.count(2)))


def free_name(wanted: Path) -> Path:
    """The first of ``name``, ``name-2`` and so on where there is nothing yet."""
    return next(path for path in _names(wanted) if not path.exists())


def run_directory(config: Config) -> Path:
    """A new directory for the run with the resolved config in it. Raises ConfigError where there can be
    none."""
    wanted = Path(config.run.out) / config.run.name
    try:
        wanted.parent.mkdir(parents=True, exist_ok=True)
        for directory in _names(wanted):
            with contextlib.suppress(FileExistsError):
                directory.mkdir()
                break
        (directory / "config.toml").write_text(dump_config(config))
    except OSError as error:
        raise ConfigError(f"cannot write to {wanted} ({error.strerror}): set run.out or run.name") from error
    return directory
