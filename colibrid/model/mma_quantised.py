"""The layout mma of quantised matrices with numpy, as the CUDA kernels read it (docs/PACK.md, kernels_cu/abi.h).

Values lie in pieces of 512 bytes: 16 rows of 32 columns (int8, fp8) or 64 (int4); a lane of a warp owns 16 bytes of a
piece. Scales and zeros of groups within a row lie by tiles of 16 rows, in the order of the lanes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from colibrid.model.formats import TILE_COLS, TILE_ROWS, align

if TYPE_CHECKING:
    from colibrid.model.floats import Array

QuantisedPrecision = Literal["int8", "int4", "fp8"]
PIECE_COLS: dict[QuantisedPrecision, int] = {"int8": 32, "int4": 64, "fp8": 32}
INT4_ZERO = 8  # of int4 without zeros of its own


def mma_padded(shape: tuple[int, int], precision: QuantisedPrecision) -> tuple[int, int]:
    """rows, cols that the values of a matrix take."""
    return align(shape[0], TILE_ROWS), align(shape[1], PIECE_COLS[precision])


def mma_groups(cols: int, precision: QuantisedPrecision, group_cols: int) -> int:
    """Scales that lie there for a row, or for a row of blocks: those of padding included."""
    if precision != "int4" and group_cols == cols:
        return 1
    return -(-align(cols, PIECE_COLS[precision]) // group_cols)


def mma_values(values: Array, precision: QuantisedPrecision, *, padding: int = 0) -> Array:
    """The bytes of (rows, cols) values: int8; 0 .. 15 of int4; the bits of fp8. What is padded becomes `padding`."""
    rows, cols = mma_padded((values.shape[0], values.shape[1]), precision)
    padded = np.full((rows, cols), padding, values.dtype)
    padded[: values.shape[0], : values.shape[1]] = values
    pieces = cols // PIECE_COLS[precision]
    tiles = PIECE_COLS[precision] // TILE_COLS
    # tile row, half of rows h, g | piece, tile t, half of columns e, q, parity p
    parts = padded.view(np.uint8).reshape(-1, 2, 8, pieces, tiles, 2, 4, 2)
    if precision == "int8":  # biased by 128; bytes t e h p of a lane
        return np.ascontiguousarray(parts.transpose(0, 3, 2, 6, 4, 5, 1, 7) ^ np.uint8(0x80)).reshape(-1)
    if precision == "int4":  # a word a tile; its nibbles p e h
        nibbles = np.ascontiguousarray(parts.transpose(0, 3, 2, 6, 4, 7, 5, 1)).reshape(-1, 2)
        return np.asarray(nibbles[:, 0] | nibbles[:, 1] << 4, np.uint8)
    # fp8: both halves of rows share 16 bits: sign, other's sign, the other bits, the other's other bits
    both = np.ascontiguousarray(parts.transpose(0, 3, 2, 6, 4, 5, 7, 1)).reshape(-1, 2).astype(np.uint16)
    low, high = both[:, 0], both[:, 1]
    words = (low & 0x80) << 8 | (high & 0x80) << 7 | (low & 0x7F) << 7 | high & 0x7F
    return words.astype("<u2").view(np.uint8)


def mma_scales(scales: Array, groups: int) -> Array:
    """The order of (rows, groups of a row) scales or zeros, padded with zeros to tiles of 16 rows and `groups` groups.

    [tile row][group][g][h], or, where two groups lie in a piece (`mma_pairs`), [tile row][pair of groups][g][group][h].
    """
    return _by_lanes(scales, groups, 1)


def mma_pairs(scales: Array, groups: int) -> Array:
    """The same for int4 in groups of 32 columns."""
    return _by_lanes(scales, groups, 2)


def _by_lanes(scales: Array, groups: int, each: int) -> Array:
    padded = np.zeros((align(scales.shape[0], TILE_ROWS), groups), scales.dtype)
    padded[: scales.shape[0], : scales.shape[1]] = scales
    parts = padded.reshape(-1, 2, 8, groups // each, each)  # tile row, h, g, slot, group of the slot
    return np.ascontiguousarray(parts.transpose(0, 3, 2, 4, 1)).reshape(-1)


def mma_parts(
    values: Array, scales: Array, zeros: Array | None, precision: QuantisedPrecision, group: tuple[int, int]
) -> tuple[Array, Array, Array | None]:
    """Values, scales and zeros of a matrix in the order of its section; `group` are rows and columns of a group.

    scales and zeros are (rows / group rows, cols / group cols) rounded up; fp16 of int8 and int4, fp32 of fp8.
    """
    padding = INT4_ZERO if precision == "int4" and zeros is None else 0
    laid_out = mma_values(values, precision, padding=padding)
    if group[0] != 1:  # blocks: row-major as they are
        return laid_out, np.ascontiguousarray(scales).reshape(-1), None
    groups = mma_groups(values.shape[1], precision, group[1])
    order = mma_pairs if precision == "int4" and group[1] < PIECE_COLS["int4"] else mma_scales
    return laid_out, order(scales, groups), None if zeros is None else order(zeros, groups)
