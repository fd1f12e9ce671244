"""Charts as SVG that is part of a page: its style sheet gives the colours, so that they suit light and dark. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Point = tuple[float, float]

STYLE = """
svg { display: block; width: 100%; height: auto; max-width: 46rem; }
svg text { fill: var(--fore); font: 12px system-ui, sans-serif; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .one { stroke: var(--soft); stroke-width: 1.5; stroke-dasharray: 3 3; }
svg .s0 { stroke: var(--a); } svg .s1 { stroke: var(--b); }
svg .line { fill: none; stroke-width: 2; } svg .line.s1 { stroke-dasharray: 7 3; }
svg .dot { stroke: none; } svg .dot.s0 { fill: var(--a); fill-opacity: .75; } svg .dot.s1 { fill: var(--b); fill-opacity: .75; }
svg .span { stroke-width: 3; stroke-linecap: round; }
svg .unclear { stroke: var(--soft); fill: var(--soft); } svg .better { stroke: var(--good); fill: var(--good); }
svg .worse { stroke: var(--bad); fill: var(--bad); }
"""
WIDTH, HEIGHT = 720.0, 300.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 62.0, 16.0, 30.0, 46.0
_MOST_POINTS = 1500


@dataclass(frozen=True, slots=True)
class Series:
    """Points in data's units. The second of a chart is dashed, or square: not told apart by colour alone."""

    name: str
    points: Sequence[Point]
    kind: Literal["line", "dots"] = "line"


@dataclass(frozen=True, slots=True)
class Span:
    """One row of a chart of ratios."""

    name: str
    ratio: float
    low: float
    high: float
    verdict: str  # better, worse, or whatever has no colour of its own


class _Scale:
    """Data to places on one axis."""

    def __init__(self, low: float, high: float, start: float, end: float, *, log: bool) -> None:
        self.log = log
        self._turn = math.log10 if log else float
        self.low, self.high = (low, high) if high > low else (low * 0.9, high * 1.1 or 1.0)
        self._start = start
        self._unit = (end - start) / (self._turn(self.high) - self._turn(self.low))

    def __call__(self, value: float) -> float:
        return round(self._start + (self._turn(value) - self._turn(self.low)) * self._unit, 1)

    def ticks(self) -> list[float]:
        if not self.log:
            step = _step((self.high - self.low) / 5)
            first = math.ceil(self.low / step - 1e-9)
            return [round(index * step, 10) for index in range(first, math.floor(self.high / step + 1e-9) + 1)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        parts: tuple[float, ...] = (1, 2, 5) if len(decades) < 5 else (1,)
        values = [part * 10.0**decade for decade in decades for part in parts]
        return [value for value in values if self.low <= value <= self.high]


def chart(x_name: str, y_name: str, series: Sequence[Series], *, alt: str, log_x: bool = False) -> str:
    """One chart. The second axis begins at 0, and ends at 100 of percents. Series without points are left out."""
    series = [each for each in series if each.points]
    if not series:
        return ""
    xs = [x for each in series for x, _ in each.points]
    ys = [y for each in series for _, y in each.points]
    positive = [x for x in xs if x > 0]
    log_x = log_x and bool(positive)
    across = _Scale(min(positive) if log_x else 0.0, max(xs), _LEFT, WIDTH - _RIGHT, log=log_x)
    most = 100.0 if y_name.startswith("%") else 1.05 * max(ys)
    up = _Scale(0.0, most, HEIGHT - _BOTTOM, _TOP, log=False)
    parts = [*_axes(across, up, x_name, y_name), *_legend(series)]
    for index, each in enumerate(series):
        points = [(max(x, across.low), y) for x, y in _thinned(each.points)]
        if each.kind == "line":
            path = "L".join(f"{across(x)} {up(y)}" for x, y in points)
            parts.append(f'<path class="line s{index}" d="M{path}"/>')
        else:
            parts += [_mark(index, across(x), up(y)) for x, y in points]
    return _picture(parts, HEIGHT, alt)


def ratios(rows: Sequence[Span], *, alt: str) -> str:
    """Intervals around a line at 1, a row each. What is below 0.001, as 0 is, stands at the edge."""
    if not rows:
        return ""
    height = 26.0 * len(rows) + 64
    low, high = min(0.99, *(row.low for row in rows)), max(1.01, *(row.high for row in rows))
    across = _Scale(max(low, 1e-3), high, 150.0, WIDTH - 30, log=True)
    parts = [_line("grid", across(tick), 16, across(tick), height - 40) for tick in _ratio_ticks(across)]
    parts += [_text(across(tick), height - 22, f"{tick:g}", "middle") for tick in _ratio_ticks(across)]
    parts.append(_line("one", across(1), 10, across(1), height - 40))
    for index, row in enumerate(rows):
        y = 30.0 + 26 * index
        parts.append(_text(142, y + 4, row.name, "end"))
        begin, middle, end = (across(max(value, across.low)) for value in (row.low, row.ratio, row.high))
        parts.append(_line(f"span {row.verdict}", begin, y, end, y))
        parts.append(f'<circle class="{row.verdict}" cx="{middle}" cy="{y}" r="5"/>')
    parts.append(_text((150 + WIDTH - 30) / 2, height - 4, "second / first", "middle"))
    return _picture(parts, height, alt)


def shares(values: Sequence[float]) -> list[Point]:
    """Which share of the values is at most x, in percent."""
    ordered = sorted(values)
    return [(value, 100 * (index + 1) / len(ordered)) for index, value in enumerate(ordered)]


def _axes(across: _Scale, up: _Scale, x_name: str, y_name: str) -> Iterator[str]:
    for tick in up.ticks():
        yield _line("grid", _LEFT, up(tick), WIDTH - _RIGHT, up(tick))
        yield _text(_LEFT - 8, up(tick) + 4, f"{tick:,g}", "end")
    for tick in across.ticks():
        yield _line("grid", across(tick), _TOP, across(tick), HEIGHT - _BOTTOM)
        yield _text(across(tick), HEIGHT - _BOTTOM + 18, f"{tick:,g}", "middle")
    yield _text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 8, x_name, "middle")
    yield _text(_LEFT - 54, 14, y_name, "start")


def _legend(series: Sequence[Series]) -> Iterator[str]:
    x = _LEFT + 190
    for index, each in enumerate(series):
        if each.kind == "line":
            yield f'<path class="line s{index}" d="M{x} 10L{x + 24} 10"/>'
        else:
            yield _mark(index, x + 18, 10)
        yield _text(x + 30, 14, each.name, "start")
        x += 7.0 * len(each.name) + 60


def _mark(index: int, x: float, y: float) -> str:
    if index == 0:
        return f'<circle class="dot s0" cx="{x}" cy="{y}" r="2.6"/>'
    return f'<rect class="dot s{index}" x="{x - 2.2:.1f}" y="{y - 2.2:.1f}" width="4.4" height="4.4"/>'


def _picture(parts: Sequence[str], height: float, alt: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="{escape(alt)}">'
        f"<title>{escape(alt)}</title>{''.join(parts)}</svg>"
    )


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    """At most as many as can be seen, the last among them."""
    step = math.ceil(len(points) / _MOST_POINTS)
    return points if step <= 1 else [*points[::step], points[-1]]


def _step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, not below."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(part * power for part in (1, 2, 5, 10) if part * power >= rough * (1 - 1e-9))


def _ratio_ticks(across: _Scale) -> list[float]:
    """Few, and finer where the axis is short."""
    for values in (
        (0.01, 0.1, 1, 10, 100),
        (0.1, 0.2, 0.5, 1, 2, 5, 10),
        (0.5, 0.7, 1, 1.5, 2),
        (0.8, 0.9, 1, 1.1, 1.2),
    ):
        inside = [value for value in values if across.low <= value <= across.high]
        if len(inside) >= 3:
            return inside
    return [1]
