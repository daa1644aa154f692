"""How every kernel of this package is compiled, and the one door through which it is entered.

`kernel` compiles a parallel loop over blocks, `inline` and `reduction` the functions that such a loop calls.
The shape that vectorises is always the same: `kernel` runs a `prange` over blocks of `BLOCK` elements and
hands slices to an `inline` function, whose own loop counts from 0. A signed `range(lo, hi)` inside the
`prange` would stay scalar and take six times as long.
"""

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

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
    """Compile a parallel kernel, cached on disk where Numba finds a directory it can write to.

    Numba's cache notices an edit to the file that holds the kernel, but not to one whose functions it calls.
    The name of a cache file is made from `__qualname__`, so a fingerprint of the whole package goes in there.
    """
    function.__qualname__ = f"{function.__qualname__}_{_FINGERPRINT}"
    parallel = partial(numba.njit, parallel=True, nogil=True, error_model="numpy")
    try:
        return cast(Function, parallel(cache=True)(function))
    except RuntimeError as error:
        # A read-only installation with no home directory: compile anew in each process.
        if "no locator available" not in str(error):
            raise
        return cast(Function, parallel()(function))


def inline(function: Function) -> Function:
    """Compile an elementwise function to be called from a kernel; LLVM inlines it there."""
    return cast(Function, numba.njit(nogil=True, error_model="numpy")(function))


def reduction(function: Function) -> Function:
    """Compile a function to be called from a kernel whose sums may be taken in any order, hence in lanes."""
    return cast(Function, numba.njit(nogil=True, fastmath=_REDUCTION, error_model="numpy")(function))


_door = threading.Lock()
_num_threads: int | None = None


def set_num_threads(num_threads: int | None) -> None:
    """Set how many threads every kernel of this process uses, whichever Python thread calls it.

    `None`, the default, leaves it to Numba (`NUMBA_NUM_THREADS`, or `numba.set_num_threads` in the calling
    thread). Raises ValueError if `num_threads` is not between 1 and the number Numba was started with.
    """
    global _num_threads
    most = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]  # config fills itself at run time
    if num_threads is not None and not 1 <= num_threads <= most:
        raise ValueError(
            f"num_threads={num_threads} must be None or between 1 and {most}; "
            "for more, set the environment variable NUMBA_NUM_THREADS before Python starts"
        )
    _num_threads = num_threads


@contextmanager
def exclusive() -> Iterator[None]:
    """Hold the door for one kernel call: one Python thread at a time, with the number of threads set.

    Numba's work-queue threading layer, which is what remains where no OpenMP is installed, aborts the process
    when two Python threads are inside kernels; two models in one process have two worker threads.
    """
    with _door:
        callers_own = numba.get_num_threads()
        # Numba keeps this number per thread, so it must be set by the thread that is about to call.
        numba.set_num_threads(callers_own if _num_threads is None else _num_threads)
        try:
            yield
        finally:
            numba.set_num_threads(callers_own)
