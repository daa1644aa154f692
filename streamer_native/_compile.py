"""How every kernel of this package is compiled.

`kernel` compiles a loop over the blocks that a thread claims (`_threads.claimed`), `inline` and `reduction`
the functions that such a loop calls. The shape that vectorises is always the same: `kernel` goes through
blocks of `BLOCK` elements and hands slices to an `inline` function, whose own loop counts from 0. A signed
`range(lo, hi)` in the kernel itself would stay scalar and take six times as long.
"""

import hashlib
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core import event

_log = logging.getLogger("streamer_native")

Function = TypeVar("Function", bound=Callable[..., Any])

# Elements per block: long enough to hide the call, short enough to share out evenly; 2k to 512k do alike.
BLOCK = 16384

# Elementwise work is compiled as written. With `contract` LLVM may fuse either product of `a * b + c * d`,
# and it did choose differently in two kernels: the split master no longer equalled the fp32 one. What is to
# be fused says so (`fused_multiply_add`), and the result is the same on every processor, vector or tail.
# A sum needs lanes, hence `reassoc`. No kernel may assume away NaN and Inf (`nnan`, `ninf`): they must reach
# whoever checks for them.
_REDUCTION = {"contract", "reassoc", "nsz"}


def _source_fingerprint() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


_FINGERPRINT = _source_fingerprint()


def kernel(function: Function) -> Function:
    """Compile a kernel, cached on disk where Numba finds a directory it can write to.

    Numba's cache notices an edit to the file that holds the kernel, but not to one whose functions it calls.
    The name of a cache file is made from `__qualname__`, so a fingerprint of the whole package goes in there.
    """
    function.__qualname__ = f"{function.__qualname__}_{_FINGERPRINT}"
    compiled = partial(numba.njit, nogil=True, error_model="numpy")
    try:
        return cast(Function, compiled(cache=True)(function))
    except RuntimeError as error:
        # A read-only installation with no home directory: compile anew in each process.
        if "no locator available" not in str(error):
            raise
        return cast(Function, compiled()(function))


def inline(function: Function) -> Function:
    """Compile an elementwise function to be called from a kernel; LLVM inlines it there."""
    return cast(Function, numba.njit(nogil=True, error_model="numpy")(function))


def reduction(function: Function) -> Function:
    """Compile a function to be called from a kernel whose sums may be taken in any order, hence in lanes."""
    return cast(Function, numba.njit(nogil=True, fastmath=_REDUCTION, error_model="numpy")(function))


class _FirstCompile(event.Listener):
    """Says once in a process why it stands still: a kernel is compiled that no cache had.

    Numba tells of a compilation only after it has looked in vain in the cache on disk.
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
