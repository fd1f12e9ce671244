"""Charts of the benches' pages."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

from colibrid.cli.bench_svg import HEIGHT, WIDTH, Series, Span, chart, ratios, shares


def parse(svg: str) -> ET.Element:
    return ET.fromstring(svg)


def ticks(svg: str) -> list[str]:
    return [text.text or "" for text in parse(svg).iter("text") if text.get("text-anchor") == "middle"]


def test_points_are_inside_and_in_order() -> None:
    """A line goes from left to right and up, whatever the unit."""
    svg = chart("ms", "%", [Series("a", [(3.0, 10.0), (30.0, 50.0), (3000.0, 100.0)])], alt="x", log_x=True)
    (path,) = [each.get("d", "") for each in parse(svg).iter("path") if each.get("d", "").count("L") == 2]
    places = [tuple(map(float, pair)) for pair in re.findall(r"([\d.]+) ([\d.]+)", path)]
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    assert [y for _, y in places] == sorted((y for _, y in places), reverse=True)
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in places)
    assert ticks(svg) == ["10", "100", "1,000", "ms"] or "10" in ticks(svg)


def test_two_series_differ_in_more_than_colour() -> None:
    """Dots are round and square, and the legend has both names and marks."""
    svg = chart("s", "ms", [Series("a", [(0, 1)], "dots"), Series("b<", [(1, 2)], "dots")], alt="x")
    picture = parse(svg)
    assert len(list(picture.iter("circle"))) == len(list(picture.iter("rect"))) == 2
    assert [text.text for text in picture.iter("text") if text.get("y") == "14"] == ["ms", "a", "b<"]


def test_nothing_to_draw_is_no_chart() -> None:
    """Series without points are left out, and a chart without series, too."""
    assert chart("x", "y", [Series("a", [])], alt="x") == ""
    assert ratios([], alt="x") == ""
    assert "b" not in {
        text.text for text in parse(chart("x", "y", [Series("a", [(1, 1)]), Series("b", [])], alt="")).iter("text")
    }


@pytest.mark.parametrize("points", [[(0.0, 0.0)], [(5.0, 5.0)], [(1.0, 0.0), (1.0, 0.0)], [(0.0, 1.0), (0.0, 2.0)]])
@pytest.mark.parametrize("log", [True, False])
def test_single_and_equal_points(points: list[tuple[float, float]], log: bool) -> None:
    """Axes of one value only can be drawn."""
    assert parse(chart("x", "y", [Series("a", points)], alt="x", log_x=log)).tag == "svg"


def test_many_points_are_thinned() -> None:
    """The picture stays small, and keeps its last point."""
    svg = chart("x", "y", [Series("a", shares([float(number) for number in range(20_000)]))], alt="x")
    assert len(svg) < 40_000
    assert f"{WIDTH - 16:.1f} " in svg


def test_shares_end_at_all() -> None:
    """Half of the values are at most the median."""
    assert shares([3.0, 1.0, 2.0, 4.0]) == [(1.0, 25), (2.0, 50), (3.0, 75), (4.0, 100)]


def test_ratios_stand_on_their_side_of_one() -> None:
    """Rows keep their order; better and worse have their own class."""
    rows = [Span("a", 2.0, 1.8, 2.3, "better"), Span("b", 0.9, 0.7, 1.2, "unclear"), Span("c", 0.5, 0.4, 0.6, "worse")]
    picture = parse(ratios(rows, alt="x"))
    (one,) = [float(line.get("x1", 0)) for line in picture.iter("line") if line.get("class") == "one"]
    dots = {each.get("class"): float(each.get("cx", 0)) for each in picture.iter("circle")}
    assert dots["worse"] < dots["unclear"] < one < dots["better"]
    assert [text.text for text in picture.iter("text") if text.get("text-anchor") == "end"] == ["a", "b", "c"]


def test_ratios_of_nothing_stand_at_the_edge() -> None:
    """A second side without tokens, or without a request in time, can be drawn, within the picture."""
    picture = parse(ratios([Span("a", 0.0, 0.0, 0.0, "worse"), Span("b", 1e-9, 1e-10, 1e-8, "worse")], alt="x"))
    places = [float(each.get("cx", 0)) for each in picture.iter("circle")]
    places += [float(line.get(end, 0)) for line in picture.iter("line") for end in ("x1", "x2")]
    assert min(places) == 150
    assert max(places) <= WIDTH
