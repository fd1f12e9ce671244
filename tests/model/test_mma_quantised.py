"""The layout mma of quantised matrices: where single elements lie, counted out by hand from docs/PACK.md."""

from __future__ import annotations

import numpy as np
import pytest

from colibrid.errors import ModelError
from colibrid.model import mma_quantised as mma
from colibrid.model.formats import FORMATS, Format
from colibrid.model.layout import Tensor, place_one
from colibrid.model.quantised import quantise, read_section, section_bytes

ROWS, COLS = 20, 96  # two tiles of rows, of which the second is short; int4 pads the columns to 128


def _lane(row: int, col: int) -> int:
    """4 g + q of the lane that holds an element."""
    return row % 8 * 4 + col % 8 // 2


def _place(row: int, col: int, piece_cols: int) -> tuple[int, int, int, int]:
    """First byte of the lane's 16, and tile of the piece, half of columns, half of rows."""
    pieces = -(-COLS // piece_cols)
    piece = row // 16 * pieces + col // piece_cols
    return piece * 512 + _lane(row, col) * 16, col % piece_cols // 16, col % 16 // 8, row % 16 // 8


@pytest.mark.parametrize("place", [(0, 0), (3, 5), (9, 17), (15, 95), (16, 0), (19, 40)])
def test_int8_lies_biased_where_a_lane_looks_for_it(place: tuple[int, int]) -> None:
    """Byte t e h p of the lane's sixteen; 128 is 0."""
    values = np.random.default_rng(1).integers(-127, 128, (ROWS, COLS)).astype(np.int8)
    laid_out = mma.mma_values(values, "int8")
    start, tile, eight, half = _place(*place, 32)
    assert laid_out.size == 32 * COLS
    assert int(laid_out[start + tile * 8 + eight * 4 + half * 2 + place[1] % 2]) - 128 == values[place]
    padding = _place(ROWS, 0, 32)
    assert laid_out[padding[0] + padding[3] * 2] == 128


@pytest.mark.parametrize("place", [(0, 0), (3, 5), (9, 17), (15, 95), (16, 0), (19, 70)])
def test_int4_lies_in_a_word_a_tile(place: tuple[int, int]) -> None:
    """Nibble p e h of word t; padding is what was asked for."""
    values = np.random.default_rng(2).integers(0, 16, (ROWS, COLS)).astype(np.uint8)
    laid_out = mma.mma_values(values, "int4", padding=8)
    start, tile, eight, half = _place(*place, 64)
    assert laid_out.size == 32 * 128 // 2
    word = int(laid_out[start + tile * 4 : start + tile * 4 + 4].view("<u4")[0])
    assert word >> (place[1] % 2 * 4 + eight * 2 + half) * 4 & 15 == values[place]
    beyond, tile, eight, half = _place(0, COLS, 64)
    word = int(laid_out[beyond + tile * 4 : beyond + tile * 4 + 4].view("<u4")[0])
    assert word >> (eight * 2 + half) * 4 & 15 == 8


@pytest.mark.parametrize("place", [(0, 0), (8, 0), (3, 5), (15, 95), (16, 0), (19, 40)])
def test_fp8_shares_sixteen_bits_with_the_row_eight_further(place: tuple[int, int]) -> None:
    """Sign in bit 15 or 14, the rest in bits 7 to 13 or 0 to 6."""
    values = np.random.default_rng(3).integers(0, 256, (ROWS, COLS)).astype(np.uint8)
    laid_out = mma.mma_values(values, "fp8")
    start, tile, eight, half = _place(*place, 32)
    at = start + tile * 8 + eight * 4 + place[1] % 2 * 2
    word = int(laid_out[at : at + 2].view("<u2")[0])
    sign, rest = (word >> 15, word >> 7 & 127) if half == 0 else (word >> 14 & 1, word & 127)
    assert sign << 7 | rest == values[place]


def test_scales_lie_by_tile_group_and_lane() -> None:
    """Rows g and g + 8 side by side; with groups of 32 columns both groups of a piece side by side."""
    scales = np.arange(ROWS * 3, dtype=np.float16).reshape(ROWS, 3)
    single = mma.mma_groups(scales, 192, "int4", 64).reshape(2, 3, 8, 2)
    assert (single[0, 2, 5, 1], single[1, 0, 3, 0], single[1, 1, 4, 0]) == (scales[13, 2], scales[19, 0], 0)
    paired = mma.mma_groups(scales, COLS, "int4", 32).reshape(2, 2, 8, 2, 2)
    assert (paired[0, 1, 5, 0, 1], paired[0, 0, 6, 1, 0], paired[0, 1, 0, 1, 0]) == (scales[13, 2], scales[6, 1], 0)


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.quantised])
def test_a_section_is_read_back(name: str) -> None:
    """Values, scales and zero points of a matrix in mma are those that went in."""
    section = place_one(Tensor("qkv", 0, None, (200, 384)), FORMATS[name], "mma", 256)
    matrix = quantise(np.random.default_rng(4).normal(0, 1, (200, 384)).astype(np.float32), name)
    data = b"".join(np.ascontiguousarray(part).tobytes() for part in section_bytes(section, [matrix]))
    assert len(data) == section.bytes
    back = read_section(section, data)
    assert back.format == matrix.format
    np.testing.assert_array_equal(back.values, matrix.values)
    np.testing.assert_array_equal(back.scales, matrix.scales)
    assert (back.zeros is None) == (matrix.zeros is None)
    if back.zeros is not None:
        np.testing.assert_array_equal(back.zeros, matrix.zeros)


def test_groups_that_no_kernel_knows_are_refused() -> None:
    """The message names the matrix, the groups, and those that there are."""
    with pytest.raises(ModelError, match="qkv: int8 in groups of 64 columns; the CUDA kernels take groups of 128, or"):
        place_one(Tensor("qkv", 0, None, (32, 128)), Format("int8-g64", "int8", 1, 64), "mma", 0)
