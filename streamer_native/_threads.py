"""How the blocks of one kernel call are shared out to threads. `share_out` is the one door to every kernel.

[Note: threads that sleep]
The threads are Python's own. Each of them, and the caller, enters the same compiled kernel, which needs no
GIL, and takes one block after another from a counter that they share. Between calls the threads sleep in the
queue that brings them work. The threads of an OpenMP library spin for milliseconds after each parallel loop
instead, unless an environment variable is set before the library is loaded; where another process uses the
cores, the spinning threads take them from those that have work to do. That library is PyTorch's too, so its
settings are not for this package to change.

The caller never waits for a thread that has not begun: when no block is left, the caller withdraws the
request. So a thread that gets no core, or no GIL, slows nothing down, and a forked process, which has none of
the threads, computes alone.

Which thread takes a block changes nothing in the result: no block depends on another.
"""

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from streamer_native._arrays import Int64Array
from streamer_native._compile import BLOCK, inline

Arrays = TypeVar("Arrays", bound=tuple[Any, ...])

#: What the threads of one call share, [2]: the next block that nobody has taken, and the number of blocks.
Blocks = Int64Array


def _take(_context: Any, blocks: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.atomic_rmw("add", array.data, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(blocks), codegen


def _borrow(_context: Any, arrays: Any) -> Any:
    def borrow(context: Any, builder: Any, type: Any, value: Any) -> Any:
        if isinstance(type, types.BaseTuple):
            items = [
                borrow(context, builder, item, builder.extract_value(value, place))
                for place, item in enumerate(cast(Any, type).types)
            ]
            return context.make_tuple(builder, type, items)
        array = context.make_array(type)(context, builder, value)
        array.meminfo = ir.Constant(array.meminfo.type, None)
        return array._getvalue()

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return borrow(context, builder, signature.args[0], args[0])

    return arrays(arrays), codegen


# The number of a block that no other thread gets.
_take_block = cast(Callable[[Blocks], int], intrinsic(_take))

# In a kernel: the same arrays (a tuple of them, and of such tuples) with references that are not counted. A
# slice of a counted array changes the count twice, in memory that all threads share. The caller of the kernel
# keeps the arrays alive.
borrowed = cast(Callable[[Arrays], Arrays], intrinsic(_borrow))


@inline
def claimed(blocks: Blocks) -> Iterator[int]:
    """In a kernel: the numbers of the blocks that are this thread's."""
    block = _take_block(blocks)
    while block < blocks[1]:
        yield block
        block = _take_block(blocks)


def num_blocks(size: int) -> int:
    """How many blocks of `BLOCK` elements an array of ``size`` has; the last may be short."""
    return -(-size // BLOCK)


Ends = queue.SimpleQueue[BaseException | None]


class _Team:
    """Threads that wait for work, started as they are first needed."""

    def __init__(self) -> None:
        self._size = 0
        self._requests: queue.SimpleQueue[tuple[Callable[[], None], Ends]] = queue.SimpleQueue()
        self._in_use = threading.Lock()

    def run(self, work: Callable[[], None], helpers: int) -> None:
        """Call ``work`` in the caller's thread and in at most ``helpers`` others, and raise what any of them
        has raised. Calls of `run` take turns."""
        with self._in_use:
            while self._size < helpers:
                self._size += 1
                threading.Thread(target=self._serve, name=f"kernels-{self._size}", daemon=True).start()
            ends: Ends = queue.SimpleQueue()
            for _ in range(helpers):
                self._requests.put((work, ends))
            try:
                work()
            finally:
                errors = [ends.get() for _ in range(helpers - self._withdraw())]
        for error in filter(None, errors):
            raise error

    def _withdraw(self) -> int:
        """Take back the requests that no thread has begun; how many those were."""
        number = 0
        with contextlib.suppress(queue.Empty):
            while True:
                self._requests.get_nowait()
                number += 1
        return number

    def _serve(self) -> None:
        while True:
            work, ends = self._requests.get()
            error: BaseException | None = None
            try:
                work()
            # the caller of `run` raises it
            except BaseException as failure:  # noqa: BLE001
                error = failure
            # who is told of the end may count on nobody holding the arrays any more
            del work
            ends.put(error)
            del ends, error


_team = _Team()
# in a child none of the threads lives, and one of the parent's may have been in use
os.register_at_fork(after_in_child=_team.__init__)  # type: ignore[misc]


class _Setting(threading.local):
    num_threads: int | None = None


_setting = _Setting()


def num_threads_available() -> int:
    """The most threads that `set_num_threads` takes: what Numba was started with, one for each core."""
    return int(numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]  # config fills itself at run time


def get_num_threads() -> int:
    """How many threads the kernels use that the calling thread enters."""
    return _setting.num_threads or num_threads_available()


def set_num_threads(num_threads: int) -> None:
    """Set how many threads the kernels use that the calling thread enters; other threads have settings of
    their own, the most there are to begin with.

    Raises ValueError if `num_threads` is not between 1 and the number Numba was started with.
    """
    most = num_threads_available()
    if not 1 <= num_threads <= most:
        raise ValueError(
            f"num_threads={num_threads} must be between 1 and {most}; "
            "for more, set the environment variable NUMBA_NUM_THREADS before Python starts"
        )
    _setting.num_threads = num_threads


def share_out(kernel: Callable[..., None], num_blocks: int, *arguments: Any) -> None:
    """Call ``kernel(blocks, *arguments)`` in as many threads as the caller has set, until the ``num_blocks``
    blocks are done. Calls with more than one thread take turns."""
    work = partial(kernel, np.array([0, num_blocks], np.int64), *arguments)
    # to wake a thread takes about as long as a block
    helpers = min(get_num_threads(), num_blocks // 2) - 1
    if helpers > 0:
        _team.run(work, helpers)
    else:
        work()
