"""Host kernels for streamer, compiled by Numba: NumPy arrays in, NumPy arrays updated in place.

bfloat16 arrays are passed as their bits, uint16. Any thread may call; calls run one at a time, each on all
the threads that `set_num_threads` allows.
"""

from streamer_native._compile import set_num_threads
from streamer_native.adam import adamw_fp32, adamw_split
from streamer_native.bfloat16 import join, split
from streamer_native.reduce import accumulate, sum_squares

__all__ = ["accumulate", "adamw_fp32", "adamw_split", "join", "set_num_threads", "split", "sum_squares"]
