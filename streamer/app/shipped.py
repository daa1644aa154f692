"""Configs and models of streamer's own: beside the package in a checkout, inside of it once installed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from streamer.app.config import ConfigError
from streamer.config_values import nearest

PACKAGE = Path(__file__).parent.parent
#: The package that pyproject.toml makes of the folders ``configs`` and ``models`` in a wheel.
INSIDE = "shipped"


def folder(name: str) -> Path:
    """The folder ``configs`` or ``models``."""
    inside = PACKAGE / INSIDE / name
    return inside if inside.is_dir() else PACKAGE.parent / name


def config_files() -> dict[str, Path]:
    """The configs by name."""
    return {path.stem: path for path in sorted(folder("configs").glob("*.toml"))}


def pretrained_folder(given: str) -> Path | None:
    """The Hugging Face folder that ``given``, itself or its ``config.json``, is; None for anything else."""
    path = Path(given)
    folder = path.parent if path.name == "config.json" else path
    return folder if (folder / "config.json").is_file() else None


def config_path(given: str) -> Path:
    """The config that is meant: the file ``given`` or, where there is none, streamer's own of that name, such
    as ``gpt2-demo`` or ``configs/gpt2-demo.toml``."""
    path = Path(given)
    if path.exists() or path.parent not in (Path(), Path("configs")):
        return path
    return config_files().get(path.name.removesuffix(".toml"), path)


def model_module(name: str) -> ModuleType | None:
    """streamer's own module ``models.NAME``, None where it has none of that name."""
    top, _, rest = name.partition(".")
    if top != "models" or not (folder("models") / f"{rest}.py").is_file():
        return None
    if (PACKAGE / INSIDE).is_dir():
        return importlib.import_module(f"streamer.{INSIDE}.{name}")
    sys.path.append(str(PACKAGE.parent))
    return importlib.import_module(name)


def list_configs() -> None:
    """Print the configs, each with the first line of its file."""
    files = config_files()
    width = max(map(len, files))
    for name, path in files.items():
        print(f"{name:{width}}  {path.read_text().splitlines()[0].removeprefix('# ')}")


def copy_config(name: str, to: Path | None) -> None:
    """Copy a config, to be edited, to ``to`` (default: ``NAME.toml`` here). Raises ConfigError for a name
    that no config has, and for a file that is there."""
    name = Path(name).name.removesuffix(".toml")
    files = config_files()
    if name not in files:
        raise ConfigError(f"there is no config {name!r}; {nearest(name, files)}")
    to = Path(f"{name}.toml") if to is None else to
    try:
        with to.open("x", encoding="utf-8") as file:
            file.write(files[name].read_text())
    except FileExistsError:
        raise ConfigError(f"{to} is there already: give another name by --to") from None
    print(f"{to}: streamer train {to}")
