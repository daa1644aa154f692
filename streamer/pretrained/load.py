"""`from_pretrained`: a model from files, a layer at a time into host memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from streamer.errors import CheckpointError
from streamer.model.layers import Layers, find_layers
from streamer.model.move_in import Init, UnitInit
from streamer.model.units import DTYPES
from streamer.model.wrap import wrap
from streamer.pretrained.architecture import ModelClass, build
from streamer.pretrained.files import stored_tensors
from streamer.pretrained.match import Tensors, commonest

#: The method of transformers' models that sets first values, and the mark of those that it leaves alone.
OWN_INIT, HAS_VALUES = "_init_weights", "_is_hf_initialized"


def from_pretrained(
    path: str | os.PathLike[str],
    model_class: ModelClass | None = None,
    layers: Layers = None,
    *,
    config: Any = None,
    init: Init | str | None = None,
    ignore: str | Sequence[str] = (),
    dtype: torch.dtype | None = None,
    **options: Any,
) -> nn.Module:
    """A wrapped model with the weights of a local Hugging Face folder, or of a safetensors file.

    The weights go from the files, which are mapped and not read as a whole, into host memory, a layer at a
    time: the model is never whole anywhere else. Nothing is downloaded, and no code in the folder is run.

    Args:
        path: a folder with ``config.json`` and ``model.safetensors`` or several files with their index, or a
            safetensors file.
        model_class: a class of the transformers library, one of its Auto classes, or a function without
            arguments that makes a model whose ``state_dict`` has the files' names. None is the class that
            ``config.json`` names.
        layers: see `streamer.wrap`.
        config: the config of a transformers model in place of that in the folder, such as one with dropout.
        init: gives first values to what is not in the files, such as a new head: a function as for
            `streamer.wrap`, or the name of a method of the model (``"_init_weights"`` of transformers'
            models). It is called with the modules that something is missing in, children before their
            parents; what is in the files stays as it is there. Without it, what is missing is an error.
        ignore: a regular expression, or several; tensors of the files are left out if one is found in their
            name.
        dtype: what parameters are computed in, as for `streamer.wrap`: fp32 files give exact fp32 masters to
            bf16 weights. None streams each parameter in the dtype that it has in the files. Buffers of a
            transformers model are in the dtype that its class gives them for ``dtype``.
        options: the other ones of `streamer.wrap`.

    A transformers model is in evaluation mode, as that library's ``from_pretrained`` leaves it: call
    ``model.train()`` for dropout. What its constructor has frozen stays frozen.

    Raises:
        CheckpointError: a ValueError that lists the tensors that are missing, unexpected, of another shape or
            in a file that is cut off, before anything is allocated.
        ValueError, MemoryError: what `streamer.wrap` raises, and for a path or class that cannot be used.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path}: there is no such file or folder; nothing is downloaded: give a local one")
    stored = stored_tensors(path)
    usual = commonest((tensor.dtype, prod(tensor.shape)) for tensor in stored.values())
    model = build(path, model_class, config, dtype if dtype in DTYPES else usual)
    initialise = _resolved(model, init)
    tensors = Tensors(model, stored, ignore)
    if faults := tensors.faults(may_be_missing=initialise is not None):
        raise CheckpointError(f"{path} is not of a {type(model).__name__}; {'; '.join(faults)}")
    find_layers(model, layers)  # says early what is wrong with the paths
    reader = _Reader(model, tensors, initialise)
    tensors.take_dtypes(dtype if dtype in DTYPES else None)
    tensors.fill_buffers(model)
    return wrap(model, layers=layers, init=reader, dtype=dtype, **options)


def _resolved(model: nn.Module, init: Init | str | None) -> Init | None:
    """The function that ``init`` stands for. Raises ValueError where there is none."""
    if init == OWN_INIT and hasattr(model, OWN_INIT):
        return _own_init(model)
    resolved = getattr(model, init, None) if isinstance(init, str) else init
    if init is not None and not callable(resolved):
        raise ValueError(
            f"init={init!r}: give a function of a module, or the name of a method of {type(model).__name__}"
        )
    return resolved


def _own_init(model: nn.Module) -> Init:
    """What a model made of several models does: each initialises the modules that are in no inner one."""
    models = [module for module in model.modules() if hasattr(module, OWN_INIT)]
    owners = {module: owner for owner in models for module in owner.modules()}  # inner ones come later
    return lambda module: getattr(owners[module], OWN_INIT)(module)


class _Reader(UnitInit):
    """Gives the parameters of one unit after another their values.

    When all modules of a unit have come, all that is in the files is read, so that whatever was made up for
    it on the way is gone.
    """

    def __init__(self, model: nn.Module, tensors: Tensors, init: Init | None) -> None:
        self._tensors = tensors
        self._inits: list[tuple[Init, set[torch.Tensor]]] = []
        if init is not None and tensors.missing:
            self._inits.append((init, {*tensors.missing}))
        if tensors.computed:
            self._inits.append((_own_init(model), tensors.computed))
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
            if param is not None and (source := self._tensors.source(param)) is not None:
                param.copy_(source.read())
                self._read.add(param)
        self._pending.clear()
