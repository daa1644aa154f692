"""The compilation of every kernel of this package.

`kernel` compiles a loop over the blocks that a thread claims (`_threads.claimed`), `inline` and `reduction`
the functions that such a loop calls. Only one form vectorises: `kernel` goes through blocks of `BLOCK`
elements and passes slices to an `inline` function, whose own loop counts from 0. A signed `range(lo, hi)` in
the kernel itself would stay scalar and take six times as long.
"""

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core import event

_log = logging.getLogger("streamer_native")

Function = TypeVar("Function", bound=Callable[..., Any])

# Elements per block: long enough to hide the call, short enough to divide evenly; 2k to 512k perform alike.
BLOCK = 16384

# Elementwise work is compiled as written. With `contract` LLVM may fuse either product of `a * b + c * d`,
# and it did choose differently in two kernels: the split master no longer equalled the fp32 one. Code that
# needs a fused operation calls `fused_multiply_add`, and the result is the same on every processor, vector or
# tail. A sum needs lanes, hence `reassoc`. No kernel may assume away NaN and Inf (`nnan`, `ninf`): checks
# after the kernel need them.
_REDUCTION = {"contract", "reassoc", "nsz"}


def _source_fingerprint() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


_FINGERPRINT = _source_fingerprint()


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def _cache_folder() -> str | None:
    """The folder of compiled kernels: NUMBA_CACHE_DIR, or a folder of the user's; None if it cannot be
    written.

    Numba would keep them next to the sources. But pip leaves a folder in site-packages if it holds files that
    pip has not installed, and the rest of a package hides the same package installed elsewhere, such as an
    editable install.
    """
    if numba.config.CACHE_DIR:  # type: ignore[attr-defined]
        folder = Path(numba.config.CACHE_DIR)  # type: ignore[attr-defined]
    else:
        users = os.environ.get("XDG_CACHE_HOME", "")
        try:
            parent = Path(users) if os.path.isabs(users) else Path.home() / ".cache"
        except RuntimeError:
            return None
        folder = parent / "streamer" / "numba"
    return str(folder) if _writable(folder) else None


def _remove_old_cache(folder: Path) -> None:
    """Remove files of earlier versions next to the sources in ``folder``."""
    with suppress(OSError):
        for path in (folder / "__pycache__").glob("*.nb[ic]"):
            path.unlink()


_CACHE_FOLDER = _cache_folder()
_remove_old_cache(Path(__file__).parent)


@contextmanager
def _kept_in(folder: str) -> Iterator[None]:
    """Inside the block functions are compiled with a cache in ``folder``, independent of other caches."""
    others = numba.config.CACHE_DIR  # type: ignore[attr-defined]
    numba.config.CACHE_DIR = folder  # type: ignore[attr-defined]
    try:
        yield
    finally:
        numba.config.CACHE_DIR = others  # type: ignore[attr-defined]


def kernel(function: Function) -> Function:
    """Compile a kernel, cached on disk if a folder can be written: see `_cache_folder`.

    Numba's cache notices an edit to the file of the kernel, but not to a file whose functions it calls. The
    name of a cache file includes `__qualname__`, so a fingerprint of the whole package goes in there.
    """
    function.__qualname__ = f"{function.__qualname__}_{_FINGERPRINT}"
    compiled = partial(numba.njit, nogil=True, error_model="numpy")
    if _CACHE_FOLDER is None:  # a read-only home: compile again in each process
        return cast(Function, compiled()(function))
    with _kept_in(_CACHE_FOLDER):
        return cast(Function, compiled(cache=True)(function))


def inline(function: Function) -> Function:
    """Compile an elementwise function to be called from a kernel; LLVM inlines it there."""
    return cast(Function, numba.njit(nogil=True, error_model="numpy")(function))


def reduction(function: Function) -> Function:
    """Compile a function for a kernel, with sums in any order, and so in lanes."""
    return cast(Function, numba.njit(nogil=True, fastmath=_REDUCTION, error_model="numpy")(function))


class _FirstCompile(event.Listener):
    """Logs once in a process why it pauses: a kernel is compiled that no cache had.

    Numba reports a compilation only if the kernel is not in the cache on disk.
    """

    def __init__(self) -> None:
        self.said = False

    def on_start(self, compilation: Any) -> None:
        dispatcher = compilation.data["dispatcher"]
        # The inlined functions are compiled too, and have no cache of their own.
        if self.said or not dispatcher.py_func.__qualname__.endswith(_FINGERPRINT):
            return
        self.said = True
        folder = dispatcher.stats.cache_path
        _log.warning(
            "compiling the host update, once for each dtype and state layout: some seconds. %s",
            f"It is kept in {folder}"
            if folder
            else "No cache directory can be written, so every process will do it again: set NUMBA_CACHE_DIR",
        )

    def on_end(self, compilation: Any) -> None:
        pass


event.register("numba:compile", _FirstCompile())  # type: ignore[no-untyped-call]
