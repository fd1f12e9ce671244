"""Files of a pack with numpy, and the layouts rows16 and mma in them (docs/PACK.md): tiles of 16 rows, in mma also of
16 columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from colibrid.model.formats import TILE_COLS, TILE_ROWS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from colibrid.model.floats import Array
    from colibrid.model.manifest import Layout, Section


def file_bytes(parts: Iterable[tuple[Section, Iterable[Array]]]) -> Iterator[bytes | memoryview]:
    """A file of a pack, from its sections in order and what lies in each; zeros between them."""
    position = 0
    for section, blocks in parts:
        yield bytes(section.offset - position)
        for block in blocks:
            yield np.ascontiguousarray(block).data.cast("B")
        position = section.offset + section.bytes


def tiled(blocks: Iterable[Array], layout: Layout) -> Iterator[Array]:
    """The bytes of a matrix in rows16 or mma, from its rows in blocks (rows, cols) of any height.

    The last tiles are padded with zeros.
    """
    make = _mma if layout == "mma" else _rows16
    left: Array | None = None
    for block in blocks:
        rows = block if left is None or not len(left) else np.concatenate([left, block])
        whole = len(rows) - len(rows) % TILE_ROWS
        if whole:
            yield make(rows[:whole])
        left = rows[whole:]
    if left is not None and len(left):
        yield make(np.concatenate([left, np.zeros((TILE_ROWS - len(left), left.shape[1]), left.dtype)]))


def _rows16(rows: Array) -> Array:
    return rows.reshape(-1, TILE_ROWS, rows.shape[1]).transpose(0, 2, 1)


def _mma(rows: Array) -> Array:
    """Of a tile, lane 4 g + q holds rows g, g + 8 of columns 2q, 2q + 1, then the same of columns 2q + 8, 2q + 9."""
    padding = -rows.shape[1] % TILE_COLS
    padded = np.pad(rows, ((0, 0), (0, padding))) if padding else rows
    # tile row, half of rows, g | tile column, half of columns, q, parity
    parts = padded.reshape(-1, 2, 8, padded.shape[1] // TILE_COLS, 2, 4, 2)
    return parts.transpose(0, 3, 2, 5, 4, 1, 6)


def untiled(data: Array, layout: Layout, shape: tuple[int, int]) -> Array:
    """The matrix (rows, cols) that `tiled` wrote, from all its elements."""
    rows, cols = shape
    if layout == "rows16":
        return data.reshape(-1, cols, TILE_ROWS).transpose(0, 2, 1).reshape(-1, cols)[:rows]
    across = -(-cols // TILE_COLS)
    parts = data.reshape(-1, across, 8, 4, 2, 2, 2)  # tile row, tile column, g, q, half of columns, of rows, parity
    return parts.transpose(0, 5, 2, 1, 4, 3, 6).reshape(-1, across * TILE_COLS)[:rows, :cols]
