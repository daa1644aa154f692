"""Operations in a kernel that Numba lacks: bits reinterpreted, and one fused multiply-add."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_WORD = ir.IntType(32)
_FLOAT = ir.FloatType()
_HALF = ir.HalfType()


def _float32_bits(_context: Any, value: Any) -> Any:
    def codegen(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _WORD)

    return types.uint32(types.float32), codegen


def _float32_from_bits(_context: Any, bits: Any) -> Any:
    def codegen(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _FLOAT)

    return types.float32(types.uint32), codegen


def _to_float32(_context: Any, value: Any) -> Any:
    def codegen(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        if value == types.float32:
            return args[0]
        if value == types.int16:
            return builder.fpext(builder.bitcast(args[0], _HALF), _FLOAT)
        return builder.bitcast(builder.shl(builder.zext(args[0], _WORD), _WORD(16)), _FLOAT)

    return types.float32(value), codegen


def _narrow_half(_context: Any, value: Any) -> Any:
    def codegen(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], _HALF), ir.IntType(16))

    return types.int16(types.float32), codegen


def _fused_multiply_add(_context: Any, factor: Any, other_factor: Any, addend: Any) -> Any:
    def codegen(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), codegen


# The bits of a float32, as uint32.
float32_bits = cast(Callable[[np.float32], np.uint32], intrinsic(_float32_bits))

# The float32 with these uint32 bits.
float32_from_bits = cast(Callable[[np.uint32], np.float32], intrinsic(_float32_from_bits))

# A float32 unchanged, a uint16 widened as bfloat16 bits, an int16 as float16 bits: one loop serves all dtypes
# of a gradient.
to_float32 = cast(Callable[[np.float32 | np.uint16 | np.int16], np.float32], intrinsic(_to_float32))

# The float16 bits nearest to a float32, ties to even; Inf beyond 65504; NaN stays NaN.
narrow_half = cast(Callable[[np.float32], np.int16], intrinsic(_narrow_half))

# factor * other_factor + addend in float32, rounded once.
fused_multiply_add = cast(
    Callable[[np.float32, np.float32, np.float32], np.float32], intrinsic(_fused_multiply_add)
)
