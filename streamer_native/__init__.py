"""Host kernels for streamer, compiled by Numba: NumPy arrays in, NumPy arrays updated in place.

bfloat16 arrays are passed as their bits, uint16. Any thread may call; a call runs on as many threads as its
caller has set with `set_num_threads`, and those threads sleep between calls.
"""

from streamer_native._compile import BLOCK
from streamer_native._threads import get_num_threads, num_threads_available, set_num_threads
from streamer_native.adam import (
    adamw_fp16,
    adamw_fp32,
    adamw_split,
    adamw_split_bf16,
    adamw_split_int8,
)
from streamer_native.bfloat16 import join, split, widen
from streamer_native.momentum import lion, rms, sgd
from streamer_native.reduce import accumulate, add, sum_squares
from streamer_native.segments import QUANTUM, Hyper, Segment

__all__ = [
    "BLOCK",
    "QUANTUM",
    "Hyper",
    "Segment",
    "accumulate",
    "add",
    "adamw_fp16",
    "adamw_fp32",
    "adamw_split",
    "adamw_split_bf16",
    "adamw_split_int8",
    "get_num_threads",
    "join",
    "lion",
    "num_threads_available",
    "rms",
    "set_num_threads",
    "sgd",
    "split",
    "sum_squares",
    "widen",
]
