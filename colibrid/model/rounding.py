"""Rounding of a matrix to int8 or int4 with the least weighted error that a few scales per group give. Pure numpy.

The scale that reaches the largest value of a group exactly is seldom the best: a little less clips that value and
rounds all others more finely. So each group tries its largest value times each of RATIOS; a symmetric int4 group tries
them as 7 and as -8, for there is one number more on the negative side, and a negative scale turns it over. What counts
is the sum of energy x (rounded - exact)^2, where energy is the mean square of the input that a weight will multiply, or
1 where that is not known. fp8 has nothing to search: its largest value is the format's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from colibrid.model.quantised import QuantisedMatrix, quantise

if TYPE_CHECKING:
    from collections.abc import Iterator

    from colibrid.model.floats import Array
    from colibrid.model.quantised import Format

RATIOS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7)
BLOCK_VALUES = 1 << 20  # rounded at once: a few arrays of this size stay in a core's cache better than whole matrices
_LEAST = float(np.finfo(np.float16).smallest_subnormal)  # what a group of zeros has as its scale
_MOST = float(np.finfo(np.float16).max)


def rounded(matrix: Array, kind: Format, energy: Array | None = None, *, search: bool = True) -> QuantisedMatrix:
    """The matrix (rows, cols; float32, finite) in the format. energy: (cols,). search=False: only the first ratio."""
    if kind.precision not in ("int8", "int4"):
        return quantise(matrix, kind)
    rows, cols = matrix.shape
    group = kind.group_cols or cols
    padding = -cols % group  # the last group of int8 may be short: it is filled with zeros
    weight = None if energy is None else np.pad(energy, (0, padding)).reshape(1, -1, group)
    ratios = RATIOS if search else RATIOS[:1]
    step = max(1, BLOCK_VALUES // cols)
    parts = []
    for begin in range(0, rows, step):
        block = np.pad(matrix[begin : begin + step], ((0, 0), (0, padding)))
        parts.append(_block(block.reshape(len(block), -1, group), kind, weight, ratios))
    values, scales, zeros = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    values = np.ascontiguousarray(values.reshape(rows, -1)[:, :cols])
    return QuantisedMatrix(kind, values, scales, zeros if kind.zero_points else None)


def _block(groups: Array, kind: Format, weight: Array | None, ratios: tuple[float, ...]) -> tuple[Array, Array, Array]:
    """Numbers, scales and zeros of some rows in groups (rows, groups, size)."""
    least = np.full(groups.shape[:2], np.inf, np.float32)
    numbers = np.zeros(groups.shape, np.uint8 if kind.precision == "int4" else np.int8)
    scales = np.zeros(groups.shape[:2], np.float16)
    zeros = np.zeros(groups.shape[:2], np.uint8)
    for exact, zero in _candidates(groups, kind, ratios):
        scale = _half(exact)
        wide = scale.astype(np.float32)[..., None]
        middle, low, high = (zero[..., None], 0, 15) if kind.precision == "int4" else (np.float32(0), -127, 127)
        found = np.clip(np.rint(groups / wide) + middle, low, high)
        error = np.square((found - middle) * wide - groups)
        if weight is not None:
            error *= weight
        total = error.sum(axis=2)
        better = total < least
        least[better] = total[better]
        scales[better] = scale[better]
        zeros[better] = zero[better]
        numbers[better] = found[better].astype(numbers.dtype)
    return numbers, scales, zeros


def _candidates(groups: Array, kind: Format, ratios: tuple[float, ...]) -> Iterator[tuple[Array, Array]]:
    """Exact scales and zero points (rows, groups) to try."""
    if kind.zero_points:
        top, bottom = np.maximum(groups.max(axis=2), 0), np.minimum(groups.min(axis=2), 0)
        for ratio in ratios:
            scale = (top - bottom) * np.float32(ratio / 15)
            yield scale, np.clip(np.rint(-bottom * np.float32(ratio) / _half(scale).astype(np.float32)), 0, 15)
        return
    place = np.abs(groups).argmax(axis=2)[..., None]
    largest = np.take_along_axis(groups, place, axis=2)[..., 0]
    for ratio in ratios:
        for number in (-8, 7) if kind.precision == "int4" else (127,):
            scale = largest * np.float32(ratio / number)
            yield scale if kind.precision == "int4" else np.abs(scale), np.full(groups.shape[:2], 8, np.float32)


def _half(scale: Array) -> Array:
    """As float16, never zero and never infinite."""
    kept = np.clip(scale, -_MOST, _MOST).astype(np.float16)
    return np.where(kept == 0, np.float16(_LEAST), kept)
