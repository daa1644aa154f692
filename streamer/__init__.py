"""Train transformers that do not fit on the GPU: `wrap` a model, train it with `AdamW` in a plain loop."""

from importlib import import_module
from typing import TYPE_CHECKING

from streamer.version import __version__

if TYPE_CHECKING:
    from streamer.api import Plan as Plan
    from streamer.api import plan as plan
    from streamer.api import wrap as wrap
    from streamer.checkpoint.load import Loaded as Loaded
    from streamer.checkpoint.load import load as load
    from streamer.checkpoint.save import save as save
    from streamer.deepspeed import DeepSpeedConfig as DeepSpeedConfig
    from streamer.deepspeed import from_deepspeed_config as from_deepspeed_config
    from streamer.errors import CheckpointError as CheckpointError
    from streamer.errors import DiskError as DiskError
    from streamer.loss import chunked_cross_entropy as chunked_cross_entropy
    from streamer.model.stats import Stats as Stats
    from streamer.model.stats import save_trace as save_trace
    from streamer.model.stats import stats as stats
    from streamer.model.stats import synchronize as synchronize
    from streamer.model.unwrap import unwrap as unwrap
    from streamer.optim.adamw import AdamW as AdamW
    from streamer.optim.adamw import NonFiniteError as NonFiniteError
    from streamer.optim.clip import clip_grad_norm_ as clip_grad_norm_
    from streamer.optim.lion import Lion as Lion
    from streamer.optim.muon import Muon as Muon
    from streamer.optim.optimizer import Optimizer as Optimizer
    from streamer.planner.model import chosen as chosen
    from streamer.pretrained.load import from_pretrained as from_pretrained

__all__ = [
    "AdamW",
    "CheckpointError",
    "DeepSpeedConfig",
    "DiskError",
    "Lion",
    "Loaded",
    "Muon",
    "NonFiniteError",
    "Optimizer",
    "Plan",
    "Stats",
    "__version__",
    "chosen",
    "chunked_cross_entropy",
    "clip_grad_norm_",
    "from_deepspeed_config",
    "from_pretrained",
    "load",
    "plan",
    "save",
    "save_trace",
    "stats",
    "synchronize",
    "unwrap",
    "wrap",
]

#: The module of every public name. The name's first use imports it: torch and numba take seconds, which
#: `streamer --help` need not wait for, and read their environment at import.
_HOMES = {
    "AdamW": "streamer.optim.adamw",
    "CheckpointError": "streamer.errors",
    "DeepSpeedConfig": "streamer.deepspeed",
    "DiskError": "streamer.errors",
    "Lion": "streamer.optim.lion",
    "Loaded": "streamer.checkpoint.load",
    "Muon": "streamer.optim.muon",
    "NonFiniteError": "streamer.optim.adamw",
    "Optimizer": "streamer.optim.optimizer",
    "Plan": "streamer.api",
    "Stats": "streamer.model.stats",
    "chosen": "streamer.planner.model",
    "chunked_cross_entropy": "streamer.loss",
    "clip_grad_norm_": "streamer.optim.clip",
    "from_deepspeed_config": "streamer.deepspeed",
    "from_pretrained": "streamer.pretrained.load",
    "load": "streamer.checkpoint.load",
    "plan": "streamer.api",
    "save": "streamer.checkpoint.save",
    "save_trace": "streamer.model.stats",
    "stats": "streamer.model.stats",
    "synchronize": "streamer.model.stats",
    "unwrap": "streamer.model.unwrap",
    "wrap": "streamer.api",
}

if not TYPE_CHECKING:  # to a type checker a __getattr__ means that every name is there

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOMES})
