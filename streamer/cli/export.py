"""`streamer export`: the weights of a checkpoint in a folder that other tools can load."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from streamer.checkpoint.manifest import NAME, Manifest, new_folder
from streamer.checkpoint.save import BUFFERS, WEIGHTS
from streamer.checkpoint.tensors import Flushing, Piece, write_tensors
from streamer.cli.build import add_adapters, dtype_of, refusals, without_values
from streamer.cli.config import Config, ConfigError, load_config
from streamer.errors import CheckpointError, amount, shortened
from streamer.model.options import parse_bytes
from streamer.model.units import kept_dtype
from streamer.pretrained.architecture import folder_of, is_quantized
from streamer.pretrained.files import INDEX, SINGLE, Stored, stored_tensors, tensors_of
from streamer.pretrained.match import Tensors, names_of
from streamer.pretrained.quantized_files import with_quantized

#: Files of a tokenizer, and of a model besides its weights and its config.
COPIED = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model",
    "*.tiktoken", "chat_template*", "generation_config.json", "LICENSE*", "NOTICE*",
)  # fmt: skip
#: Bytes of headers, a config and an index, and of a tokenizer.
MARGIN_BYTES = 32 << 20
#: peft's name of a model's first adapter, and its prefix of the names of adapters' tensors.
ADAPTER, PREFIX = "default", "base_model.model."


def export(
    run: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    shard_size: int | str = "5GB",
    merge: bool = False,
    best: bool = False,
) -> None:
    """Write the weights of a checkpoint into the new folder ``to``, complete or not at all.

    ``run`` is a run's folder, for its last checkpoint or, with ``best``, the one with the lowest validation
    loss; or a checkpoint. Weights are the fp32 masters, rounded to ``dtype`` ("float32", "bfloat16" or
    "float16"; by default the dtype in which the run streamed them), as safetensors of at most ``shard_size``
    bytes, with the files that loading needs: Hugging Face's, or for your own model ``config.json``. For a run
    with ``[lora]`` only the adapters are written, as peft does; with ``merge`` the whole model, with the
    adapters added in fp32. One tensor is in memory at a time.

    Raises FileExistsError if ``to`` exists, `CheckpointError` for a checkpoint that is missing, damaged or of
    another model, `ConfigError` for an unknown option or a value beyond the range of ``dtype``, and OSError
    if the folder cannot be written."""
    to = Path(to)
    with refusals("--shard-size"):
        limit = parse_bytes("--shard-size", shard_size) or sys.maxsize
    checkpoint = _checkpoint(Path(run), best=best)
    config = _config(checkpoint)
    model: Any = without_values(config)
    of_folder = getattr(model, "dtype", None) if config.model.path else None
    streamed = dtype_of(config) or of_folder or torch.float32
    wanted: torch.dtype = streamed if dtype is None else getattr(torch, dtype)
    if merge and not config.lora:
        raise ConfigError(f"--merge adds adapters to a model, and the run of {checkpoint} has no [lora]")
    manifest = Manifest.read(checkpoint)
    manifest.check(checkpoint)
    weights = manifest.files_of(WEIGHTS)
    stored: dict[str, Stored] = {}
    for file in sorted({*weights.values(), *manifest.files_of(BUFFERS).values()}):
        stored |= tensors_of(checkpoint / file)
    if config.lora and not merge:
        values = {name: stored[name].read().to(wanted, copy=True) for name in weights}
        _write_adapters(model, values, config, to)
        return
    if config.lora:
        model, names = without_values(_without_lora(config)), {}
        pieces = _merged(config, stored, wanted)
        if config.model.quantize != "none":
            print(
                f"The run was trained on a base quantized to {config.model.quantize}: its adapters are "
                "added to the weights in model.path before quantization"
            )
    else:
        names = _names(checkpoint, stored, model)
        params = dict(model.named_parameters(remove_duplicate=False))
        dtypes = {name: _at_least(wanted, params[name]) for name in names if name in params}
        pieces = [
            _piece(stored[there], first, dtypes.get(there, stored[there].dtype))
            for there, (first, *_) in names.items()
        ]
    nbytes = sum(piece.nbytes for piece in pieces)
    with new_folder(to, nbytes=nbytes + MARGIN_BYTES, what="a folder of weights") as folder:
        _write_shards(folder, pieces, limit)
        tied = {other: first for first, *others in names.values() for other in others}
        _describe(folder, model, config, wanted, manifest.step, tied)
        _copy_tokenizer(config, folder)
    print(
        f"{checkpoint}: step {manifest.step}, {amount(nbytes)} of weights in {str(wanted)[6:]}, written to "
        f"{to}"
    )


def _write_adapters(model: Any, values: Mapping[str, torch.Tensor], config: Config, folder: Path) -> None:
    """Write adapters of ``model`` with ``values`` by name into ``folder``, as peft does, with the
    tokenizer."""
    import peft

    # not "auto", with which peft queries a hub on the network
    found = peft.get_peft_model_state_dict(model, dict(values), save_embedding_layers=False)
    tensors = {f"{PREFIX}{name}": tensor.contiguous() for name, tensor in found.items()}
    options = copy.copy(model.peft_config[ADAPTER])
    options.base_model_name_or_path, options.inference_mode = os.path.abspath(str(config.model.path)), True
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    with new_folder(folder, nbytes=nbytes + MARGIN_BYTES, what="a folder of adapters") as hidden:
        save_file(tensors, hidden / "adapter_model.safetensors", metadata={"format": "pt"})
        options.save_pretrained(hidden)
        _copy_tokenizer(config, hidden)
    print(f"The adapters, {amount(nbytes)}, are in {folder}; streamer export --merge writes a whole model")


def _copy_tokenizer(config: Config, folder: Path) -> None:
    """Copy the tokenizer and the licence of a pretrained model."""
    if config.model.path is not None:
        for pattern in COPIED:
            for path in folder_of(Path(config.model.path)).glob(pattern):
                shutil.copyfile(path, folder / path.name)


def checkpoints_of(run: Path) -> list[Path]:
    """The complete checkpoints in a run's folder, by step; or the checkpoint ``run`` itself."""
    found = [
        path
        for folder in (run, *run.glob("checkpoint-*"))
        for path in (folder, folder / "streamer")
        if (path / NAME).exists()
    ]
    return sorted(found, key=lambda path: Manifest.read(path).step)


def _checkpoint(run: Path, *, best: bool) -> Path:
    if best:
        states = sorted(run.glob("checkpoint-*/trainer_state.json"), key=lambda path: path.stat().st_mtime)
        found = json.loads(states[-1].read_text())["best_model_checkpoint"] if states else None
        if found is None:
            raise CheckpointError(
                f"{run} has no best checkpoint: train with --set train.load_best_model_at_end=true"
            )
        run = run / Path(found).name
    if not (all_of_run := checkpoints_of(run)):
        raise CheckpointError(f"{run} is not a checkpoint, and has no complete one")
    return all_of_run[-1]


def _config(checkpoint: Path) -> Config:
    """The configuration of the run that wrote ``checkpoint``."""
    place = checkpoint.resolve().parent
    folder = next((each for each in (place, place.parent) if (each / "config.toml").is_file()), None)
    if folder is None:
        raise ConfigError(f"{place}: there is no config.toml of the run that wrote {checkpoint}")
    config = load_config(folder / "config.toml")
    if config.model.path is not None and not Path(config.model.path).exists():
        raise ConfigError(
            f"{config.model.path}, the model that the run started from, is missing: correct model.path in "
            f"{folder / 'config.toml'}"
        )
    return config


def _names(checkpoint: Path, stored: Mapping[str, Stored], model: nn.Module) -> dict[str, list[str]]:
    """All names of a tensor in the model's ``state_dict()``, by its name in the checkpoint."""
    shapes = {name: tensor.shape for name, tensor in model.named_parameters(remove_duplicate=False)}
    shapes |= {name: tensor.shape for name, tensor in model.named_buffers(remove_duplicate=False)}
    differing = [name for name, item in stored.items() if shapes.get(name) != item.shape]
    names: dict[str, list[str]] = {}
    for own in names_of(model).values():
        if there := next((name for name in own if name in stored), None):
            names[there] = own
        else:
            differing += own
    if differing:
        raise CheckpointError(
            f"{checkpoint} is not of its run's model; these tensors differ: {shortened(differing)}"
        )
    return names


def _at_least(dtype: torch.dtype, param: nn.Parameter) -> torch.dtype:
    """``dtype``, or the wider dtype in which ``param`` is stored."""
    kept = kept_dtype(param)
    return dtype if kept is None else torch.promote_types(kept, dtype)


def _piece(stored: Stored, name: str, dtype: torch.dtype) -> Piece:
    return Piece(name, dtype, stored.shape, partial(_rounded, stored, dtype))


def _rounded(stored: Stored, dtype: torch.dtype) -> torch.Tensor:
    tensor = stored.read()
    rounded = tensor.to(dtype)
    if rounded is tensor or not tensor.numel() or math.isfinite(_largest(rounded)):
        return rounded
    if math.isfinite(largest := _largest(tensor)):
        raise ConfigError(
            f"'{stored.name}' has values up to {largest:.3g}, beyond {str(dtype)[6:]}: use bfloat16"
        )
    return rounded


def _largest(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, math.inf))


def _write_shards(folder: Path, pieces: Sequence[Piece], limit: int) -> None:
    """Write ``pieces`` in order into files of at most ``limit`` bytes, with an index as Hugging Face's."""
    shards: list[list[Piece]] = [[]]
    for piece in pieces:
        if shards[-1] and sum(each.nbytes for each in shards[-1]) + piece.nbytes > limit:
            shards.append([])
        shards[-1].append(piece)
    count = len(shards)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    names = [SINGLE] if count == 1 else names
    with Flushing() as flushing:
        for name, shard in zip(names, shards, strict=True):
            write_tensors(folder / name, shard, flushing=flushing, metadata={"format": "pt"})
    if count > 1:
        places = {piece.name: name for name, shard in zip(names, shards, strict=True) for piece in shard}
        size = {"total_size": sum(piece.nbytes for piece in pieces)}
        (folder / INDEX).write_text(json.dumps({"metadata": size, "weight_map": places}, indent=2) + "\n")


def _describe(
    folder: Path, model: Any, config: Config, dtype: torch.dtype, step: int, tied: Mapping[str, str]
) -> None:
    """Write ``config.json``: Hugging Face's, or for your own model its function, and the names of tied
    weights, which are in the files once."""
    if config.model.path is not None:
        if is_quantized(model):
            del model.config.quantization_config  # the written weights are not quantized
        model.config.architectures, model.config.dtype = [type(model).__name__], dtype
        model.config.save_pretrained(folder)
        return
    known = {"factory": config.model.factory, "args": config.model.args, "step": step, "tied": tied}
    (folder / "config.json").write_text(json.dumps(known, indent=2, default=str) + "\n")


def _merged(config: Config, stored: Mapping[str, Stored], dtype: torch.dtype) -> list[Piece]:
    """The tensors of a run's base, with its adapters added to them."""
    from peft.tuners.lora import LoraLayer

    base, streamed = Path(str(config.model.path)), dtype_of(config)
    model: Any = without_values(_without_lora(config))
    buffers = [
        _piece(stored[name], name, stored[name].dtype) for name in stored if name in model.state_dict()
    ]
    found = stored_tensors(base)
    sources = Tensors(model, with_quantized(base, found, model.config) if is_quantized(model) else found, ())
    names = {param: own for param, own in names_of(model).items() if isinstance(param, nn.Parameter)}
    if absent := [own[0] for param, own in names.items() if sources.source(param) is None]:
        raise CheckpointError(f"{base} is not of the run's model; missing: {shortened(absent)}")
    layers: dict[Any, tuple[str, Any]] = {
        module.get_base_layer().weight: (name, module)
        for name, module in add_adapters(model, config.lora).named_modules()
        if isinstance(module, LoraLayer)
    }

    def read(param: nn.Parameter, to: torch.dtype) -> torch.Tensor:
        source = sources.source(param)
        assert source is not None
        values = source.read()
        if streamed is not None:  # the adapters were trained on rounded values
            values = values.to(_at_least(streamed, param))
        if param not in layers:
            return values.to(to)
        name, layer = layers[param]
        for part, _ in [*layer.named_parameters()]:
            if (adapter := stored.get(f"{name}.{part}")) is not None:
                owner, _, own = part.rpartition(".")
                setattr(layer.get_submodule(owner), own, nn.Parameter(adapter.read().float(), False))
        added: torch.Tensor = layer.get_delta_weight(ADAPTER)
        return (values.float() + added.float()).to(to)

    pieces = []
    for param, (first, *others) in names.items():
        if others and param in layers:
            raise ConfigError(
                f"{first} and {others[0]} are one parameter, and one of them is adapted: no --merge"
            )
        to = _at_least(dtype, param)
        pieces.append(Piece(first, to, tuple(param.shape), partial(read, param, to)))
    return [*buffers, *pieces]


def _without_lora(config: Config) -> Config:
    return replace(config, lora={}, model=replace(config.model, quantize="none"))
