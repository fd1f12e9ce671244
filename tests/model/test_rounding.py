"""Rounding with a search for scales: never worse than without, and right about what it stores."""

from __future__ import annotations

import numpy as np
import pytest

from colibrid.model import rounding
from colibrid.model.formats import FORMATS, format_of
from colibrid.model.quantised import quantise
from colibrid.model.rounding import rounded

INTEGERS = [name for name, form in FORMATS.items() if form.precision in ("int8", "int4")]


def matrix(rows: int = 48, cols: int = 256, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(4, (rows, cols)).astype(np.float32)


@pytest.mark.parametrize("name", INTEGERS)
def test_the_search_lowers_the_error(name: str) -> None:
    """In every group: less squared error than plain rounding by the group's largest value, and much less in some."""
    exact = matrix()
    form = format_of(name)
    width = form.groups_of((48, 256))[1]
    errors = [
        np.square(found.dequantise() - exact).reshape(48, -1, width).sum(axis=2)
        for found in (rounded(exact, form), rounded(exact, form, search=False), quantise(exact, form))
    ]
    assert (errors[0] <= errors[1] * 1.0001).all()
    assert (errors[0] <= errors[2] * 1.0001).all()
    if form.precision == "int4":
        assert errors[0].sum() < 0.97 * errors[2].sum()


@pytest.mark.parametrize("name", INTEGERS)
def test_energy_weighs_columns(name: str) -> None:
    """What is weighed heavily is rounded more finely, at the price of the rest."""
    exact = matrix(seed=1)
    energy = np.where(np.arange(256) % 8 == 0, 100.0, 0.01).astype(np.float32)
    plain, weighed = (np.square(rounded(exact, format_of(name), each).dequantise() - exact) for each in (None, energy))
    assert (weighed * energy).sum() <= (plain * energy).sum()
    if "int4" in name:
        assert weighed[:, ::8].sum() < 0.9 * plain[:, ::8].sum()


@pytest.mark.parametrize("name", INTEGERS)
def test_edges(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros, one value, one sign, tiny and large numbers: finite, within the format, blocks of rows make no difference."""
    exact = np.zeros((8, 128), np.float32)
    exact[1, 3] = -5.0
    exact[2] = np.linspace(1, 2, 128)
    exact[3] = -exact[2]
    exact[4] = 1e-9
    exact[5] = np.where(np.arange(128) % 2, 60_000.0, -60_000.0)
    exact[6:] = matrix(2, 128)
    form = format_of(name)
    found = rounded(exact, form)
    assert np.isfinite(found.scales).all()
    assert found.values.max() <= (15 if form.precision == "int4" else 127)
    assert found.values.min() >= (0 if form.precision == "int4" else -127)
    wide = found.dequantise()
    assert (wide[0] == 0).all()
    assert wide[1, 3] == pytest.approx(-5.0, rel=1e-2)
    assert np.abs(wide[2] - exact[2]).max() < 0.2
    assert np.abs(wide[4]).max() < 1e-6
    monkeypatch.setattr(rounding, "BLOCK_VALUES", 256)
    again = rounded(exact, form)
    assert np.array_equal(again.values, found.values)
    assert np.array_equal(again.scales, found.scales)


def test_fp8_is_plain() -> None:
    """Its largest value is the format's own: nothing to search."""
    exact = matrix(16, 128)
    assert np.array_equal(rounded(exact, format_of("fp8")).values, quantise(exact, "fp8").values)
