from __future__ import annotations

import numpy as np
import pytest

from colibrid.model.tiles import tiled


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 40, 64])
@pytest.mark.parametrize("height", [1, 7, 16, 100])
def test_element_r_c_lies_where_the_layout_says(rows: int, height: int) -> None:
    """Element (r, c) lies at ((r / 16) * cols + c) * 16 + r % 16, whatever the blocks; missing rows are zero."""
    matrix = np.arange(1, rows * 5 + 1, dtype=np.float32).reshape(rows, 5)
    blocks = (matrix[begin : begin + height] for begin in range(0, rows, height))
    data = np.concatenate([chunk.ravel() for chunk in tiled(blocks, "rows16")])
    assert data.size == -(-rows // 16) * 16 * 5
    for row in range(-(-rows // 16) * 16):
        for col in range(5):
            expected = matrix[row, col] if row < rows else 0
            assert data[(row // 16 * 5 + col) * 16 + row % 16] == expected
