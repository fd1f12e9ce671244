"""Quantised matrices for the kernel tests and benches: random ones in every format, their bytes as the kernels read
them, and the numbers that they stand for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from colibrid.model import mma_quantised as mma

if TYPE_CHECKING:
    from numpy.typing import NDArray

KINDS: dict[str, int] = {"half": 0, "int8": 1, "int4": 2, "fp8": 3}


@dataclass(frozen=True)
class Format:
    """How a matrix is written; the word is what kernels_cu/abi.h calls a format."""

    name: str
    kind: Any  # a mma.QuantisedPrecision, or "half": fp16
    group: int = 0  # columns; 0: a scale a row
    zeros: bool = False
    blocks: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def word(self) -> int:
        log = self.group.bit_length() - 1 if self.group else 0
        return KINDS[self.kind] | log << 4 | self.zeros << 8 | self.blocks << 9

    @property
    def meta(self) -> int:
        return meta_of(self.word)

    @property
    def step(self) -> int:
        """What the columns of a matrix are a multiple of."""
        return self.group if self.kind == "int4" else 16


def meta_of(word: int) -> int:
    """CLB_FORMAT_META of abi.h."""
    kind, group = word & 15, word >> 4 & 15
    if kind == KINDS["half"]:
        return 0
    wide = group == 5 or (kind == KINDS["fp8"] and not word >> 9 & 1)
    return (256 if wide else 128) + (128 if word >> 8 & 1 else 0)


HALF = Format("fp16", "half")
FORMATS = (
    Format("int8", "int8"), Format("int8-g128", "int8", 128),
    *(Format(f"int4-g{group}", "int4", group) for group in (32, 64, 128)),
    *(Format(f"int4-g{group}-z", "int4", group, zeros=True) for group in (32, 64, 128)),
    Format("fp8", "fp8"), Format("fp8-b128", "fp8", 128, blocks=True),
)  # fmt: skip
BY_NAME = {format_.name: format_ for format_ in (HALF, *FORMATS)}


def fp8_values(bits: NDArray[np.uint8]) -> NDArray[np.float64]:
    """What e4m3 bits mean; NaN is not expected."""
    exponent, fraction = (bits >> 3 & 15).astype(np.int64), (bits & 7).astype(np.float64)
    size = np.where(exponent == 0, fraction / 512, (1 + fraction / 8) * 2.0 ** (exponent - 7))
    return np.where(bits & 0x80, -size, size)


def _drawn(rng: np.random.Generator, rows: int, cols: int, kind: str) -> NDArray[Any]:
    if kind == "int8":
        return rng.integers(-127, 128, (rows, cols)).astype(np.int8)
    if kind == "int4":
        return rng.integers(0, 16, (rows, cols)).astype(np.uint8)
    bits = rng.integers(0, 256, (rows, cols)).astype(np.uint8)
    return np.where(bits & 0x7F == 0x7F, bits ^ 1, bits).astype(np.uint8)  # no NaN


def _spread(groups: NDArray[Any], format_: Format, rows: int, cols: int) -> NDArray[np.float64]:
    """A number a group as one an element."""
    wide = np.repeat(groups.astype(np.float64), format_.group or cols, axis=1)[:, :cols]
    return np.repeat(wide, format_.group, axis=0)[:rows] if format_.blocks else wide


def random_matrix(
    rng: np.random.Generator, shape: tuple[int, int], format_: Format, size: float
) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """The bytes of a random matrix of elements of about `size`, and its elements."""
    rows, cols = shape
    if format_.kind == "half":
        return _half(rng.normal(0, size, shape))
    values = _drawn(rng, rows, cols, format_.kind)
    numbers = fp8_values(values) if format_.kind == "fp8" else values.astype(np.float64)
    typical = {"int8": 73.0, "int4": 4.6, "fp8": 110.0}[format_.kind]
    groups = -(-cols // (format_.group or cols))
    scales = rng.lognormal(0, 0.5, (-(-rows // format_.group) if format_.blocks else rows, groups)) * size / typical
    scales = scales.astype(np.float32 if format_.kind == "fp8" else np.float16)
    zeros = rng.integers(0, 16, scales.shape).astype(np.uint8) if format_.zeros else None
    if zeros is not None:
        numbers = numbers - _spread(zeros, format_, rows, cols)
    elif format_.kind == "int4":
        numbers = numbers - 8
    padding = 8 if format_.kind == "int4" and zeros is None else 0
    groups_at = [part for part in (scales, zeros) if part is not None]
    if not format_.blocks:
        groups_at = [mma.mma_groups(part, cols, format_.kind, format_.group or cols) for part in groups_at]
    laid_out = joined(mma.mma_values(values, format_.kind, padding=padding), *groups_at)
    return laid_out, numbers * _spread(scales, format_, rows, cols)


def joined(*parts: NDArray[Any]) -> NDArray[np.uint8]:
    """Parts of a section, each at a multiple of 256 bytes."""
    flat = [part.view(np.uint8).reshape(-1) for part in parts]
    return np.concatenate([np.pad(part, (0, -part.size % 256)) for part in flat])


def _half(values: NDArray[np.float64]) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    rows, cols = (-(-size // 16) * 16 for size in values.shape)
    padded = np.zeros((rows, cols), np.float16)
    padded[: values.shape[0], : values.shape[1]] = values
    parts = padded.reshape(rows // 16, 2, 8, cols // 16, 2, 4, 2)
    laid_out = np.ascontiguousarray(parts.transpose(0, 3, 2, 5, 4, 1, 6)).reshape(-1).view(np.uint8)
    return laid_out, values.astype(np.float16).astype(np.float64)
