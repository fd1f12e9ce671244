"""colibrid.tune.points."""

from __future__ import annotations

import pytest
from tune_results import EIGHT, manifest

from colibrid.errors import ConfigError
from colibrid.tune.points import (
    MAX_POINTS,
    Shape,
    default_points,
    experts_only,
    grid_points,
    most_per_token,
    normal,
    point_name,
    shape_of,
)
from colibrid.tune.result import Point


def test_a_grid_is_all_combinations_after_the_own_setting() -> None:
    """Every combination of the listed values is there once, the model's own setting first."""
    points = grid_points("per_token=1,2,3; threshold=0,0.2 ;slots=4,none", EIGHT)
    assert points[0] == Point()
    assert len(points) == len(set(points)) == 12  # per_token 2 is the model's own, and with it the first
    assert Point(per_token=1, threshold=0.2, slots=4) in points
    assert Point(threshold=0.2, slots=4) in points
    assert not any(point.per_token == 2 for point in points)


def test_every_axis_is_read() -> None:
    """The five axes become the five fields of a point."""
    points = grid_points("per_token=3;threshold=0.5;max_tokens_per_expert=64;window_ms=2.5;slots=8", EIGHT)
    assert points[1:] == (Point(per_token=3, threshold=0.5, max_tokens_per_expert=64, window_ms=2.5, slots=8),)


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ("per_tokens=1", "did you mean per_token?"),
        ("zzz=1", "there are per_token, threshold"),
        ("per_token=1;per_token=2", "per_token is there twice"),
        ("per_token", "per_token has no values"),
        ("per_token=", "per_token has no values"),
        ("", "nothing in it"),
        (";;", "nothing in it"),
        ("per_token=9", "whole numbers from 1 to 8, or none (given: '9')"),
        ("per_token=1.5", "given: '1.5'"),
        ("per_token=0", "given: '0'"),
        ("per_token=٣", "whole numbers from 1 to 8"),
        ("threshold=1.1", "numbers from 0 to 1 (given: '1.1')"),
        ("threshold=none", "numbers from 0 to 1"),
        ("threshold=nan", "numbers from 0 to 1"),
        ("slots=65", "whole numbers from 1 to 64"),
        ("window_ms=-1", "numbers from 0 to 1000, or none"),
        ("max_tokens_per_expert=1e3", "whole numbers from 1 to 65536"),
    ],
)
def test_mistakes_are_named(grid: str, said: str) -> None:
    """The axis, the value, and what is allowed."""
    with pytest.raises(ConfigError) as caught:
        grid_points(grid, EIGHT)
    assert said in str(caught.value)
    assert str(caught.value).startswith("--grid")


def test_too_many_points_are_refused_with_their_factors() -> None:
    """The message says how many values of each axis make how many points."""
    shares = ",".join(str(share / 100) for share in range(50))
    with pytest.raises(ConfigError, match=rf"50 of threshold x 8 of slots make 400 points, at most {MAX_POINTS}"):
        grid_points(f"threshold={shares};slots=1,2,3,4,5,6,7,8", EIGHT)


def test_without_a_grid_the_model_says_what_is_tried() -> None:
    """Fewer experts, two more, and some thresholds; of many experts a selection; of none only the own setting."""
    few = default_points(EIGHT)
    assert few[0] == Point()
    assert [point.per_token for point in few if point.per_token] == [1, 3, 4]
    assert [point.threshold for point in few if point.threshold] == [0.1, 0.2, 0.3, 0.5]
    many = default_points(Shape(own=(8,) * 4, experts=(64,) * 4))
    assert [point.per_token for point in many if point.per_token] == [1, 2, 4, 6, 7, 9, 10]
    two = default_points(Shape(own=(2, 2), experts=(2, 2)))
    assert [point.per_token for point in two if point.per_token] == [1]
    assert default_points(Shape(own=(0, 0), experts=(0, 0))) == (Point(),)


def test_a_model_without_experts_has_no_per_token() -> None:
    """The axis is refused there."""
    with pytest.raises(ConfigError, match="the model has no experts"):
        grid_points("per_token=1", Shape(own=(0,), experts=(0,)))


def test_one_setting_has_one_form() -> None:
    """Own numbers are None, lists that are alike are a number, other lists stay."""
    mixed = Shape(own=(0, 2, 2), experts=(0, 8, 8))
    assert normal(Point(per_token=2), mixed) == Point()
    assert normal(Point(per_token=(0, 2, 2)), mixed) == Point()
    assert normal(Point(per_token=(0, 1, 1)), mixed) == Point(per_token=1)
    assert normal(Point(per_token=(0, 1, 2)), mixed) == Point(per_token=(0, 1, 2))


def test_what_decides_about_answers() -> None:
    """Window and slots do not, unless an expert may drop what others bring along."""
    assert experts_only(Point(per_token=1, slots=4, window_ms=2.0)) == Point(per_token=1)
    dropping = Point(max_tokens_per_expert=8, slots=4, window_ms=2.0)
    assert experts_only(dropping) == dropping


def test_more_experts_than_the_models_own_are_asked_for() -> None:
    """The largest number of any point and layer, or nothing."""
    assert most_per_token([Point(), Point(per_token=1)], EIGHT) is None
    assert most_per_token([Point(per_token=(2, 4, 1, 1)), Point(per_token=3)], EIGHT) == 4


def test_points_have_names() -> None:
    """Only what differs is named."""
    assert point_name(Point()) == "the model's own setting"
    assert point_name(Point(per_token=(1, 2), threshold=0.2)) == "per_token [1, 2], threshold 0.2"
    assert point_name(Point(window_ms=0.0, slots=4)) == "window_ms 0, slots 4"


def test_shape_is_read_from_the_description() -> None:
    """Experts and own numbers of each layer."""
    assert shape_of(manifest()) == EIGHT
