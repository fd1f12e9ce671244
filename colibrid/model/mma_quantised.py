"""The layout mma of quantised matrices with numpy, as the CUDA kernels read it (docs/PACK.md, kernels_cu/abi.h).

Values lie in pieces of 512 bytes: 16 rows of 32 columns (int8, fp8) or 64 (int4); a lane of a warp owns 16 bytes of a
piece. Scales and zeros of groups within a row lie by tiles of 16 rows, in the order of the lanes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from colibrid.model.formats import TILE_COLS, TILE_ROWS, align, groups_across, padded

if TYPE_CHECKING:
    from colibrid.model.floats import Array

QuantisedPrecision = Literal["int8", "int4", "fp8"]
PIECE_COLS: dict[QuantisedPrecision, int] = {"int8": 32, "int4": 64, "fp8": 32}


def mma_values(values: Array, precision: QuantisedPrecision, *, padding: int = 0) -> Array:
    """The bytes of (rows, cols) values: int8; 0 .. 15 of int4; the bits of fp8. What is padded becomes `padding`."""
    rows, cols = padded((values.shape[0], values.shape[1]), "mma", precision)
    held = np.full((rows, cols), padding, values.dtype)
    held[: values.shape[0], : values.shape[1]] = values
    pieces = cols // PIECE_COLS[precision]
    tiles = PIECE_COLS[precision] // TILE_COLS
    # tile row, half of rows h, g | piece, tile t, half of columns e, q, parity p
    parts = held.view(np.uint8).reshape(-1, 2, 8, pieces, tiles, 2, 4, 2)
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


def matrix_of(data: Array, shape: tuple[int, int], precision: QuantisedPrecision) -> Array:
    """The inverse of mma_values, without padding."""
    rows, cols = padded(shape, "mma", precision)
    tiles = PIECE_COLS[precision] // TILE_COLS
    lanes = (rows // TILE_ROWS, cols // PIECE_COLS[precision], 8, 4)  # tile row, piece, g, q
    parts: Array
    if precision == "int8":  # t e h p
        parts = (data ^ np.uint8(0x80)).view(np.int8).reshape(*lanes, tiles, 2, 2, 2).transpose(0, 6, 2, 1, 4, 5, 3, 7)
    elif precision == "int4":  # t p e h
        nibbles = np.stack([data & 15, data >> 4], axis=-1)
        parts = nibbles.reshape(*lanes, tiles, 2, 2, 2).transpose(0, 7, 2, 1, 4, 6, 3, 5)
    else:  # t e p, and both h
        words = data.view("<u2")
        low, high = words >> 8 & 0x80 | words >> 7 & 0x7F, words >> 7 & 0x80 | words & 0x7F
        both = np.stack([low, high], axis=-1).astype(np.uint8)
        parts = both.reshape(*lanes, tiles, 2, 2, 2).transpose(0, 7, 2, 1, 4, 5, 3, 6)
    return parts.reshape(rows, cols)[: shape[0], : shape[1]]


def mma_groups(scales: Array, cols: int, precision: QuantisedPrecision, group_cols: int) -> Array:
    """(rows, groups of a row) scales or zeros by tiles of 16 rows, padded with zeros: rows g and g + 8 side by side.

    [tile row][group][g][h], or, where two groups lie in a piece, [tile row][pair of groups][g][group][h].
    """
    each = _groups_of_piece(precision, group_cols)
    held = np.zeros(
        (align(scales.shape[0], TILE_ROWS), groups_across(precision, "mma", cols, group_cols)), scales.dtype
    )
    held[: scales.shape[0], : scales.shape[1]] = scales
    parts = held.reshape(-1, 2, 8, held.shape[1] // each, each)  # tile row, h, g, slot, group of the slot
    return np.ascontiguousarray(parts.transpose(0, 3, 2, 4, 1)).reshape(-1)


def groups_of(data: Array, shape: tuple[int, int], precision: QuantisedPrecision, group_cols: int) -> Array:
    """The inverse of mma_groups, without padding."""
    each = _groups_of_piece(precision, group_cols)
    across = groups_across(precision, "mma", shape[1], group_cols)
    parts = data.reshape(-1, across // each, 8, each, 2).transpose(0, 4, 2, 1, 3)
    return parts.reshape(-1, across)[: shape[0], : -(-shape[1] // group_cols)]


def _groups_of_piece(precision: QuantisedPrecision, group_cols: int) -> int:
    return 2 if precision == "int4" and group_cols < PIECE_COLS["int4"] else 1
