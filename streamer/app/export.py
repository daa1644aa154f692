"""`export`: the weights of a checkpoint, in a folder that others can load, with a config and a README beside
them.
"""

from __future__ import annotations

import errno
import json
import math
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from streamer.app.config import Config, ConfigError, ModelConfig, load_config
from streamer.app.run.adapters import Merged, add_adapters, write_values
from streamer.app.run.beside import bytes_beside, copy_beside, files_beside
from streamer.app.run.build import import_factory, streamed_dtype, without_values
from streamer.app.run.run_folder import best_checkpoint
from streamer.checkpoint.frozen import LeftOut
from streamer.checkpoint.manifest import NAME, Manifest, checkpoints, new_folder
from streamer.checkpoint.save import BUFFERS, FROZEN, WEIGHTS
from streamer.checkpoint.tensors import BY_NAME, Flushing, Piece, in_a_line, write_tensors
from streamer.errors import CheckpointError, amount, shortened
from streamer.model.options import parse_bytes
from streamer.model.units import kept_dtype
from streamer.pretrained.architecture import is_quantized
from streamer.pretrained.files import INDEX, SINGLE, Stored
from streamer.version import __version__

MODEL_CONFIG, README = "config.json", "README.txt"


@dataclass(frozen=True)
class Card:
    """``config`` is the run's and ``model`` what it makes, if they are known. ``tied`` are the names that are
    not in the files, with those of the same tensors that are."""

    config: ModelConfig | None
    model: nn.Module | None
    dtype: str
    step: int
    tied: Mapping[str, str]

    def write(self, folder: Path) -> None:
        """Write ``config.json``, Hugging Face's own for a model of theirs, and ``README.txt``, with the code
        that loads the weights."""
        if (model := _hugging_face(self.model)) is not None:
            model.config.architectures = [type(model).__name__]
            model.config.dtype = getattr(torch, self.dtype)
            model.config.save_pretrained(folder)
            code = _load_hugging_face(type(model))
        else:
            (folder / MODEL_CONFIG).write_text(self._config() + "\n", encoding="utf-8")
            code = self._load()
        (folder / README).write_text(self._readme(code) + "\n", encoding="utf-8")

    def _config(self) -> str:
        given = {
            "format": f"safetensors of a state_dict, written by streamer {__version__}: see {README}",
            "factory": None if self.config is None else self.config.factory,
            "args": None if self.config is None else self.config.args,
            "dtype": self.dtype,
            "step": self.step,
            "tied": None if self.model is None else self.tied,
        }
        # TOML knows dates and JSON does not
        return json.dumps(given, indent=2, default=str, ensure_ascii=False)

    def _readme(self, code: str) -> str:
        paragraphs = [
            f"Weights after step {self.step} in {self.dtype}, in the safetensors format, written by streamer "
            f"{__version__}."
        ]
        if self.tied:
            paragraphs.append("Tied weights are in the files once:")
            paragraphs.append("\n".join(f"    {name} is {kept}" for name, kept in self.tied.items()))
        if self.model is None:
            paragraphs.append(
                "The model itself was not known to the export: tied weights are here under one of their "
                "names only, and all buffers are here, those too that are not in a state_dict. Put the other "
                "names of tied weights into `weights`, and take such buffers out, before your model loads it."
            )
        paragraphs.append("To load them, with this folder in place of the dot:")
        wrapped = [part if part.startswith(" ") else textwrap.fill(part, 90) for part in paragraphs]
        return "\n\n".join([*wrapped, textwrap.indent(code, "    ")])

    def _load(self) -> str:
        lines = [
            "from pathlib import Path",
            "from safetensors.torch import load_file",
            "",
            'folder = Path(".")',
            "weights = {}",
            'for path in sorted(folder.glob("*.safetensors")):',
            "    weights |= load_file(path)",
        ]
        if self.config is not None and self.config.factory is not None:
            factory = self.config.factory.partition(":")[2]
            # streamer's own models are elsewhere in an installation than in a checkout
            module = import_factory(self.config.factory).__module__
            lines[:2] = ["import json", *lines[:2], f"from {module} import {factory}"]
            lines.append('config = json.loads((folder / "config.json").read_text(encoding="utf-8"))')
            if self.tied:
                lines.append('weights |= {name: weights[kept] for name, kept in config["tied"].items()}')
            lines += [f'model = {factory}(**config["args"])', "model.load_state_dict(weights)"]
        return "\n".join(lines)


def _hugging_face(model: nn.Module | None) -> Any:
    """``model`` if it is one of Hugging Face's, else None."""
    # such a model exists only where transformers has been imported
    library = sys.modules.get("transformers")
    return model if library is not None and isinstance(model, library.PreTrainedModel) else None


def _load_hugging_face(kind: type[Any]) -> str:
    module = "transformers" if kind.__module__.startswith("transformers.") else kind.__module__
    return f'from {module} import {kind.__name__}\n\nmodel = {kind.__name__}.from_pretrained(".")'


#: What weights may be written in.
EXPORTED = ("bfloat16", "float32", "float16")
#: Where `streamer train` keeps a run's checkpoints, and its config beside them.
CHECKPOINTS, CONFIG = "checkpoints", "config.toml"


def export(
    run: str | PathLike[str],
    to: str | PathLike[str],
    *,
    dtype: str | None = None,
    shard_size: int | str = "5GB",
    merge: bool = False,
    best: bool = False,
) -> None:
    """Write the weights of a checkpoint into the new folder ``to``, complete or not at all.

    ``run`` is a run's directory, whose latest checkpoint is taken, or with ``best`` that of the lowest
    validation loss, or a checkpoint. The tensors are those of
    the model's ``state_dict()``, tied ones once under the first of their names, in ``model.safetensors`` or,
    where that would be larger than ``shard_size`` bytes, in several files with an index as Hugging Face lays
    them out. Weights are in ``dtype``: "float32", in which they equal the fp32 masters to the bit, or
    "bfloat16" or "float16", the masters rounded to nearest, ties to even, but for those that transformers
    keeps in fp32; None is the run's ``stream.dtype`` or, where there is none, float32. Buffers keep their
    dtypes. Beside them are ``config.json``, which is the model's own where the run's factory makes one of
    Hugging Face's and else has the factory and its arguments in it, and ``README.txt``, which tells how to
    load it all.

    Of a run with ``[lora]`` the adapters alone are written, as peft does; with ``merge`` the whole
    model, what the adapters add to its weights added in fp32.

    The run's config is looked for two folders above the checkpoint, and the factory called on the meta
    device; without either all weights and buffers of the checkpoint are written, under the names that they
    have there, and a line is printed that says what is missing. All of the checkpoint is compared with its
    checksums first. No more than two tensors are in memory at a time.

    Raises FileExistsError where there is something at ``to``, `CheckpointError` for a checkpoint that is
    missing, damaged, deleted meanwhile or of another model than the config's, `ConfigError` for a config, an
    option or a value beyond the range of ``dtype``, and OSError where the folder cannot be written; then
    nothing is left.
    """
    to = Path(to)
    if to.exists():
        raise FileExistsError(errno.EEXIST, "there is something already: export to a new folder", str(to))
    if dtype not in (None, *EXPORTED):
        raise ConfigError(f"--dtype {dtype}: it must be one of {', '.join(EXPORTED)}")
    try:
        limit = parse_bytes("--shard-size", shard_size) or sys.maxsize
    except ValueError as error:
        raise ConfigError(str(error)) from None
    checkpoint = _checkpoint(Path(run), best=best)
    with _there(checkpoint):
        _export(checkpoint, to, dtype, limit, merge=merge)


@contextmanager
def _there(checkpoint: Path) -> Iterator[None]:
    """Have an error in the block say that ``checkpoint`` is no longer there, if it is not: a run that trains
    deletes those beyond its ``run.keep``."""
    try:
        yield
    except CheckpointError as error:
        if checkpoint.exists():
            raise
        raise CheckpointError(
            f"{checkpoint} has been deleted while it was read, as a run does with all but its last run.keep "
            "checkpoints: export again, from a later one"
        ) from error


def _export(checkpoint: Path, to: Path, dtype: str | None, limit: int, *, merge: bool) -> None:
    manifest = Manifest.read(checkpoint)
    config = _config(checkpoint)
    model = None if config is None else _on_meta(config.model)
    stored = _stored(checkpoint, manifest)
    dtype = dtype or ("float32" if config is None else streamed_dtype(config, model))
    streamed: torch.dtype = getattr(torch, dtype)
    if config is not None and config.model.pretrained is not None:
        model = _on_meta(config.model, streamed)  # which knows what stays in fp32
    weights = manifest.files_of(WEIGHTS)  # buffers keep their dtypes
    adapts = config is not None and model is not None and bool(config.lora.rank)
    if merge and not adapts:
        raise ConfigError(f"--merge adds adapters to a model, and {checkpoint} is not of a run with [lora]")
    if config is not None and model is not None and adapts:
        adapters = {name: stored.pop(name) for name in weights}
        manifest.check(checkpoint)
        if not merge:
            values = {name: tensor.read().to(streamed, copy=True) for name, tensor in adapters.items()}
            write_values(add_adapters(model, config.lora), values, config, to)
            return
        buffers = [
            _piece(stored[name], name, stored[name].dtype) for name in stored if name in model.state_dict()
        ]
        merged = Merged(model, Path(str(config.model.pretrained)), config.lora, adapters)
        left_out = {name: LeftOut.parsed(value) for name, value in manifest.values[FROZEN].items()}
        names = {first: [first, *others] for first, *others in merged.names.values()}
        pieces = [
            *buffers,
            *(_merged(merged, left_out, param, _at_least(streamed, param)) for param in merged.names),
        ]
        if any(merged.was_quantized(param, left_out) for param in merged.names):
            print(
                f"The run was trained on a base quantized to {config.model.quantize}: its adapters are added "
                "to the weights in model.pretrained as they are there, before quantization"
            )
        model = _on_meta(config.model)
        if (hugging_face := _hugging_face(model)) is not None and is_quantized(hugging_face):
            del hugging_face.config.quantization_config  # what is written is not
    else:
        names = _names(checkpoint, stored, model)
        params = {} if model is None else dict(model.named_parameters(remove_duplicate=False))
        pieces = [
            _piece(
                stored[there],
                first,
                _at_least(streamed, params.get(there)) if there in weights else stored[there].dtype,
            )
            for there, (first, *_) in names.items()
        ]
    card = Card(
        config=None if config is None else config.model,
        model=model,
        dtype=dtype,
        step=manifest.step,
        tied={other: first for first, *others in names.values() for other in others},
    )
    nbytes = sum(piece.nbytes for piece in pieces)
    print(f"{checkpoint}: step {manifest.step}, {len(pieces)} tensors, {amount(nbytes)} with {dtype} weights")
    manifest.check(checkpoint)
    beside = [] if config is None else files_beside(config)
    needed = nbytes + bytes_beside(beside, len(pieces))
    with new_folder(to, nbytes=needed, what="a folder of weights") as folder:
        files = _write_shards(folder, pieces, limit)
        card.write(folder)
        others = [MODEL_CONFIG, README, *copy_beside(beside, folder)]
    print(f"Written to {to}: {' ... '.join(dict.fromkeys((files[0], files[-1])))} {' '.join(others)}")


def _checkpoint(run: Path, *, best: bool) -> Path:
    if (run / NAME).exists() and not best:
        return run
    if best:
        if (kept := best_checkpoint(run / CHECKPOINTS)) is None:
            raise CheckpointError(f"{run} keeps no best checkpoint: train with --set run.keep_best=true")
        return kept
    if not (found := checkpoints(run / CHECKPOINTS)):
        # what a run of a pretrained model writes in the end
        if written := [run / name for name in ("model", "adapters") if (run / name).is_dir()]:
            raise CheckpointError(
                f"{run} has no checkpoint to export (run.save_every = 0): its weights are in {written[0]}, "
                "for others to load"
            )
        raise CheckpointError(
            f"{run} is no checkpoint ({NAME} is not in it), and {run / CHECKPOINTS} holds no complete one"
        )
    return found[-1]


def _config(checkpoint: Path) -> Config | None:
    """The config of the run that the checkpoint is of; None, and a line, where there is none."""
    parent = checkpoint.resolve().parent
    path = parent.parent / CONFIG
    if parent.name == CHECKPOINTS and path.exists():
        config = load_config(path)
        folder = config.model.pretrained
        if folder is not None and not Path(folder).exists():
            raise ConfigError(
                f"{folder}, the model that the run went on from, is not there: correct model.pretrained in "
                f"{path}, or export where it is"
            )
        return config
    print(
        f"There is no {path if parent.name == CHECKPOINTS else CONFIG} of a run, so the model's config is "
        "missing, and so is which weights are tied and which buffers belong in a state_dict: all are written"
    )
    return None


def _at_least(dtype: torch.dtype, param: nn.Parameter | None) -> torch.dtype:
    """``dtype``, or the wider one that ``param`` is kept in."""
    kept = None if param is None else kept_dtype(param)
    return dtype if kept is None else torch.promote_types(kept, dtype)


def _on_meta(config: ModelConfig, dtype: torch.dtype | None = None) -> nn.Module | None:
    """The config's model without values; None, and a line, where its factory cannot make it so."""
    what = config.pretrained or config.factory
    try:
        model = without_values(config, dtype=dtype)
    except (ConfigError, ModuleNotFoundError):
        raise
    except Exception as error:  # whatever a factory raises that wants to see values
        print(
            f"{what} cannot be called on the meta device ({in_a_line(error)}), so "
            "which weights are tied and which buffers belong in a state_dict is not known: all are written"
        )
        return None
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model.factory {what} returns a {type(model).__name__}")
    return model


def _stored(checkpoint: Path, manifest: Manifest) -> dict[str, Stored]:
    """The weights and buffers of the checkpoint."""
    files = manifest.files_of(WEIGHTS) | manifest.files_of(BUFFERS)
    entries = {name: manifest.files[file][name] for name, file in files.items()}
    return {
        name: Stored(name, checkpoint / files[name], BY_NAME[entry.dtype], entry.shape)
        for name, entry in entries.items()
    }


def _names(checkpoint: Path, stored: Mapping[str, Stored], model: nn.Module | None) -> dict[str, list[str]]:
    """All names that a tensor has in the model's ``state_dict()`` by its name in the checkpoint; without a
    model those are the same.

    Raises CheckpointError where the checkpoint is of another model.
    """
    if model is None:
        return {name: [name] for name in stored}
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    differing = [
        name
        for name, item in stored.items()
        if name not in tensors or tuple(tensors[name].shape) != item.shape
    ]
    there = {id(tensors[name]): name for name in stored if name in tensors}
    names: dict[str, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in there:
            names.setdefault(there[id(tensor)], []).append(name)
        else:
            differing.append(name)
    if differing:
        raise CheckpointError(
            f"{checkpoint} is not of the model that the run's config makes; these tensors differ: "
            f"{shortened(differing)}"
        )
    return names


def _piece(stored: Stored, name: str, dtype: torch.dtype) -> Piece:
    return Piece(name, dtype, stored.shape, partial(_rounded, stored, dtype))


def _merged(
    merged: Merged, left_out: Mapping[str, LeftOut], param: nn.Parameter, dtype: torch.dtype
) -> Piece:
    shape = tuple(param.shape)
    return Piece(merged.names[param][0], dtype, shape, partial(merged.read, param, left_out, dtype))


def _rounded(stored: Stored, dtype: torch.dtype) -> torch.Tensor:
    tensor = stored.read()
    rounded = tensor.to(dtype)
    if rounded is tensor or not tensor.numel() or math.isfinite(_largest(rounded)):
        return rounded
    if math.isfinite(largest := _largest(tensor)):
        raise ConfigError(
            f"'{stored.name}' has values up to {largest:.3g}, which are beyond {str(dtype)[6:]}: export in "
            "bfloat16 or float32"
        )
    return rounded


def _largest(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, math.inf))


def _write_shards(folder: Path, pieces: Sequence[Piece], limit: int) -> list[str]:
    """The names of the files with ``pieces``: in order, what fits in ``limit`` bytes together, and alone what
    is larger than that."""
    shards: list[list[Piece]] = []
    together: list[Piece] = []
    held = 0
    for piece in pieces:
        if piece.nbytes > limit:
            shards.append([piece])
            continue
        if held + piece.nbytes > limit:
            shards.append(together)
            together, held = [], 0
        together.append(piece)
        held += piece.nbytes
    shards += [together] if together else []
    count = len(shards)
    numbered = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    names = [SINGLE] if count == 1 else numbered
    with Flushing() as flushing:
        for name, shard in zip(names, shards, strict=True):
            write_tensors(folder / name, shard, flushing=flushing, metadata={"format": "pt"})
    if count > 1:
        index: dict[str, Any] = {
            "metadata": {"total_size": sum(piece.nbytes for piece in pieces)},
            "weight_map": {
                piece.name: name for name, shard in zip(names, shards, strict=True) for piece in shard
            },
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return names
