"""Quantised matrices with numpy: made from fp32, back to it, and to and from the bytes of a section (docs/PACK.md).

For conversion and tests; the daemon plans with formats.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from colibrid.errors import ModelError
from colibrid.model.formats import FORMATS, TILE_ROWS, Format, format_of, format_of_section, parts_of_section
from colibrid.model.mma_quantised import QuantisedPrecision, groups_of, matrix_of, mma_groups, mma_values
from colibrid.model.tiles import tiled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from colibrid.model.floats import Array
    from colibrid.model.manifest import Precision, Section

INT4_MIDDLE = 8  # the zero of int4 without zero points
_FP8_LARGEST = 448.0
_LINE = 4  # columns side by side in rows16 of integers


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """A number is (value - zero) * scale, scale and zero those of its group."""

    format: Format
    values: Array  # (rows, cols): int8; uint8 0 .. 15 of int4; uint8, e4m3 bits, of fp8
    scales: Array  # (groups of rows, groups of columns): float16, of fp8 float32
    zeros: Array | None = None  # the same shape, uint8 0 .. 15

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def dequantise(self) -> Array:
        """(rows, cols) float32; exact, but for fp8, whose product with an fp32 scale is rounded once."""
        scales = spread(self.format, self.scales, self.shape).astype(np.float32)
        if self.format.precision == "fp8":
            return np.asarray(_fp8_values(self.values) * scales)
        zero: Array | int = 0
        if self.format.precision == "int4":
            zero = INT4_MIDDLE if self.zeros is None else spread(self.format, self.zeros, self.shape).astype(np.int16)
        return np.asarray((self.values.astype(np.int16) - zero).astype(np.float32) * scales)


def spread(form: Format, groups: Array, shape: tuple[int, int]) -> Array:
    """One number for each group becomes one for each element (rows, cols)."""
    rows, cols = shape
    height, width = form.groups_of(shape)
    return groups.repeat(height, axis=0)[:rows].repeat(width, axis=1)[:, :cols]


def quantise(matrix: Array, form: Format | str) -> QuantisedMatrix:
    """A float32 matrix (rows, cols), each number to the nearest that its group can hold, ties to even.

    The scale takes the group's largest magnitude to the end of the range: 127 of int8, 448 of fp8, value 0 (minus 8) of
    int4; with zero points the range goes from the smallest number to the largest, 0 among them. Groups must divide the
    columns of int4 (formats.check_groups). ModelError: a scale is beyond fp16, or the matrix not finite.
    """
    chosen = format_of(form) if isinstance(form, str) else form
    if not np.isfinite(matrix).all():
        raise ModelError("a matrix with numbers that are NaN or infinite cannot be quantised")
    low, high = _ends(matrix, chosen)
    match chosen.precision:
        case "int8":
            scales = _halves(np.maximum(high, -low) / np.float32(127))
            steps = np.rint(_steps(matrix, chosen, scales))
            return QuantisedMatrix(chosen, np.clip(steps, -127, 127).astype(np.int8), scales)
        case "int4":
            return (
                _int4_with_zeros(matrix, chosen, low, high) if chosen.zero_points else _int4(matrix, chosen, low, high)
            )
        case "fp8":
            scales = (np.maximum(high, -low) / np.float32(_FP8_LARGEST)).astype(np.float32)
            return QuantisedMatrix(chosen, _fp8_bits(_steps(matrix, chosen, scales)), scales)
        case other:
            raise ModelError(f"{other} is not a quantised format")


def _int4(matrix: Array, form: Format, low: Array, high: Array) -> QuantisedMatrix:
    scales = _halves(np.where(high > -low, -high, -low) / np.float32(8))
    steps = np.rint(_steps(matrix, form, scales))
    return QuantisedMatrix(form, np.clip(steps + INT4_MIDDLE, 0, 15).astype(np.uint8), scales)


def _int4_with_zeros(matrix: Array, form: Format, low: Array, high: Array) -> QuantisedMatrix:
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    scales = _halves((high - low) / np.float32(15))
    zeros = np.clip(np.rint(_divided(-low, scales.astype(np.float32))), 0, 15).astype(np.uint8)
    steps = np.rint(_steps(matrix, form, scales)) + spread(form, zeros, _shape(matrix))
    return QuantisedMatrix(form, np.clip(steps, 0, 15).astype(np.uint8), scales, zeros)


def _shape(matrix: Array) -> tuple[int, int]:
    return matrix.shape[0], matrix.shape[1]


def _ends(matrix: Array, form: Format) -> tuple[Array, Array]:
    """The smallest and the largest number of each group."""
    height, width = form.groups_of(_shape(matrix))
    rows, cols = np.arange(0, matrix.shape[0], height), np.arange(0, matrix.shape[1], width)
    low = np.minimum.reduceat(np.minimum.reduceat(matrix, cols, axis=1), rows, axis=0)
    high = np.maximum.reduceat(np.maximum.reduceat(matrix, cols, axis=1), rows, axis=0)
    return low, high


def _steps(matrix: Array, form: Format, scales: Array) -> Array:
    """Each number in units of its group's scale."""
    return _divided(matrix, spread(form, scales, _shape(matrix)).astype(np.float32))


def _divided(values: Array, scales: Array) -> Array:
    """Values / scales, 0 where the scale is 0."""
    return np.divide(values, scales, out=np.zeros(np.broadcast_shapes(values.shape, scales.shape), np.float32),
                     where=scales != 0)  # fmt: skip


def _halves(scales: Array) -> Array:
    with np.errstate(over="ignore"):
        rounded = scales.astype(np.float16)
    if not np.isfinite(rounded).all():
        raise ModelError("weights are too large for fp16 scales; choose fp8, or a float format")
    return rounded


def _fp8_values(bits: Array) -> Array:
    """e4m3 to float32."""
    table = np.arange(256, dtype=np.uint16)
    halves = ((table & 0x80) << 8 | (table & 0x7F) << 7).astype(np.uint16).view(np.float16)
    return np.asarray((halves.astype(np.float32) * np.float32(256))[bits])


def _fp8_bits(values: Array) -> Array:
    """float32 to e4m3, to the nearest, ties to even; what is too large becomes the largest."""
    magnitude = np.minimum(np.abs(values), np.float32(_FP8_LARGEST))
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, -6)
    steps = np.rint(np.ldexp(magnitude, 3 - exponent)).astype(np.int32)
    bits = np.minimum((exponent + 7) * 8 + steps - 8, 0x7E).astype(np.uint8)
    return np.asarray(bits | (np.signbit(values).astype(np.uint8) << 7))


# ------------------------------------------------------------------ sections


def quantised_section(
    section: Section,
    rows: Iterable[Array],
    form: Format | None = None,
    rounding: Callable[[Array, Format], QuantisedMatrix] = quantise,
) -> Iterator[Array]:
    """The bytes of a section, from float32 rows in blocks of any height. `form`: the section's, if it is None."""
    chosen = form or format_of_section(section)
    step = max(TILE_ROWS, chosen.group_rows)
    return section_bytes(section, (rounding(block, chosen) for block in _in_steps(rows, step)))


def _in_steps(blocks: Iterable[Array], step: int) -> Iterator[Array]:
    """The same rows in blocks whose height is a multiple of `step`, but for the last."""
    left: Array | None = None
    for block in blocks:
        rows = block if left is None or not len(left) else np.concatenate([left, block])
        whole = len(rows) - len(rows) % step
        if whole:
            yield rows[:whole]
        left = rows[whole:]
    if left is not None and len(left):
        yield left


def section_bytes(section: Section, blocks: Iterable[QuantisedMatrix]) -> Iterator[Array]:
    """The bytes of a section from its rows: blocks whose height is a multiple of 16 and of group_rows, but for the last."""
    found = parts_of_section(section)
    scales, zeros = [], []

    def values() -> Iterator[Array]:
        for block in blocks:
            scales.append(block.scales)
            if block.zeros is not None:
                zeros.append(block.zeros)
            yield block.values

    yield from _tiled_values(section, values())
    yield np.zeros(found.scales_at - found.values, np.uint8)
    yield _tiled_groups(section, np.concatenate(scales))
    if found.zeros:
        yield np.zeros(found.zeros_at - found.scales_at - found.scales, np.uint8)
        yield _tiled_groups(section, np.concatenate(zeros))


def read_section(section: Section, data: bytes | memoryview) -> QuantisedMatrix:
    """The matrix of a section's bytes."""
    found = parts_of_section(section)
    scale = np.dtype("<f4" if section.precision == "fp8" else "<f2")
    scales = np.frombuffer(data, scale, found.scales // scale.itemsize, found.scales_at)
    zeros = np.frombuffer(data, np.uint8, found.zeros, found.zeros_at) if found.zeros else None
    return QuantisedMatrix(
        format_of_section(section),
        _untiled_values(section, np.frombuffer(data, np.uint8, found.values)),
        _untiled_groups(section, scales),
        None if zeros is None else _untiled_groups(section, zeros),
    )


def _tiled_values(section: Section, blocks: Iterable[Array]) -> Iterator[Array]:
    """rows16 or mma of each precision, from rows in blocks of any height."""
    if section.layout == "mma":
        padding = INT4_MIDDLE if section.precision == "int4" and not section.zeros_offset else 0
        for rows in _in_steps(blocks, TILE_ROWS):
            yield mma_values(rows, _quantised(section), padding=padding)
        return
    for tiles in tiled(blocks, "rows16"):  # (tile, column, row)
        yield tiles if section.precision == "fp8" else _lines(section.precision, tiles)


def _quantised(section: Section) -> QuantisedPrecision:
    match section.precision:
        case "int8" | "int4" | "fp8" as precision:
            return precision
        case other:
            raise ModelError(f"{section.role} is {other}, expected a quantised format")


def _lines(precision: Precision, tiles: Array) -> Array:
    """Columns side by side, four by four; of int4 two such fours share their bytes."""
    count, cols, rows = tiles.shape
    padded = np.pad(tiles, ((0, 0), (0, -cols % _LINE), (0, 0)))
    lines = padded.reshape(count, -1, _LINE, rows).transpose(0, 1, 3, 2)  # (tile, four columns, row, column)
    if precision == "int8":
        return lines
    return np.asarray(lines[:, 0::2] | lines[:, 1::2] << 4)


def _untiled_values(section: Section, data: Array) -> Array:
    rows, cols = section.shape
    if section.layout == "mma":
        return matrix_of(data, section.shape, _quantised(section))
    tiles = -(-rows // TILE_ROWS)
    if section.precision == "fp8":
        return data.reshape(tiles, cols, TILE_ROWS).transpose(0, 2, 1).reshape(-1, cols)[:rows]
    lines = data.reshape(tiles, -1, TILE_ROWS, _LINE)
    if section.precision == "int4":
        both = np.stack([lines & 15, lines >> 4], axis=2)
        lines = both.reshape(tiles, -1, TILE_ROWS, _LINE)
    values = lines.transpose(0, 2, 1, 3).reshape(tiles * TILE_ROWS, -1)[:rows, :cols]
    return values.view(np.int8) if section.precision == "int8" else values


def _tiled_groups(section: Section, groups: Array) -> Array:
    """Scales or zero points: of rows as in rows16, of blocks as they are."""
    if section.group_rows != 1:
        return groups
    if section.layout == "mma":
        return mma_groups(groups, section.shape[1], _quantised(section), section.group_cols)
    padded = np.pad(groups, ((0, -len(groups) % TILE_ROWS), (0, 0)))
    return padded.reshape(-1, TILE_ROWS, groups.shape[1]).transpose(0, 2, 1)


def _untiled_groups(section: Section, data: Array) -> Array:
    groups = -(-section.shape[1] // section.group_cols)
    if section.group_rows != 1:
        return data.reshape(-1, groups)
    if section.layout == "mma":
        return groups_of(data, section.shape, _quantised(section), section.group_cols)
    return data.reshape(-1, groups, TILE_ROWS).transpose(0, 2, 1).reshape(-1, groups)[: section.shape[0]]


__all__ = [
    "FORMATS",
    "Format",
    "QuantisedMatrix",
    "format_of",
    "quantise",
    "quantised_section",
    "read_section",
    "section_bytes",
]
