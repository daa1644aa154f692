"""What lies beside a model's weights and is needed to use them: its tokenizer with the template of chats, how
it generates, and its licence.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from streamer.app.config import Config

#: Names of files that a tokenizer is made of.
OF_TOKENIZER = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model",
    "*.tiktoken", "chat_template*",
)  # fmt: skip
#: Names of files of a model itself, besides its config, which is written anew.
OF_MODEL = ("generation_config.json", "LICENSE*", "NOTICE*")
#: Bytes of disk for a config, a README and the like, and for what a file's header and the index of several
#: files say of a tensor.
MARGIN_BYTES, NAMED_BYTES = 1 << 20, 512


def files_beside(config: Config) -> list[Path]:
    """The files that belong beside the weights of a run of ``config``: from the folder of its tokenizer and,
    for a pretrained model, from the model's."""
    pretrained = config.model.pretrained
    found = _matching(config.data.tokenizer or pretrained, OF_TOKENIZER) + _matching(pretrained, OF_MODEL)
    return [*{path.name: path for path in found}.values()]


def _matching(given: str | None, patterns: Sequence[str]) -> list[Path]:
    if given is None:
        return []
    folder = Path(given)
    folder = folder if folder.is_dir() else folder.parent
    return [path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()]


def bytes_beside(files: Sequence[Path], tensors: int) -> int:
    """Bytes of disk that a folder of weights takes beside the values of its ``tensors``, with copies of
    ``files``."""
    return sum(path.stat().st_size for path in files) + NAMED_BYTES * tensors + MARGIN_BYTES


def copy_beside(files: Sequence[Path], folder: Path) -> list[str]:
    """Copy ``files`` into ``folder``, over what is there; their names."""
    for path in files:
        shutil.copyfile(path, folder / path.name)
    return [path.name for path in files]
