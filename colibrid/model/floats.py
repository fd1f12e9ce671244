"""fp32, fp16 and bf16 without a bfloat16 type: numpy on the bit patterns. Rounding is to nearest even.

Arrays are float32, float16, or uint16 holding bf16's bits, as the precision says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from colibrid.model.manifest import FloatPrecision

Array = NDArray[Any]

STORAGE: dict[FloatPrecision, np.dtype[Any]] = {
    "fp32": np.dtype("<f4"),
    "fp16": np.dtype("<f2"),
    "bf16": np.dtype("<u2"),
}
# All exponent bits set means infinite or NaN.
_EXPONENT: dict[FloatPrecision, tuple[str, int]] = {
    "fp32": ("<u4", 0x7F80_0000),
    "fp16": ("<u2", 0x7C00),
    "bf16": ("<u2", 0x7F80),
}


def widen(values: Array, precision: FloatPrecision) -> Array:
    """To float32, exactly."""
    if precision == "bf16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32, copy=False)


def narrow(values: Array, precision: FloatPrecision) -> Array:
    """From float32; values beyond the largest finite one become infinite."""
    if precision == "fp32":
        return values
    if precision == "fp16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    bits = values.view(np.uint32)
    # Half of the last kept bit, less one where that bit is even: ties then stay, all else above half carries.
    bias = ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
    rounded = ((bits + bias) >> np.uint32(16)).astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():  # a NaN's bits could carry over into something else
        rounded[nan] = 0x7FC0
    return rounded


def convert(values: Array, source: FloatPrecision, target: FloatPrecision) -> Array:
    return values if source == target else narrow(widen(values, source), target)


def count_not_finite(values: Array, precision: FloatPrecision) -> int:
    """How many elements are infinite or NaN."""
    kind, mask = _EXPONENT[precision]
    bits = np.ascontiguousarray(values).view(kind)
    return int(np.count_nonzero((bits & bits.dtype.type(mask)) == mask))
