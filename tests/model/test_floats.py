from __future__ import annotations

import numpy as np
import pytest

from colibrid.model import floats

ALL_HALVES = np.arange(1 << 16, dtype=np.uint16)


def _interesting() -> np.ndarray:
    """Random bit patterns, and values exactly between two bf16 neighbours or one unit beside."""
    random = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    halfway = (ALL_HALVES.astype(np.uint32) << np.uint32(16)) | np.uint32(0x8000)
    return np.concatenate([random, halfway, halfway - np.uint32(1), halfway + np.uint32(1)]).view(np.float32)


def test_bf16_widens_to_the_value_that_ml_dtypes_gives() -> None:
    """Each of the 65,536 bf16 patterns widens to the float32 that an independent library gives."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    expected = ALL_HALVES.view(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(floats.widen(ALL_HALVES, "bf16").view(np.uint32), expected.view(np.uint32))


def test_bf16_rounds_to_nearest_even_as_ml_dtypes_does() -> None:
    """Narrowing agrees with an independent library on random values and on all ties; NaN stays NaN."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = _interesting()
    with np.errstate(invalid="ignore", over="ignore"):
        expected = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    got = floats.narrow(values, "bf16")
    nan = np.isnan(values)
    np.testing.assert_array_equal(got[~nan], expected[~nan])
    assert np.isnan(floats.widen(got[nan], "bf16")).all()


@pytest.mark.parametrize(
    ("value", "bits"),
    [(1.0, 0x3F80), (1.0 + 2**-8, 0x3F80), (1.0 + 3 * 2**-8, 0x3F82), (1.0 + 2**-8 + 2**-20, 0x3F81), (-0.0, 0x8000)],
)
def test_bf16_ties_go_to_even(value: float, bits: int) -> None:
    """A value halfway between two bf16 neighbours takes the one whose last bit is 0."""
    assert floats.narrow(np.array([value], np.float32), "bf16")[0] == bits


def test_fp16_survives_the_way_through_fp32() -> None:
    """Every finite fp16 value is the same after widening and narrowing."""
    finite = ALL_HALVES.view(np.float16)[np.isfinite(ALL_HALVES.view(np.float16))]
    back = floats.narrow(floats.widen(finite, "fp16"), "fp16")
    np.testing.assert_array_equal(back.view(np.uint16), finite.view(np.uint16))


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_not_finite_values_are_counted(precision: str) -> None:
    """Infinities and NaN are counted in each precision; the largest finite value and subnormals are not."""
    values = np.array([np.inf, -np.inf, np.nan, 0.0, 60000.0, 1e-40], np.float32)
    assert floats.count_not_finite(floats.narrow(values, precision), precision) == 3  # type: ignore[arg-type]


def test_overflow_becomes_infinite() -> None:
    """Values beyond the largest finite one of the target become infinite, so that the converter sees them."""
    assert np.isinf(floats.narrow(np.array([70000.0], np.float32), "fp16"))[0]
    assert floats.narrow(np.array([3.4e38], np.float32), "bf16")[0] == 0x7F80
