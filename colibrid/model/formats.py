"""Formats of weights: their names, and how many bytes a matrix takes. Pure, and without numpy: the daemon plans with it.

    fp32 fp16 bf16
    int8, int8-g128                      -127 .. 127, a scale for each row, or for 128 columns of it
    int4 = int4-g64, int4-g32, int4-g128, each with -z: 0 .. 15, a scale for so many columns; -z: and a zero point
    fp8, fp8-b128                        e4m3, a scale for each row, or for each block of 128 x 128

A quantised number is (value - zero) * scale; without zero points the zero of int4 is 8, and 0 of the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from colibrid.errors import ModelError
from colibrid.model.manifest import FloatPrecision, Layout, Precision, Section

if TYPE_CHECKING:
    from collections.abc import Mapping

PART_ALIGNMENT = 256  # bytes, of scales and zero points within a section
TILE_ROWS = 16  # of rows16 and mma
TILE_COLS = 16  # of mma
ELEMENT_BYTES: Mapping[FloatPrecision, int] = {"fp32": 4, "fp16": 2, "bf16": 2}
SCALE_BYTES: Mapping[Precision, int] = {"int8": 2, "int4": 2, "fp8": 4}
_BLOCK = 128
_MMA_COLS: Mapping[Precision, int] = {"int8": 32, "int4": 64, "fp8": 32}  # of a piece of mma
_MMA_GROUPS: Mapping[Precision, tuple[int, ...]] = {"int8": (_BLOCK,), "int4": (32, 64, _BLOCK), "fp8": (_BLOCK,)}


class Format(msgspec.Struct, frozen=True):
    """How the numbers of a matrix are written. group_cols 0: a whole row; group_rows 0: not quantised."""

    name: str
    precision: Precision
    group_rows: int = 0
    group_cols: int = 0
    zero_points: bool = False

    @property
    def quantised(self) -> bool:
        return self.group_rows > 0

    def groups_of(self, shape: tuple[int, int]) -> tuple[int, int]:
        """group_rows and group_cols of a matrix (rows, cols). A row that is shorter than int8's group is one itself."""
        if not self.quantised:
            return 0, 0
        cols = min(self.group_cols, shape[1]) if self.precision == "int8" else self.group_cols
        return self.group_rows, cols or shape[1]


def _formats() -> dict[str, Format]:
    found = [Format(name, name) for name in ("fp32", "fp16", "bf16")]
    found += [Format("int8", "int8", 1), Format("int8-g128", "int8", 1, _BLOCK)]
    for columns in (32, 64, 128):
        found += [
            Format(f"int4-g{columns}", "int4", 1, columns),
            Format(f"int4-g{columns}-z", "int4", 1, columns, True),
        ]
    found += [Format("fp8", "fp8", 1), Format("fp8-b128", "fp8", _BLOCK, _BLOCK)]
    return {each.name: each for each in found}


FORMATS: Mapping[str, Format] = _formats()
_OTHER_NAMES = {"int4": "int4-g64", "int4-z": "int4-g64-z"}


def format_of(name: str) -> Format:
    """The format of that name. ModelError: there is none."""
    found = FORMATS.get(_OTHER_NAMES.get(name, name))
    if found is None:
        raise ModelError(f"format {name!r} is not known; expected one of {', '.join(['int4', *FORMATS])}")
    return found


def check_groups(what: str, precision: Precision, shape: tuple[int, int], groups: tuple[int, int]) -> None:
    """ModelError: groups of that size do not fit a matrix (rows, cols); `what` names it."""
    cols = shape[1]
    rows, width = groups
    if precision not in SCALE_BYTES:
        if groups != (0, 0):
            raise ModelError(f"{what}: groups of {rows} x {width} found, but {precision} has none")
        return
    whole, some = rows == 1 and width == cols, rows == 1 and 0 < width < cols and width % 32 == 0
    if precision == "int4":
        if not (whole or some) or width % 32 or cols % width:
            fitting = [str(each) for each in (32, 64, 128) if cols % each == 0]
            raise ModelError(
                f"{what}: int4 in groups of {rows} x {width} does not fit {cols} columns; "
                + (f"groups of {', '.join(fitting)} would" if fitting else "no group does, so choose another format")
            )
    elif not (whole or (some if precision == "int8" else groups == (_BLOCK, _BLOCK))):
        raise ModelError(f"{what}: {precision} in groups of {rows} x {width} found, expected a row or 128 columns")


class Parts(msgspec.Struct, frozen=True):
    """Where values, scales and zero points lie within a section; 0 bytes: there are none."""

    values: int  # bytes
    scales_at: int = 0
    scales: int = 0
    zeros_at: int = 0
    zeros: int = 0

    @property
    def bytes(self) -> int:
        return max(self.values, self.scales_at + self.scales, self.zeros_at + self.zeros)


def padded(shape: tuple[int, int], kind: Layout, precision: Precision) -> tuple[int, int]:
    """rows, cols that the values of a section hold."""
    rows, cols = shape
    if kind == "flat":
        return shape
    if kind == "mma":
        return align(rows, TILE_ROWS), align(cols, _MMA_COLS.get(precision, TILE_COLS))
    return align(rows, TILE_ROWS), align(cols, 4) if precision == "int8" else cols


def parts(
    precision: Precision, kind: Layout, shape: tuple[int, int], groups: tuple[int, int], *, zero_points: bool
) -> Parts:
    """For a matrix whose groups fit. ModelError: quantised, but flat or mma."""
    rows, cols = padded(shape, kind, precision)
    match precision:
        case "fp32" | "fp16" | "bf16":
            return Parts(rows * cols * ELEMENT_BYTES[precision])
        case _:
            pass
    if kind == "flat":
        raise ModelError("a quantised matrix cannot lie in layout flat; convert for the cpu or the cuda backend")
    values = rows * cols // 2 if precision == "int4" else rows * cols
    group_rows = rows if groups[0] == 1 else -(-shape[0] // groups[0])
    count = group_rows * groups_across(precision, kind, shape[1], groups[1])
    scales_at = align(values, PART_ALIGNMENT)
    scales = count * SCALE_BYTES[precision]
    if not zero_points:
        return Parts(values, scales_at, scales)
    return Parts(values, scales_at, scales, align(scales_at + scales, PART_ALIGNMENT), count)


def groups_across(precision: Precision, kind: Layout, cols: int, width: int) -> int:
    """Scales that lie there for the columns of a matrix; of int4 in mma those of padded columns too."""
    held = padded((1, cols), kind, precision)[1] if (precision, kind) == ("int4", "mma") else cols
    return -(-held // width)


def check_mma(what: str, precision: Precision, shape: tuple[int, int], groups: tuple[int, int]) -> None:
    """ModelError: the CUDA kernels know no such groups."""
    whole = groups == (1, shape[1]) and precision != "int4"
    if precision in SCALE_BYTES and not whole and groups[1] not in _MMA_GROUPS[precision]:
        known = ", ".join(str(each) for each in _MMA_GROUPS[precision])
        raise ModelError(
            f"{what}: {precision} in groups of {groups[1]} columns; the CUDA kernels take groups of {known}"
            + (", or of a whole row" if precision != "int4" else "")
        )


def parts_of_section(section: Section) -> Parts:
    groups, zeros = (section.group_rows, section.group_cols), bool(section.zeros_offset)
    return parts(section.precision, section.layout, section.shape, groups, zero_points=zeros)


def format_of_section(section: Section) -> Format:
    """The format that a section of a sound description is in."""
    zeros = bool(section.zeros_offset)
    for form in FORMATS.values():
        groups = form.groups_of(section.shape)
        if (form.precision, groups, form.zero_points) == (
            section.precision,
            (section.group_rows, section.group_cols),
            zeros,
        ):
            return form
    name = f"{section.precision}-g{section.group_cols}{'-z' if zeros else ''}"
    return Format(name, section.precision, section.group_rows, section.group_cols, zeros)


def float_of(section: Section) -> FloatPrecision:
    """The precision of a section that is not quantised. ModelError: it is."""
    match section.precision:
        case "fp32" | "fp16" | "bf16" as precision:
            return precision
        case quantised:
            raise ModelError(f"{section.role} is {quantised}, expected a float format")


def align(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
