"""How pictures become files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl
import pytest

from colibrid.tune.drawing import DARK, LIGHT, Picture, Theme, to_png, to_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _paint(figure: Figure, theme: Theme) -> None:
    figure.subplots().plot([0, 1], [0, 1], color=theme.main)


PICTURE = Picture(name="line", title="A line", caption="", alt="", size=(4, 3), paint=_paint)


def test_style_of_the_user_does_not_matter() -> None:
    """Neither what is set outside changes a picture, nor does drawing change what is set outside."""
    plain = to_svg(PICTURE, LIGHT)
    with mpl.rc_context({"lines.linewidth": 30, "font.size": 40}):
        assert to_svg(PICTURE, LIGHT) == plain
        assert mpl.rcParams["font.size"] == 40


def test_themes_and_formats() -> None:
    """Each theme has its own background and colours; the PNG has the asked size."""
    light, dark = to_svg(PICTURE, LIGHT).decode(), to_svg(PICTURE, DARK).decode()
    assert f"fill: {LIGHT.back}" in light
    assert f"stroke: {LIGHT.main}" in light
    assert f"fill: {DARK.back}" in dark
    assert f"stroke: {DARK.main}" in dark
    png = to_png(PICTURE, LIGHT)
    assert int.from_bytes(png[16:20], "big") == 4 * 130


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_contrast(theme: Theme) -> None:
    """Texts and marks stand out from the background as the guidelines for accessible pages ask."""
    assert _contrast(theme.fore, theme.back) >= 7
    assert min(_contrast(colour, theme.back) for colour in (theme.soft, theme.main, theme.second)) >= 3


def _contrast(one: str, other: str) -> float:
    low, high = sorted(_luminance(colour) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
