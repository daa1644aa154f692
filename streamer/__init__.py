"""Train transformers that do not fit on the GPU: `wrap` a model, train it with `AdamW` in a plain loop."""

from importlib import import_module
from typing import TYPE_CHECKING

from streamer.version import __version__

if TYPE_CHECKING:
    from streamer.choosing import chosen as chosen
    from streamer.clip import clip_grad_norm_ as clip_grad_norm_
    from streamer.deepspeed.config import DeepSpeedConfig as DeepSpeedConfig
    from streamer.deepspeed.config import from_deepspeed_config as from_deepspeed_config
    from streamer.files.errors import CheckpointError as CheckpointError
    from streamer.finite import NonFiniteError as NonFiniteError
    from streamer.loading import Loaded as Loaded
    from streamer.loading import load as load
    from streamer.loss import chunked_cross_entropy as chunked_cross_entropy
    from streamer.observe import Stats as Stats
    from streamer.observe import save_trace as save_trace
    from streamer.observe import stats as stats
    from streamer.observe import synchronize as synchronize
    from streamer.optim import AdamW as AdamW
    from streamer.pretrained.load import from_pretrained as from_pretrained
    from streamer.saving import save as save
    from streamer.unwrapping import unwrap as unwrap
    from streamer.wrapping import wrap as wrap

__all__ = [
    "AdamW",
    "CheckpointError",
    "DeepSpeedConfig",
    "Loaded",
    "NonFiniteError",
    "Stats",
    "__version__",
    "chosen",
    "chunked_cross_entropy",
    "clip_grad_norm_",
    "from_deepspeed_config",
    "from_pretrained",
    "load",
    "save",
    "save_trace",
    "stats",
    "synchronize",
    "unwrap",
    "wrap",
]

#: The module of every public name. It is imported when the name is first asked for: torch and numba take
#: seconds, for which `streamer --help` need not wait, and read their environment when they are loaded.
_HOMES = {
    "AdamW": "streamer.optim",
    "CheckpointError": "streamer.files.errors",
    "DeepSpeedConfig": "streamer.deepspeed.config",
    "Loaded": "streamer.loading",
    "NonFiniteError": "streamer.finite",
    "Stats": "streamer.observe",
    "chosen": "streamer.choosing",
    "chunked_cross_entropy": "streamer.loss",
    "clip_grad_norm_": "streamer.clip",
    "from_deepspeed_config": "streamer.deepspeed.config",
    "from_pretrained": "streamer.pretrained.load",
    "load": "streamer.loading",
    "save": "streamer.saving",
    "save_trace": "streamer.observe",
    "stats": "streamer.observe",
    "synchronize": "streamer.observe",
    "unwrap": "streamer.unwrapping",
    "wrap": "streamer.wrapping",
}

if not TYPE_CHECKING:  # to a type checker a __getattr__ means that every name is there

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOMES})
