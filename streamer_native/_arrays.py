"""The check before every kernel: compiled code would read past the end of a wrong array."""

from typing import Any

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]
Uint16Array = npt.NDArray[np.uint16]
Float16Array = npt.NDArray[np.float16]
Int16Array = npt.NDArray[np.int16]
Int8Array = npt.NDArray[np.int8]
Uint8Array = npt.NDArray[np.uint8]
Uint32Array = npt.NDArray[np.uint32]
Int64Array = npt.NDArray[np.int64]

FLOAT32 = np.dtype(np.float32)
BFLOAT16 = np.dtype(np.uint16)  # NumPy has no bfloat16: its bits are passed as uint16
FLOAT16 = np.dtype(np.float16)
INT8 = np.dtype(np.int8)
UINT8 = np.dtype(np.uint8)

_NAMES = {
    FLOAT32: "float32",
    BFLOAT16: "uint16 (of bfloat16, the bits: tensor.view(torch.uint16).numpy())",
    FLOAT16: "float16",
    INT8: "int8",
    UINT8: "uint8",
}


def check(
    name: str, array: object, *dtypes: np.dtype[np.generic], size: int | None = None, written: bool = False
) -> int:
    """Return the number of elements of `array`, or raise an error that names the remedy.

    Raises TypeError if it is not a NumPy array, and ValueError if it is not one-dimensional and contiguous,
    if its dtype is not in `dtypes` or its size is not `size`, or if it is `written` to and read-only.
    """
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} is a {type(array).__name__}; pass a NumPy array, such as tensor.numpy()")
    if array.dtype not in dtypes:
        allowed = " or ".join(_NAMES[dtype] for dtype in dtypes)
        raise ValueError(f"{name} has dtype {array.dtype}; it must be {allowed}")
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}; pass the flat view, {name}.reshape(-1)")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} is not contiguous; pass the flat buffer, not every k-th element of it")
    if size is not None and array.size != size:
        raise ValueError(f"{name} has {array.size} elements and the first array {size}; make them equal")
    if written and not array.flags.writeable:
        raise ValueError(f"{name} is read-only and is updated in place; pass an array that can be written")
    return array.size


def for_kernel(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """`array` for a kernel: float16 as its bits, int16, since Numba does not compute with float16."""
    return array.view(np.int16) if array.dtype == FLOAT16 else array
