"""What stands beside exported weights: the model's config and how to load them."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from streamer.app.config import ModelConfig
from streamer.version import __version__

CONFIG, README = "config.json", "README.txt"


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
            (folder / CONFIG).write_text(self._config() + "\n", encoding="utf-8")
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
            module, _, factory = self.config.factory.partition(":")
            lines[:2] = ["import json", *lines[:2], f"from {module} import {factory}"]
            lines.append('config = json.loads((folder / "config.json").read_text(encoding="utf-8"))')
            if self.tied:
                lines.append('weights |= {name: weights[kept] for name, kept in config["tied"].items()}')
            lines += [f'model = {factory}(**config["args"])', "model.load_state_dict(weights)"]
        return "\n".join(lines)


def _hugging_face(model: nn.Module | None) -> Any:
    """``model`` if it is one of Hugging Face's, else None."""
    # whoever made such a model has imported it
    library = sys.modules.get("transformers")
    return model if library is not None and isinstance(model, library.PreTrainedModel) else None


def _load_hugging_face(kind: type[Any]) -> str:
    module = "transformers" if kind.__module__.startswith("transformers.") else kind.__module__
    return f'from {module} import {kind.__name__}\n\nmodel = {kind.__name__}.from_pretrained(".")'
