"""How the pictures of a report are drawn: with matplotlib, so this is imported only where it is installed.

Every picture is drawn for a light and for a dark page. The colours are those of Okabe and Ito, which can be told apart with
any vision of colours, and nothing is said by a colour alone.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Theme:
    """Colours."""

    back: str
    fore: str
    soft: str  # of what stands behind: grids, points that others beat
    main: str
    second: str


LIGHT = Theme(back="#ffffff", fore="#1b1d21", soft="#7d828d", main="#0072b2", second="#d55e00")
DARK = Theme(back="#14161a", fore="#e8eaee", soft="#8b919d", main="#56b4e9", second="#f0a04b")


@dataclass(frozen=True)
class Picture:
    """`alt` says in words what there is to see."""

    name: str
    title: str
    caption: str
    alt: str
    size: tuple[float, float]  # inches
    paint: Callable[[Figure, Theme], None]


def to_png(picture: Picture, theme: Theme) -> bytes:
    """For documents."""
    return _render(picture, theme, format="png", dpi=130)


def to_svg(picture: Picture, theme: Theme) -> bytes:
    """For the page: sharp at any size."""
    return _render(picture, theme, format="svg", dpi=200, metadata={"Date": None})


def _render(picture: Picture, theme: Theme, **options: Any) -> bytes:
    with mpl.rc_context():
        mpl.rcdefaults()  # whatever the user's own style is
        mpl.rcParams.update(_style(picture, theme))
        figure = Figure(figsize=picture.size, facecolor=theme.back, layout="constrained")
        picture.paint(figure, theme)
        target = io.BytesIO()
        figure.savefig(target, **options)
        return target.getvalue()


def _style(picture: Picture, theme: Theme) -> dict[Any, Any]:
    return {
        "text.color": theme.fore,
        "axes.labelcolor": theme.fore,
        "axes.edgecolor": theme.soft,
        "axes.facecolor": theme.back,
        "xtick.color": theme.soft,
        "ytick.color": theme.soft,
        "xtick.labelcolor": theme.fore,
        "ytick.labelcolor": theme.fore,
        "grid.color": theme.soft,
        "grid.alpha": 0.25,
        "legend.frameon": False,
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.hashsalt": picture.name,  # the same figures, the same bytes
    }
