"""Train transformers that do not fit on the GPU: `wrap` a model, train it with `AdamW` in a plain loop."""

from streamer.choosing import chosen
from streamer.clip import clip_grad_norm_
from streamer.deepspeed.config import DeepSpeedConfig, from_deepspeed_config
from streamer.files.errors import CheckpointError
from streamer.finite import NonFiniteError
from streamer.loading import Loaded, load
from streamer.loss import chunked_cross_entropy
from streamer.observe import Stats, save_trace, stats, synchronize
from streamer.optim import AdamW
from streamer.pretrained.load import from_pretrained
from streamer.saving import save
from streamer.unwrapping import unwrap
from streamer.version import __version__
from streamer.wrapping import wrap

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
