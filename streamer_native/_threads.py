"""Divides the blocks of one kernel call among threads. Every kernel is called by `share_out`.

[Note: threads that sleep]
The threads are Python's own. Each of them, and the caller, enters the same compiled kernel, which needs no
GIL, and takes one block after another from a counter that they share. Between calls the threads sleep in a
queue of work. The threads of an OpenMP library instead spin for milliseconds after each parallel loop, unless
an environment variable is set before the library is loaded; if another process uses the cores, the spinning
threads take them from threads that have work to do. That library is PyTorch's too, so this package must not
change its settings.

The caller never waits for a thread that has not begun: when no block is left, the caller withdraws the
request. So a thread that gets no core, or no GIL, slows nothing down, and a forked process, which has none of
the threads, computes alone.

The result does not depend on which thread takes a block: no block depends on another.
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

#: The counters that the threads of one call share, [2]: the next free block, and the number of blocks.
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
    """In a kernel: the numbers of this thread's blocks."""
    block = _take_block(blocks)
    while block < blocks[1]:
        yield block
        block = _take_block(blocks)


def num_blocks(size: int) -> int:
    """The number of blocks of `BLOCK` elements in an array of ``size``; the last may be short."""
    return -(-size // BLOCK)


Ends = queue.SimpleQueue[BaseException | None]


class _Team:
    """Threads that wait for work, each started at its first use."""

    def __init__(self) -> None:
        self._size = 0
        self._requests: queue.SimpleQueue[tuple[Callable[[], None], Ends]] = queue.SimpleQueue()
        self._in_use = threading.Lock()

    def run(self, work: Callable[[], None], helpers: int) -> None:
        """Call ``work`` in the caller's thread and in at most ``helpers`` others, and raise any error of
        theirs. Only one call of `run` works at a time."""
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
        """Withdraw the requests that no thread has begun; returns their number."""
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
            # after this signal the caller may rely on no thread holding the arrays
            del work
            ends.put(error)
            del ends, error


_team = _Team()
# a forked child has none of the threads, and a lock of the parent's may have been in use
os.register_at_fork(after_in_child=_team.__init__)  # type: ignore[misc]


class _Setting(threading.local):
    num_threads: int | None = None


_setting = _Setting()


def num_threads_available() -> int:
    """The most threads that `set_num_threads` takes: Numba's number at start, one for each core."""
    return int(numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]  # config fills itself at run time


def get_num_threads() -> int:
    """The number of threads of kernels called by this thread."""
    return _setting.num_threads or num_threads_available()


def set_num_threads(num_threads: int) -> None:
    """Set the number of threads of kernels called by this thread. Other threads have their own settings, at
    first the maximum.

    Raises ValueError if `num_threads` is not between 1 and Numba's number at start.
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
    blocks are done. Only one call with several threads works at a time."""
    work = partial(kernel, np.array([0, num_blocks], np.int64), *arguments)
    # waking a thread takes about as long as a block
    helpers = min(get_num_threads(), num_blocks // 2) - 1
    if helpers > 0:
        _team.run(work, helpers)
    else:
        work()
