"""The rows16 layout with numpy: 16 rows side by side, column by column (docs/PACK.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from colibrid.model.layout import TILE_ROWS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from colibrid.model.floats import Array


def tiled(blocks: Iterable[Array]) -> Iterator[Array]:
    """The bytes of a matrix in rows16, from its rows in blocks (rows, cols) of any height. The last tile is padded."""
    left: Array | None = None
    for block in blocks:
        rows = block if left is None or not len(left) else np.concatenate([left, block])
        whole = len(rows) - len(rows) % TILE_ROWS
        if whole:
            yield _tiles(rows[:whole])
        left = rows[whole:]
    if left is not None and len(left):
        yield _tiles(np.concatenate([left, np.zeros((TILE_ROWS - len(left), left.shape[1]), left.dtype)]))


def _tiles(rows: Array) -> Array:
    return rows.reshape(-1, TILE_ROWS, rows.shape[1]).transpose(0, 2, 1)
