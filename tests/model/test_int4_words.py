"""The words of AWQ and GPTQ files against a packer written from their published layout, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from int4_checkpoints import awq_words, gptq_words

from colibrid.model import int4_words


def numbers(rows: int, cols: int) -> np.ndarray:
    return np.random.default_rng(rows * cols).integers(0, 16, (rows, cols), np.uint8)


@pytest.mark.parametrize(("out", "inputs"), [(8, 32), (64, 128), (24, 96)])
def test_awq_words(out: int, inputs: int) -> None:
    """A matrix comes out of words packed elsewhere, and goes into the same words."""
    values = numbers(out, inputs)
    words = awq_words(values.T)
    assert words.shape == (inputs, out // 8)
    assert np.array_equal(int4_words.from_awq(words), values)
    assert np.array_equal(int4_words.to_awq(values), words)


def test_awq_order_by_hand() -> None:
    """Of outputs 0 to 7, the word's nibbles from the lowest are 0, 2, 4, 6, 1, 3, 5, 7."""
    values = np.arange(8, dtype=np.uint8)[:, None]
    assert int4_words.to_awq(values).view(np.uint32).tolist() == [[0x75316420]]


@pytest.mark.parametrize(("out", "inputs"), [(8, 32), (64, 128), (24, 96)])
def test_gptq_words(out: int, inputs: int) -> None:
    """The same of GPTQ: eight inputs a word."""
    values = numbers(out, inputs)
    words = gptq_words(values.T)
    assert words.shape == (inputs // 8, out)
    assert np.array_equal(int4_words.from_gptq(words), values)
    assert np.array_equal(int4_words.to_gptq(values), words)


def test_gptq_order_by_hand() -> None:
    """Of inputs 0 to 7, the word's nibbles from the lowest are in order; zeros of outputs too, one less in version 1."""
    values = np.arange(8, dtype=np.uint8)[None, :]
    assert int4_words.to_gptq(values).view(np.uint32).tolist() == [[0x76543210]]
    assert int4_words.zeros_to_gptq(values.T, 2).view(np.uint32).tolist() == [[0x76543210]]
    assert int4_words.zeros_to_gptq(values.T + np.uint8(1), 1).view(np.uint32).tolist() == [[0x76543210]]


@pytest.mark.parametrize(("version", "low"), [(1, 1), (2, 0)])
def test_gptq_zeros(version: int, low: int) -> None:
    """Version 1 stores one less; all sixteen stored numbers come back."""
    zeros = (np.arange(64, dtype=np.uint8).reshape(16, 4) % 16) + np.uint8(low)
    words = int4_words.zeros_to_gptq(zeros, version)
    assert words.shape == (4, 2)
    assert np.array_equal(int4_words.zeros_from_gptq(words, version), zeros)
    assert (int(words.view(np.uint32)[0, 0]) & 15) == zeros[0, 0] - low


def test_gptq_zeros_that_do_not_fit() -> None:
    """Zero 0 has no number in version 1, zero 16 none in version 2."""
    for version, zero in ((1, 0), (2, 16)):
        with pytest.raises(ValueError, match=f"version {version}"):
            int4_words.zeros_to_gptq(np.full((8, 1), zero, np.uint8), version)
