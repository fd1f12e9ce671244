"""AWQ and GPTQ checkpoints made without the product's code: words packed element by element, by the published layouts."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def awq_words(numbers: Array) -> Array:
    """(n, out) numbers 0 .. 15 -> (n, out / 8) int32: nibble i of a word is output 8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]."""
    words = np.zeros((numbers.shape[0], numbers.shape[1] // 8), np.uint32)
    for row in range(words.shape[0]):
        for col in range(words.shape[1]):
            word = 0
            for nibble, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                word |= int(numbers[row, 8 * col + output]) << (4 * nibble)
            words[row, col] = word
    return words.view(np.int32)


def gptq_words(numbers: Array) -> Array:
    """(in, out) numbers -> (in / 8, out) int32: nibble i of a word is input 8 r + i."""
    words = np.zeros((numbers.shape[0] // 8, numbers.shape[1]), np.uint32)
    for row in range(words.shape[0]):
        for col in range(words.shape[1]):
            words[row, col] = sum(int(numbers[8 * row + nibble, col]) << (4 * nibble) for nibble in range(8))
    return words.view(np.int32)


def gptq_zero_words(numbers: Array) -> Array:
    """(groups, out) numbers as stored -> (groups, out / 8) int32: nibble i of a word is output 8 c + i."""
    words = np.zeros((numbers.shape[0], numbers.shape[1] // 8), np.uint32)
    for row in range(words.shape[0]):
        for col in range(words.shape[1]):
            words[row, col] = sum(int(numbers[row, 8 * col + nibble]) << (4 * nibble) for nibble in range(8))
    return words.view(np.int32)
