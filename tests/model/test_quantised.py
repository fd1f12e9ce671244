"""Quantised matrices: nearest values, exact dequantisation, and the bytes of a section element by element."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from colibrid.errors import ModelError
from colibrid.model.formats import FORMATS, format_of, parts_of_section
from colibrid.model.layout import Tensor, place_one
from colibrid.model.quantised import QuantisedMatrix, quantise, quantised_section, read_section, section_bytes

if TYPE_CHECKING:
    from colibrid.model.manifest import Section

NAMES = [name for name, form in FORMATS.items() if form.quantised]


def section_of(name: str, rows: int, cols: int) -> Section:
    return place_one(Tensor("gate", 0, 0, (rows, cols)), format_of(name), "rows16", 512)


def written(section: Section, matrix: np.ndarray) -> bytes:
    return b"".join(
        np.ascontiguousarray(part).tobytes() for part in quantised_section(section, [matrix[:7], matrix[7:]])
    )


def random_matrix(rows: int, cols: int) -> np.ndarray:
    draw = np.random.default_rng(rows * cols)
    return (draw.standard_normal((rows, cols)) * draw.uniform(0.01, 3, (rows, 1))).astype(np.float32)


@pytest.mark.parametrize("name", NAMES)
def test_every_value_is_the_nearest(name: str) -> None:
    """Another value in the place of a stored one is never nearer to the number, but where the range ends."""
    matrix = random_matrix(40, 256)
    found = quantise(matrix, name)
    error = np.abs(found.dequantise() - matrix)
    steps = (-1, 1) if found.format.precision != "fp8" else ()
    for step in steps:
        low, high = (-127, 127) if found.format.precision == "int8" else (0, 15)
        moved = np.clip(found.values.astype(np.int16) + step, low, high).astype(found.values.dtype)
        other = QuantisedMatrix(found.format, moved, found.scales, found.zeros)
        assert (error <= np.abs(other.dequantise() - matrix) + 1e-6).all()
    if found.format.precision == "fp8":
        assert (error <= np.abs(matrix) / 16 + found.scales.max() * 2.0**-10).all()


@pytest.mark.parametrize("name", NAMES)
def test_errors_stay_within_half_a_step(name: str) -> None:
    """No number moves by more than the format's coarsest half step of its group, and a little for fp16 scales."""
    matrix = random_matrix(40, 256)
    found = quantise(matrix, name)
    scale = np.abs(found.scales.astype(np.float32)).max()
    share = {"int8": 0.6, "int4": 1.1, "fp8": 17.0}[found.format.precision]
    assert np.abs(found.dequantise() - matrix).max() <= share * scale


def test_zero_stays_zero_with_zero_points() -> None:
    """A group of positive numbers has its zero point at 0, so that 0 is exact."""
    matrix = np.linspace(0, 3, 64, dtype=np.float32)[None]
    found = quantise(matrix, "int4-g64-z")
    assert found.zeros is not None
    assert found.zeros[0, 0] == 0
    assert found.dequantise()[0, 0] == 0


def test_a_group_of_zeros_is_exact() -> None:
    """No division by a scale of 0."""
    for name in NAMES:
        assert not quantise(np.zeros((3, 128), np.float32), name).dequantise().any()


def test_e4m3_rounds_to_even_and_saturates() -> None:
    """The bits of chosen numbers under a scale of 1: 448 is the largest, 2^-9 the smallest."""
    numbers = np.array([[448, -448, 1, 1.0625, 1.1875, 2.0**-9, 2.0**-10, -0.0156]], np.float32)
    bits = quantise(numbers, "fp8").values[0]
    assert bits.tolist() == [0x7E, 0xFE, 0x38, 0x38, 0x3A, 0x01, 0x00, 0x88]


def test_what_cannot_be_quantised() -> None:
    """NaN, and numbers whose scale does not fit fp16."""
    with pytest.raises(ModelError, match="NaN or infinite"):
        quantise(np.full((1, 32), np.nan, np.float32), "int8")
    with pytest.raises(ModelError, match="too large for fp16 scales"):
        quantise(np.full((1, 32), 1e30, np.float32), "int4-g32")


@pytest.mark.parametrize("name", NAMES)
def test_a_section_is_read_as_it_was_written(name: str) -> None:
    """Rows in blocks of odd height become the same bytes as the whole matrix, and these the same matrix."""
    matrix = random_matrix(150, 256)
    section = section_of(name, 150, 256)
    data = written(section, matrix)
    assert len(data) == section.bytes
    found, wanted = read_section(section, data), quantise(matrix, name)
    assert (found.values == wanted.values).all()
    assert (found.scales == wanted.scales).all()
    assert (found.zeros is None) == (wanted.zeros is None)
    assert wanted.zeros is None or (found.zeros == wanted.zeros).all()
    assert data == b"".join(np.ascontiguousarray(part).tobytes() for part in section_bytes(section, [wanted]))


def test_int8_elements_lie_where_the_header_says() -> None:
    """colibri.h: (r, c) is byte ((r / 16) (cols4 / 4) + c / 4) 64 + r % 16 * 4 + c % 4; columns are padded with zeros."""
    matrix = random_matrix(20, 50)
    section = section_of("int8", 20, 50)
    data, wanted = written(section, matrix), quantise(matrix, "int8")
    for r in range(20):
        for c in range(50):
            byte = data[(r // 16 * 13 + c // 4) * 64 + r % 16 * 4 + c % 4]
            assert np.uint8(byte).view(np.int8) == wanted.values[r, c]
    assert data[12 * 64 + 2] == data[12 * 64 + 3] == 0


def test_int4_elements_and_groups_lie_where_the_header_says() -> None:
    """Eight columns of 16 rows are 64 bytes, the first four in the low halves; groups are (tile, group, row)."""
    matrix = random_matrix(20, 64)
    section = section_of("int4-g32-z", 20, 64)
    data, wanted = written(section, matrix), quantise(matrix, "int4-g32-z")
    parts = parts_of_section(section)
    assert wanted.zeros is not None
    for r in range(20):
        for c in range(64):
            byte = data[(r // 16 * 8 + c // 8) * 64 + r % 16 * 4 + c % 4]
            assert (byte & 15 if c // 4 % 2 == 0 else byte >> 4) == wanted.values[r, c]
        for g in range(2):
            at = (r // 16 * 2 + g) * 16 + r % 16
            assert np.frombuffer(data, "<f2", 1, parts.scales_at + 2 * at)[0] == wanted.scales[r, g]
            assert data[parts.zeros_at + at] == wanted.zeros[r, g]
