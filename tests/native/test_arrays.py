"""Arrays that a kernel cannot take: an error that names the array and the remedy."""

import numpy as np
import pytest
import torch

import streamer_native
from streamer_native import Hyper, Segment

FLOATS, BF16, FP16, DOUBLES = (
    np.zeros(4, dtype) for dtype in (np.float32, np.uint16, np.float16, np.float64)
)
SIGNED, READ_ONLY = BF16.view(np.int16), BF16.copy()
READ_ONLY.flags.writeable = False
WHOLE = [Segment(0, 4, Hyper(1e-3, 0.9, 0.999, 1e-8, 0.1, 1))]


@pytest.mark.parametrize(
    ("kernel", "arrays", "message"),
    [
        ("split", (BF16, BF16, BF16), "master has dtype uint16; it must be float32"),
        ("split", (FLOATS, FLOATS, BF16), "weight has dtype float32; it must be uint16"),
        ("split", (FLOATS, BF16, BF16[:3]), "remainder has 3 elements and the first array 4"),
        ("split", (FLOATS.reshape(2, 2), BF16, BF16), r"master has shape \(2, 2\); pass the flat view"),
        ("split", (FLOATS[::2], BF16[:2], BF16[:2]), "master is not contiguous"),
        ("split", (FLOATS, BF16, READ_ONLY), "remainder is read-only"),
        ("adamw_fp32", (FLOATS, BF16, FLOATS, FLOATS), "grad has dtype uint16; it must be float32"),
        ("adamw_fp32", (FLOATS, FLOATS[:3], FLOATS, FLOATS), "grad has 3 elements and the first array 4"),
        ("adamw_fp32", (FLOATS, FLOATS, DOUBLES, FLOATS), "exp_avg has dtype float64"),
        (
            "adamw_fp32",
            (FLOATS, FLOATS, FLOATS, np.zeros(8, np.float32)[::2]),
            "exp_avg_sq is not contiguous",
        ),
        ("adamw_split", (FLOATS, BF16, BF16, FLOATS, FLOATS), "weight has dtype float32; .* uint16"),
        ("adamw_split", (BF16, BF16, SIGNED, FLOATS, FLOATS), "grad has dtype int16; it must be uint16"),
        ("adamw_split", (BF16, BF16[1:], BF16, FLOATS, FLOATS), "remainder has 3 elements"),
        ("adamw_split", (BF16, BF16, BF16, FLOATS, BF16), "exp_avg_sq has dtype uint16; .* float32"),
        ("adamw_fp16", (FP16, FLOATS[:3], FP16, FLOATS, FLOATS), "master has 3 elements"),
        ("adamw_split_bf16", (BF16, BF16, BF16, BF16[:3], BF16), "exp_avg has 3 elements"),
        ("adamw_split_int8", (*[BF16] * 3, BF16.view(np.int8), FLOATS, FLOATS, FLOATS), "exp_avg has 8 elem"),
        ("sum_squares", (DOUBLES,), "grad has dtype float64; it must be float32 or uint16"),
        ("accumulate", (BF16, FLOATS), "grad has dtype float32; it must be uint16"),
        ("accumulate", (FLOATS, FLOATS[:2]), "grad has 2 elements and the first array 4"),
        ("accumulate", (FP16, BF16), "grad has dtype uint16; it must be float16"),
        ("accumulate", (DOUBLES, FLOATS), "into has dtype float64; it must be float32 or uint16"),
        ("add", (BF16, BF16, BF16), "into has dtype uint16; it must be float32"),
        ("add", (FLOATS, FLOATS, FLOATS), "first has dtype float32; it must be uint16"),
        ("add", (FLOATS, BF16, FP16), "second has dtype float16; it must be uint16"),
        ("add", (FLOATS, FP16, FP16[1:]), "second has 3 elements"),
    ],
)
def test_a_wrong_array_is_named(kernel, arrays, message):
    segments = [WHOLE] if kernel.startswith("adamw") else []
    with pytest.raises(ValueError, match=message):
        getattr(streamer_native, kernel)(*arrays, *segments)


def test_a_tensor_is_no_array():
    with pytest.raises(TypeError, match="master is a Tensor; pass a NumPy array"):
        streamer_native.split(torch.zeros(4), BF16, BF16)
