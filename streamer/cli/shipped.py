"""Configs and models of streamer's own: next to the package in a checkout, inside it once installed."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

from streamer.cli.config import ConfigError
from streamer.config_values import nearest

PACKAGE = Path(__file__).parent.parent
#: The package in a wheel that pyproject.toml builds from the folders ``configs`` and ``models``.
INSIDE = "shipped"


def folder(name: str) -> Path:
    """The folder ``configs`` or ``models``."""
    inside = PACKAGE / INSIDE / name
    return inside if inside.is_dir() else PACKAGE.parent / name


def config_files() -> dict[str, Path]:
    """The configs by name."""
    return {path.stem: path for path in sorted(folder("configs").glob("*.toml"))}


def is_model(name: str) -> bool:
    """Whether ``name`` is a Hugging Face folder, its ``config.json``, or the id of a model on the hub,
    "owner/name"."""
    path = Path(name)
    folder = path.parent if path.name == "config.json" else path
    is_id = re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.endswith(".toml") and not path.exists()
    return (folder / "config.json").is_file() or bool(is_id)


def model_folder(name: str) -> str:
    """The folder of a model: ``name`` or, if there is no such folder, the files of that id from the hub or
    from its cache. Raises ConfigError if there are none."""
    path = Path(name)
    if path.exists() or not is_model(name):
        return str(path.parent if path.name == "config.json" else path)
    try:
        from huggingface_hub import snapshot_download

        wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "LICENSE*"]
        return snapshot_download(name, allow_patterns=wanted)
    except Exception as error:  # the library may raise anything without a network, or for an unknown id
        reason = str(error).strip().splitlines()[0][:120]
        raise ConfigError(
            f"{name}: no such folder, and no download from the hub ({reason}): on a machine with a network, "
            f"run `hf download {name} --local-dir DIR`, and use DIR"
        ) from error


def config_path(name: str) -> Path:
    """The path of a config: the file ``name`` or, if there is none, streamer's own of that name, such as
    ``gpt2-demo`` or ``configs/gpt2-demo.toml``."""
    path = Path(name)
    if path.exists() or path.parent not in (Path(), Path("configs")):
        return path
    return config_files().get(path.name.removesuffix(".toml"), path)


def model_module(name: str) -> ModuleType | None:
    """streamer's own module ``models.NAME``, None if it has none of that name."""
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
    """Copy a config, for editing, to ``to`` (default: ``NAME.toml`` here). Raises ConfigError for an unknown
    name, and for a file that exists."""
    name = Path(name).name.removesuffix(".toml")
    files = config_files()
    if name not in files:
        raise ConfigError(f"there is no config {name!r}; {nearest(name, files)}")
    to = Path(f"{name}.toml") if to is None else to
    try:
        with to.open("x", encoding="utf-8") as file:
            file.write(files[name].read_text())
    except FileExistsError:
        raise ConfigError(f"{to} exists already: choose another name by --to") from None
    print(f"{to}: streamer train {to}")
