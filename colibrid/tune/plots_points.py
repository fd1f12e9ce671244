"""Pictures of the points: what each costs and what it is worth, and quality by the experts that a token used."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple

from colibrid.tune import columns
from colibrid.tune.choose import quality_figure
from colibrid.tune.drawing import Picture
from colibrid.tune.points import point_name
from colibrid.tune.slo import parse_slo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from colibrid.tune.columns import Column
    from colibrid.tune.drawing import Theme
    from colibrid.tune.result import Point, Result, Tried

_NEAR = 24  # pixels; points nearer than this share a label
_NAMED = 14  # points of the front that are named beside the picture
_NAME = 30  # characters of a name there
LATENCIES = ("p50_itl_ms", "p50_ttft_ms", "p50_e2e_ms")  # as `choose.latency` takes them


def front_picture(result: Result) -> Picture | None:
    """Quality by latency, by the figures that the front was found with."""
    figure = quality_figure(result.tried)
    across = columns.of(result, *LATENCIES)
    if figure is None or not across:
        return None
    seen = _Seen(across=across[0], up=columns.of(result, figure)[0], result=result)
    places = seen.places()
    if len(places) < 2:
        return None
    names = [f"{number} {point_name(result.tried[number].point)}" for number in sorted(result.front)]
    return Picture(
        name="front",
        title="Quality and latency",
        caption=f"Each number is a point of the table: to the left is faster, {'up' if seen.up.rises else 'down'} is better."
        " Filled ones are the Pareto front: no other point is as good in both and better in one.",
        alt=f"{seen.up.title} by {seen.across.title} of {len(places)} points. On the Pareto front: {'; '.join(names)}.",
        size=(9.0, 4.6),
        paint=partial(_paint_front, seen=seen, places=places),
    )


@dataclass(frozen=True)
class _Seen:
    """What a picture of points shows of which run."""

    across: Column
    up: Column
    result: Result

    def places(self) -> list[_Place]:
        """Points that have both figures."""
        found = []
        for number, tried in enumerate(self.result.tried):
            x, y = self.across.read(tried), self.up.read(tried)
            if tried.hopeless is None and x is not None and y is not None:
                found.append(_Place(number, x, y))
        return found


class _Place(NamedTuple):
    number: int
    x: float
    y: float


def _paint_front(figure: Figure, theme: Theme, *, seen: _Seen, places: Sequence[_Place]) -> None:
    result = seen.result
    axes, beside = figure.subplots(1, 2, width_ratios=(3, 1))
    front = sorted((place for place in places if place.number in result.front), key=lambda place: place.x)
    behind = [place for place in places if place.number not in result.front]
    axes.plot([p.x for p in behind], [p.y for p in behind], "o", mfc="none", mec=theme.soft, ms=7)
    axes.plot([p.x for p in front], [p.y for p in front], "o-", color=theme.main, ms=8, lw=1, drawstyle="steps-post")
    for place in places:
        if place.number == result.chosen:
            axes.plot(place.x, place.y, "*", color=theme.second, mec=theme.back, ms=19, zorder=3)
    axes.set(xlabel=f"{seen.across.title}, ms", ylabel=seen.up.title)
    axes.margins(0.1)
    _limits(axes, theme, seen)
    figure.draw_without_rendering()  # only then it is known where on the picture a point is
    _number(axes, theme, places)
    _names(beside, theme, result)


def _limits(axes: Axes, theme: Theme, seen: _Seen) -> None:
    """Those of the two figures shown, where they are not far from all points."""
    if seen.result.slo is None:
        return
    for limit in parse_slo(seen.result.slo, seen.result.task):
        (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
        style: dict[str, Any] = {"color": theme.second, "linestyle": "--", "linewidth": 1.2}
        text: dict[str, Any] = {"color": theme.second, "fontsize": 9, "textcoords": "offset points"}
        if limit.name == seen.across.name and limit.bound <= 2 * right:
            axes.axvline(limit.bound, **style)
            axes.set_xlim(left, max(right, limit.bound + 0.04 * (right - left)))
            axes.annotate(
                f"{limit} ",
                (limit.bound, 1),
                xycoords=("data", "axes fraction"),
                xytext=(-3, -2),
                ha="right",
                va="top",
                **text,
            )
        elif limit.name == seen.up.name and low - (high - low) <= limit.bound <= high + (high - low):
            axes.axhline(limit.bound, **style)
            axes.set_ylim(min(low, limit.bound), max(high, limit.bound + 0.04 * (high - low)))
            axes.annotate(
                f"{limit}", (1, limit.bound), xycoords=("axes fraction", "data"), xytext=(-2, 3), ha="right", **text
            )


def _number(axes: Axes, theme: Theme, places: Sequence[_Place]) -> None:
    together: list[list[_Place]] = []
    for place in sorted(places, key=lambda each: each.x):
        x, y = axes.transData.transform((place.x, place.y))
        for group in together:
            at = axes.transData.transform((group[-1].x, group[-1].y))
            if abs(at[0] - x) < _NEAR and abs(at[1] - y) < _NEAR:
                group.append(place)
                break
        else:
            together.append([place])
    for group in together:
        numbers = sorted(place.number for place in group)
        label = ", ".join(map(str, numbers[:4])) + (" …" if len(numbers) > 4 else "")
        where = (group[-1].x, group[-1].y)
        axes.annotate(label, where, textcoords="offset points", xytext=(8, 6), fontsize=9, color=theme.fore, zorder=4)


def _names(axes: Axes, theme: Theme, result: Result) -> None:
    """Points of the front by name, from fast to slow."""
    axes.set_axis_off()
    shown = [number for number in result.front if number != result.chosen]
    if result.chosen is not None:
        shown.insert(0, result.chosen)
    lines = [(number, point_name(result.tried[number].point)) for number in shown[:_NAMED]]
    for row, (number, name) in enumerate(lines):
        chosen = number == result.chosen
        height = 0.97 - row / _NAMED
        marker, colour, size = ("*", theme.second, 13) if chosen else ("o", theme.main, 6)
        axes.plot(0.02, height, marker, color=colour, ms=size, transform=axes.transAxes, clip_on=False)
        text = f"{number}  {shorten(name, _NAME, placeholder=' …')}{' (chosen)' if chosen else ''}"
        axes.text(0.09, height, text, transform=axes.transAxes, va="center", fontsize=9)
    if len(shown) > _NAMED:
        axes.text(0.09, -0.03, f"and {len(shown) - _NAMED} more", transform=axes.transAxes, va="center", fontsize=9)


def experts_picture(result: Result) -> Picture | None:
    """Quality by the experts that a token used: needs no clock, so it is the same on every machine."""
    panels = columns.of(result, "loss", "kl", "exact", "cosine", "neighbours")[:3]
    whole = (tried for tried in result.tried if tried.hopeless is None)  # others saw a part of the data
    points = [(tried, x) for tried in whole if (x := _experts(tried, result)) is not None]
    if not panels or len({x for _, x in points}) < 2:
        return None
    first = panels[0]
    words = [
        f"{point_name(tried.point)}: {x:.2f} experts, {first.write(value)}"
        for tried, x in points
        if (value := first.read(tried)) is not None
    ]
    return Picture(
        name="experts",
        title="Quality by experts a token",
        caption="What a token more or less buys. The line joins points with the same number in all layers; a threshold, a"
        " number for each layer and a limit of tokens have marks of their own.",
        alt=f"{first.title} by experts a token. {'; '.join(words[:20])}.",
        size=(max(5.0, 3.4 * len(panels)), 3.9),
        paint=partial(_paint_experts, panels=panels, points=points, own=result.tried[0]),
    )


def _experts(tried: Tried, result: Result) -> float | None:
    """As measured, else as the point says where that is enough to know."""
    point = tried.point
    if tried.cost is not None:
        return tried.cost.experts_per_token
    if point.threshold or point.max_tokens_per_expert is not None:
        return None
    if isinstance(point.per_token, int):
        return float(point.per_token)
    numbers = point.per_token or tuple(layer.per_token for layer in result.layers)
    sparse = [number for number in numbers if number]
    return sum(sparse) / len(sparse) if sparse else None


_KINDS = (
    ("same in all layers", "o"),
    ("threshold", "^"),
    ("a number for each layer", "D"),
    ("tokens an expert", "x"),
)


def _kind(point: Point) -> int:
    if point.max_tokens_per_expert is not None:
        return 3
    if isinstance(point.per_token, tuple) and len({number for number in point.per_token if number}) > 1:
        return 2
    return 1 if point.threshold else 0


def _paint_experts(
    figure: Figure, theme: Theme, *, panels: Sequence[Column], points: Sequence[tuple[Tried, float]], own: Tried
) -> None:
    colours = (theme.main, theme.second, theme.fore, theme.soft)
    drawn = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, column in zip(drawn, panels, strict=True):
        for kind, (label, marker) in enumerate(_KINDS):
            found = {
                (x, value)
                for tried, x in points
                if _kind(tried.point) == kind and (value := column.read(tried)) is not None
            }
            if found:
                xs, ys = zip(*sorted(found), strict=True)
                axes.plot(
                    xs, ys, marker, color=colours[kind], label=label, ms=6, ls="-" if kind == 0 else "none", lw=1.2
                )
        if (value := column.read(own)) is not None:
            axes.axhline(value, color=theme.soft, linestyle=":", linewidth=1, zorder=0)
        axes.set(xlabel="experts a token", title=column.title)
        if column.share:
            axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
        axes.margins(0.08)
    handles, labels = drawn[0].get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9)
