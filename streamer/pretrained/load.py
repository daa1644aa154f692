"""`from_pretrained`: a model from files, read one layer at a time into host memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from streamer.api import wrap
from streamer.backends.disk import Disks
from streamer.errors import CheckpointError
from streamer.model.init import Init, UnitInit
from streamer.model.layers import Layers, find_layers
from streamer.model.options import Dtype, Folders, dtype_of, folders_of
from streamer.model.units import DTYPES
from streamer.pretrained.architecture import ModelClass, build, is_quantized
from streamer.pretrained.files import Stored, stored_tensors
from streamer.pretrained.match import Tensors
from streamer.pretrained.quantize import quantize_weights, take_quantized
from streamer.pretrained.quantized_files import (
    StoredQuantized,
    stored_quantized,
    usual_dtype,
    with_quantized,
)

#: The method of transformers' models that initialises modules, and its mark of modules to skip.
OWN_INIT, HAS_VALUES = "_init_weights", "_is_hf_initialized"


def from_pretrained(
    path: str | os.PathLike[str],
    model_class: ModelClass | None = None,
    layers: Layers = None,
    *,
    config: Any = None,
    init: Init | str | None = None,
    ignore: str | Sequence[str] = (),
    adapt: Callable[[nn.Module], nn.Module | None] | None = None,
    dtype: Dtype | None = None,
    quantize: str | None = None,
    skip: str | Sequence[str] = (),
    disk: bool | Folders | Disks | None = None,
    **options: Any,
) -> nn.Module:
    """A wrapped model with the weights of a local Hugging Face folder, or of a safetensors file.

    The weights are read from mapped files straight into host memory, one layer at a time, so there is never a
    second copy of the model. Nothing is downloaded, and no code in the folder is run.

    Args:
        path: a folder with ``config.json`` and ``model.safetensors`` or several files with their index, or a
            safetensors file.
        model_class: a class of the transformers library, one of its Auto classes, or a function without
            arguments that returns a model whose ``state_dict`` has the files' names. None is the class that
            ``config.json`` names.
        layers: see `streamer.wrap`.
        config: the config of a transformers model in place of that in the folder, such as one with dropout.
        init: initialises parameters that are not in the files, such as a new head: a function as for
            `streamer.wrap`, or the name of a method of the model (``"_init_weights"`` of transformers'
            models). It is called with each module that has a missing tensor, children before their parents;
            tensors of the files keep their values. Without it, a missing tensor is an error.
        ignore: a regular expression, or several; tensors of the files with a match in their name are left
            out.
        adapt: called with the model before it has values, on the meta device: to freeze parameters, or to
            add adapters, as ``lambda model: peft.get_peft_model(model, config)`` does. Its result is wrapped,
            or the model itself if it is None. New parameters keep their values; those on the meta device, as
            from peft, are initialised by ``init``, or by ``reset_lora_parameters`` of their module.
        dtype: the dtype that parameters are computed in, as for `streamer.wrap`: from fp32 files, bf16
            weights get exact fp32 masters. None streams each parameter in its dtype in the files. Weights
            that transformers keeps in fp32 in a model of fp16 or bf16 weights (routers of experts, for one)
            are streamed in fp32. Buffers of a transformers model are in its class's dtype for ``dtype``.
        quantize: "int8" (by torchao) or "nf4" (by bitsandbytes) quantizes the weights of the linear modules
            in the layers, and experts that are one tensor, one tensor at a time during reading, so that the
            model is never whole in ``dtype``. The experts of a layer are dequantized together when they run.
            The model is frozen then: ``adapt`` adds parameters to train, or unfreezes some that are not
            quantized. A folder with quantized weights, in 4 bits by bitsandbytes, in fp8 with a scale for
            each block, or by torchao, is read unchanged, and frozen too. So are separate experts in its
            files, in 4 bits or fp8, if each is a whole number of blocks; a warning names the weights that are
            dequantized instead, and the reason.
        skip: a regular expression, or several; linear modules and experts with a match in their name are not
            quantized.
        disk: True reads frozen parameters of layers, such as the base of adapters, from the original files,
            for as many layers as do not fit in ``host_memory`` (or in free memory): nothing is copied or
            written, and memory has a ring of a few layers. The files must stay. Separate experts in the files
            that are one tensor here are read one after the other. A layer cannot be read in this way if half
            or more of it is trained, or if the files have it in another layout. A folder, or several, is used
            as by `streamer.wrap`, in addition, for state that cannot be read from these files.
        options: the other options of `streamer.wrap`.

    A transformers model is in evaluation mode, as after that library's ``from_pretrained``: call
    ``model.train()`` for dropout. Parameters frozen by its constructor stay frozen.

    Raises:
        CheckpointError: a ValueError that lists the tensors that are missing, unexpected, of another shape or
            in a file that is cut off, before any allocation.
        ValueError, MemoryError: as `streamer.wrap`, and for a path or class that cannot be used.
    """
    path, dtype = Path(path), dtype_of("dtype", dtype)
    if not path.exists():
        raise ValueError(f"{path}: there is no such file or folder; nothing is downloaded: use a local one")
    stored = stored_tensors(path)
    usual = usual_dtype(stored)
    model = build(path, model_class, config, dtype if dtype in DTYPES else usual)
    if in_files := is_quantized(model):
        if quantize is not None:
            raise ValueError(
                f"{path}: its weights are quantized already: leave quantize={quantize!r} out (in a config "
                "model.quantize=none)"
            )
        stored = with_quantized(path, stored, model.config)
    initialise = _resolved(model, init)
    tensors = Tensors(model, stored, ignore)
    if faults := tensors.faults(may_be_missing=initialise is not None):
        raise CheckpointError(f"{path} is not of a {type(model).__name__}; {'; '.join(faults)}")
    # after adapt= the layers may have other paths
    found = find_layers(model, layers) if adapt is None else []  # reports wrong paths early
    tensors.take_dtypes(dtype if dtype in DTYPES else None)
    if quantize is not None:
        quantize_weights(model, found or find_layers(model, None), quantize, skip, tensors, dtype)
    elif skip:
        raise ValueError("skip= names modules not to quantize: set quantize=, or leave skip= out")
    if in_files:
        take_quantized(model, stored, tensors, dtype)
    tensors.fill_buffers(model)
    if adapt is not None:
        model = _adapted(model, adapt, tensors)
    reader = _Reader(model, tensors, initialise)
    disks = None if disk is None or disk is False else _with_files(disk, model, tensors)
    return wrap(model, layers=layers, init=reader, dtype=dtype, disk=disks, **options)


def _adapted(model: nn.Module, adapt: Callable[[nn.Module], nn.Module | None], tensors: Tensors) -> nn.Module:
    """The result of ``adapt`` for ``model``. Raises ValueError if it is not a model."""
    before = {*model.parameters()}
    adapted = model if (result := adapt(model)) is None else result
    if not isinstance(adapted, nn.Module):
        raise ValueError(f"adapt= has returned a {type(adapted).__name__}: let it return the model, or None")
    for name, param in adapted.named_parameters():
        if param not in before:
            tensors.add(name, param)
    return adapted


def _with_files(disk: bool | Folders | Disks, model: nn.Module, tensors: Tensors) -> Disks:
    """``disk`` with the parameters that can be read from the files. Raises ValueError if there are none, and
    no other folder may be used."""
    frozen: dict[str, Sequence[Stored]] = {}
    for name, param in model.named_parameters():
        source = tensors.source(param)
        if param.requires_grad or source is None or not source.pieces:
            continue
        is_in_parts = any(isinstance(it, StoredQuantized) for it in source.pieces)
        if is_in_parts is (source.quantized is None):
            continue  # quantized or dequantized during reading
        if not is_in_parts:
            frozen[name] = source.pieces
        elif isinstance(found := stored_quantized(source), StoredQuantized):
            frozen |= {f"{name}.{part}": pieces for part, pieces in found.parts.items()}
    if disk is True and not frozen:
        raise ValueError(
            "disk=True reads frozen parameters as they are in the files, but there are none: freeze some in "
            "adapt=, leave quantize= out, or set disk= to a folder, where weights and the optimizer's state "
            "can be written"
        )
    stored = {name: [piece.place for piece in pieces] for name, pieces in frozen.items()}
    if isinstance(disk, Disks):
        return disk.with_stored(stored)
    return Disks([] if isinstance(disk, bool) else folders_of(disk), stored=stored)


def _resolved(model: nn.Module, init: Init | str | None) -> Init | None:
    """The function for ``init``. Raises ValueError if there is none."""
    if init == OWN_INIT and hasattr(model, OWN_INIT):
        return _own_init(model)
    resolved = getattr(model, init, None) if isinstance(init, str) else init
    if init is not None and not callable(resolved):
        raise ValueError(
            f"init={init!r}: use a function of a module, or the name of a method of {type(model).__name__}"
        )
    return resolved


def _own_init(model: nn.Module) -> Init:
    """The `Init` of a model that contains models: each initialises its modules outside of inner ones."""
    models = [module for module in model.modules() if hasattr(module, OWN_INIT)]
    owners = {module: owner for owner in models for module in owner.modules()}  # inner models come later
    return lambda module: getattr(owners[module], OWN_INIT)(module)


def _reset_adapters(module: nn.Module) -> None:
    """Initialise the LoRA adapters in ``module`` itself, as peft does."""
    reset = getattr(module, "reset_lora_parameters", None)
    if callable(reset):
        for name in module.lora_A.keys() | module.lora_embedding_A.keys():  # type: ignore[union-attr,operator]
            reset(name, True)


class _Reader(UnitInit):
    """Sets the values of the parameters of one unit after another.

    The tensors in the files are read after the unit's last module, so that they overwrite any values of
    ``init``.
    """

    def __init__(self, model: nn.Module, tensors: Tensors, init: Init | None) -> None:
        self._tensors = tensors
        self._inits: list[tuple[Init, set[torch.Tensor]]] = []
        if init is not None and tensors.missing:
            self._inits.append((init, {*tensors.missing}))
        if tensors.computed:
            self._inits.append((_own_init(model), tensors.computed))
        if tensors.added:
            self._inits.append((init or _reset_adapters, tensors.added))
        if self._inits and hasattr(model, OWN_INIT):
            for tensor in (*model.parameters(), *model.buffers()):
                if tensors.source(tensor) is not None:
                    setattr(tensor, HAS_VALUES, True)
        self._pending: list[nn.Module] = []
        self._read: set[torch.Tensor] = set()

    def __call__(self, module: nn.Module) -> None:
        self._pending.append(module)
        if self._inits:
            self._initialise(module)

    def end_unit(self, module: nn.Module) -> None:
        self._read_pending()
        if self._inits:
            self._tensors.fill_buffers(module)

    def _initialise(self, module: nn.Module) -> None:
        held = {*module.parameters(), *module.buffers()}
        before = {param: param._version for param in module.parameters() if param in self._read}
        for init, wanted in self._inits:
            if held & wanted:
                init(module)
        for param, version in before.items():
            if param._version != version:
                raise ValueError(
                    f"init= has written into '{self._tensors.name(param)}', which is in the files, when "
                    f"called with a {type(module).__name__}: let it set only what is that module's own"
                )

    def _read_pending(self) -> None:
        params = {param: None for module in self._pending for param in module._parameters.values()}
        for param in params:
            if param is not None and self._tensors.read_into(param):
                self._read.add(param)
        self._pending.clear()
