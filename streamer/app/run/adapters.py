"""``[lora]``: low-rank adapters beside the linear layers of a pretrained model whose own weights stay as they
are (Hu et al., 2021, arXiv:2106.09685), by the peft library.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import nn

import streamer
from streamer.app.config import Config, ConfigError, LoraConfig
from streamer.app.run.beside import bytes_beside, copy_beside, files_beside
from streamer.checkpoint.frozen import LeftOut
from streamer.checkpoint.manifest import new_folder
from streamer.checkpoint.tensors import BY_NAME
from streamer.errors import CheckpointError, amount, shortened
from streamer.pretrained.architecture import is_quantized
from streamer.pretrained.files import Stored, stored_tensors
from streamer.pretrained.match import Tensors
from streamer.pretrained.quantized_files import StoredQuantized, StoredStack, with_quantized
from streamer.pretrained.stacks import name_of_original

#: The names of files and tensors that peft looks for.
WEIGHTS, PREFIX = "adapter_model.safetensors", "base_model.model."
#: peft's name of the first adapter of a model.
ADAPTER = "default"


def library() -> Any:
    """The peft library. Raises ConfigError where it is not installed."""
    try:
        return import_module("peft")
    except ImportError as error:
        raise ConfigError(f"[lora] needs the peft library ({error}): pip install '.[lora]'") from error


def add_adapters(model: nn.Module, config: LoraConfig) -> nn.Module:
    """``model`` with the adapters that ``config`` asks for, its own parameters frozen. Adapters of
    a model without values have none. Raises ConfigError for what peft refuses."""
    peft = library()
    options = peft.LoraConfig(
        r=config.rank,
        lora_alpha=2 * config.rank if config.alpha is None else config.alpha,
        lora_dropout=config.dropout,
        target_modules=config.targets if isinstance(config.targets, str) else [*config.targets],
        use_rslora=config.rank_stabilized,
        task_type="CAUSAL_LM",
    )
    try:
        adapted: nn.Module = peft.inject_adapter_in_model(options, model)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"[lora]: {' '.join(str(error).split())}") from error
    # peft adapts parameters that are no layer's own, such as stacked experts, by writing them in each forward
    of_parameters = getattr(peft.tuners.lora.layer, "ParamWrapper", ())
    if written := [name for name, module in adapted.named_modules() if isinstance(module, of_parameters)]:
        raise ConfigError(
            f"[lora] would adapt {shortened(written, 1)}, which peft writes in each forward, and streamed "
            "weights may not be written there: name the layers beside them, as in --set "
            '\'lora.targets=["q_proj", "k_proj", "v_proj", "o_proj"]\''
        )
    return adapted


def write_adapters(model: nn.Module, config: Config, folder: Path) -> None:
    """Write the adapters of the wrapped ``model`` of a run of ``config`` as peft does, the tokenizer beside
    them; complete, or not at all."""
    streamer.synchronize(model)
    trained = {name: param.detach().cpu() for name, param in model.named_parameters() if param.requires_grad}
    write_values(model, trained, config, folder)


def write_values(model: nn.Module, values: Mapping[str, torch.Tensor], config: Config, folder: Path) -> None:
    """`write_adapters` for adapters of ``model`` with these ``values``, by name."""
    base, beside = str(config.model.pretrained), files_beside(config)
    peft, held = library(), cast(Any, model)
    # not "auto", which asks a hub on the network
    found = peft.get_peft_model_state_dict(model, dict(values), save_embedding_layers=False)
    tensors = {f"{PREFIX}{name}": tensor.contiguous() for name, tensor in found.items()}
    options = copy.copy(held.peft_config[ADAPTER])
    options.base_model_name_or_path, options.inference_mode = os.path.abspath(base), True
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    needed = nbytes + bytes_beside(beside, len(tensors))
    with new_folder(folder, nbytes=needed, what="a folder of adapters") as hidden, torch.no_grad():
        save_file(tensors, hidden / WEIGHTS, metadata={"format": "pt"})
        options.save_pretrained(hidden)
        copy_beside(beside, hidden)
        for path in hidden.iterdir():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
    print(
        f"The adapters, {amount(nbytes)}, are in {folder}: peft.AutoPeftModelForCausalLM.from_pretrained("
        f"{str(folder)!r}); streamer export --merge makes a whole model of them"
    )


class Merged:
    """The parameters of a pretrained model with the adapters of a checkpoint added to them, one at a time."""

    def __init__(
        self, plain: nn.Module, base: Path, config: LoraConfig, adapters: Mapping[str, Stored]
    ) -> None:
        """``plain`` is the model without values and without adapters, which it gets here; its weights are in
        ``base``; ``adapters`` are the values of the checkpoint, by name. Raises CheckpointError where either
        are those of another model."""
        stored = stored_tensors(base)
        if is_quantized(plain):
            stored = with_quantized(base, stored, cast(Any, plain).config)
        sources = Tensors(plain, stored, ())
        #: the parameters of the model without adapters, each by all names that it has
        self.names: dict[nn.Parameter, list[str]] = {}
        for name, param in plain.named_parameters(remove_duplicate=False):
            self.names.setdefault(param, []).append(name)
        if absent := [names[0] for param, names in self.names.items() if sources.source(param) is None]:
            raise CheckpointError(f"{base} is not of the run's model; missing: {shortened(absent)}")
        self._sources = sources
        self._adapters = adapters
        self._adapted = add_adapters(plain, config)
        #: the names that the same parameters have beside their adapters
        self.beside = {param: name for name, param in self._adapted.named_parameters() if param in self.names}
        layer_class = library().tuners.lora.LoraLayer
        layers = {
            name: module for name, module in self._adapted.named_modules() if isinstance(module, layer_class)
        }
        self._layers = {layer.get_base_layer().weight: (name, layer) for name, layer in layers.items()}
        wanted = {name for name, param in self._adapted.named_parameters() if param not in self.names}
        if wanted != adapters.keys():
            differing = shortened(sorted(wanted ^ adapters.keys()))
            raise CheckpointError(f"the checkpoint is not of the run's [lora]; these differ: {differing}")
        for param in self._layers:
            if len(self.names[param]) > 1:
                raise ConfigError(
                    f"{' and '.join(self.names[param])} are one parameter, and only one of them is adapted: "
                    "use the adapters as they are, without --merge"
                )

    def was_quantized(self, param: nn.Parameter, left_out: Mapping[str, LeftOut]) -> bool:
        """Whether ``param`` was quantized for the run, and is not in the files; of what was frozen then
        ``left_out`` tells. What the parts of such a parameter were depends on the device too."""
        return self.beside[param] not in left_out and not self._parts_in_files(param)

    def _parts_in_files(self, param: nn.Parameter) -> dict[str, Callable[[], torch.Tensor]]:
        """What reads the parts of ``param``, by the names that they have in training, if it is quantized in
        the files."""
        source, name = self._sources.source(param), self.beside[param]
        assert source is not None, "looked for at first"
        is_stack = param.dim() == 3
        if is_stack and isinstance(stack := StoredStack.of(source), StoredStack):
            name = name_of_original(name)
            return {f"{name}.{part}": partial(read, "cpu") for part, read in stack.parts.items()}
        if not is_stack and isinstance(source.stored, StoredQuantized):
            return {f"{name}.{part}": it.read for part, it in source.stored.parts.items()}
        return {}

    def read(self, param: nn.Parameter, left_out: Mapping[str, LeftOut], dtype: torch.dtype) -> torch.Tensor:
        """The parameter in ``dtype``, what its adapter adds with it. Raises CheckpointError unless the base
        has the values that it had in training, as ``left_out`` tells, where it was not quantized for it."""
        source, beside = self._sources.source(param), self.beside[param]
        assert source is not None, "looked for at first"
        values = source.read()
        if (known := left_out.get(beside)) is not None:
            values = values.to(BY_NAME[known.dtype])
            is_same = LeftOut.of(values) == known
        else:
            parts = self._parts_in_files(param)
            is_same = all(LeftOut.of(read()) == left_out.get(name) for name, read in parts.items())
        if not is_same:
            raise CheckpointError(
                f"'{self.names[param][0]}' has other values than in training: put the weights "
                "that the run was trained with back into its model.pretrained"
            )
        if param not in self._layers:
            return values.to(dtype)
        name, layer = self._layers[param]
        for part, _ in [*layer.named_parameters()]:
            if (stored := self._adapters.get(f"{name}.{part}")) is not None:
                owner, _, own = part.rpartition(".")
                setattr(layer.get_submodule(owner), own, nn.Parameter(stored.read().float(), False))
        added: torch.Tensor = layer.get_delta_weight(ADAPTER)
        return (values.float() + added.float()).to(dtype)
