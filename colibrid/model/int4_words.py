"""How AWQ and GPTQ checkpoints lay four-bit numbers into 32-bit words, and back. Pure numpy, exact both ways.

Both keep a linear layer of `out` rows and `in` columns as three tensors; a group is some consecutive inputs.

          qweight                      qzeros                        scales               value of a weight
    AWQ   (in, out / 8)                (groups, out / 8)             (groups, out) fp16   (q - z) * scale
    GPTQ  (in / 8, out)                (groups, out / 8)             (groups, out) fp16   (q - z) * scale

    AWQ   a word holds eight outputs, bits 4 i .. 4 i + 3 output _AWQ_ORDER[i] of them
    GPTQ  a word of qweight holds eight inputs, of qzeros eight outputs, the first in the lowest bits; version 1 of the
          format stores z - 1, version 2 z

Here a matrix is (out, in), one number 0 .. 15 an element, its zeros are (out, groups). Of GPTQ version 1 a
stored 15 comes as 16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from colibrid.model.floats import Array

IN_A_WORD = 8
_PLAIN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def from_awq(words: Array) -> Array:
    """Of qweight or qzeros: (n, out / 8) -> (out, n)."""
    return np.ascontiguousarray(_spread(words, _AWQ_ORDER).reshape(len(words), -1).T)


def to_awq(numbers: Array) -> Array:
    """(out, n) -> (n, out / 8)."""
    return _gather(np.ascontiguousarray(numbers.T), _AWQ_ORDER)


def from_gptq(words: Array) -> Array:
    """Of qweight: (in / 8, out) -> (out, in)."""
    numbers = _spread(np.ascontiguousarray(words.T), _PLAIN_ORDER)
    return np.ascontiguousarray(numbers.reshape(words.shape[1], -1))


def to_gptq(numbers: Array) -> Array:
    """(out, in) -> (in / 8, out)."""
    return np.ascontiguousarray(_gather(numbers, _PLAIN_ORDER).T)


def zeros_from_gptq(words: Array, version: int) -> Array:
    """Of qzeros: (groups, out / 8) -> (out, groups)."""
    stored = _spread(words, _PLAIN_ORDER).reshape(len(words), -1).T
    return np.ascontiguousarray(stored + np.uint8(2 - version))


def zeros_to_gptq(zeros: Array, version: int) -> Array:
    """(out, groups) -> (groups, out / 8). ValueError: a zero that this version cannot store."""
    stored = zeros.T.astype(np.int16) - (2 - version)
    if stored.min() < 0 or stored.max() > 15:
        raise ValueError(f"zero points {int(zeros.min())} to {int(zeros.max())} do not fit into version {version}")
    return _gather(np.ascontiguousarray(stored.astype(np.uint8)), _PLAIN_ORDER)


def _spread(words: Array, order: tuple[int, ...]) -> Array:
    """(rows, n) words -> (rows, n, 8) numbers."""
    bits = words.view(np.uint32)
    numbers = np.empty((*words.shape, IN_A_WORD), np.uint8)
    for place, which in enumerate(order):
        numbers[..., which] = (bits >> np.uint32(4 * place)) & np.uint32(15)
    return numbers


def _gather(numbers: Array, order: tuple[int, ...]) -> Array:
    """(rows, 8 n) numbers -> (rows, n) words."""
    eights = numbers.reshape(len(numbers), -1, IN_A_WORD).astype(np.uint32)
    words = np.zeros(eights.shape[:2], np.uint32)
    for place, which in enumerate(order):
        words |= eights[..., which] << np.uint32(4 * place)
    return words.view(np.int32)
