"""Single layers of the bundled model, and the search for a number for each."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from colibrid.tune import layers
from colibrid.tune.data import load_data
from colibrid.tune.layers import cut_points, layer_stats, numbers, search, steps_of
from colibrid.tune.quality import Base, make_base
from colibrid.tune.result import Point

if TYPE_CHECKING:
    from colibrid.tune.runner import Runner

TEXTS = Path(__file__).resolve().parents[1] / "data" / "hummingbird-13m.text.jsonl"


@pytest.fixture(scope="module")
def base(runner: Runner) -> Base:
    data = load_data([str(TEXTS)], runner.text, "score", context=runner.context, most=1200)
    return make_base(runner, data, kl_tokens=300)


def test_numbers_of_each_layer(runner: Runner) -> None:
    """The model's own, one number for all, or those of a list."""
    assert numbers(runner.manifest, Point()) == (2,) * 6
    assert numbers(runner.manifest, Point(per_token=3)) == (3,) * 6
    assert numbers(runner.manifest, Point(per_token=(1, 2, 3, 4, 0, 9))) == (1, 2, 3, 4, 2, 8)
    cuts = cut_points(runner.manifest)
    assert cuts[1] == Point(per_token=(2, 1, 2, 2, 2, 2))
    assert sorted(cuts) == list(range(6))


def test_stats_of_each_layer(runner: Runner, base: Base) -> None:
    """Shares sum to 1, entropies lie between one expert and all alike, and a cut has a price."""
    steps: list[tuple[int, int]] = []
    found = layer_stats(runner, base, tokens=400, progress=lambda done, total: steps.append((done, total)))
    assert [one.layer for one in found] == list(range(6))
    assert steps == [(done, 6) for done in range(1, 7)]
    for one in found:
        assert sum(one.load) == pytest.approx(1)
        assert len(one.load) == one.experts == 8
        assert 0 < one.entropy < 1
        assert one.cut is not None
        assert one.cut.kl is not None
        assert one.cut.kl > 0
        assert one.cut.tokens <= 400
    assert layer_stats(runner, base, tokens=400) == found


def test_search_on_the_model(runner: Runner, base: Base) -> None:
    """Numbers fall from point to point and are not alike in all layers; every search finds the same."""
    steps: list[tuple[int, int]] = []
    found = search(
        runner, base, Point(threshold=0.1), tokens=300, progress=lambda done, all_: steps.append((done, all_))
    )
    assert 0 < len(found) <= layers.CANDIDATES
    totals = []
    for point in found:
        assert isinstance(point.per_token, tuple)
        assert point.threshold == 0.1
        assert set(point.per_token) == {1, 2}
        totals.append(sum(point.per_token))
    assert totals == sorted(totals, reverse=True)
    assert len(steps) <= 24
    assert search(runner, base, Point(threshold=0.1), tokens=300) == found


# What the second and the third expert of each layer are worth.
PRICES = ((9.0, 8.0), (20.0, 1.0), (4.0, 2.0), (17.0, 16.0), (30.0, 0.5))


def test_steps_take_what_hurts_least() -> None:
    """In the order of the prices, without measuring every layer after each step."""
    asked = []

    def harm(wanted: tuple[int, ...]) -> float:
        asked.append(wanted)
        return sum(sum(price[count - 1 :]) for price, count in zip(PRICES, wanted, strict=True))

    steps = steps_of((3,) * 5, harm, 100)
    order = [
        next(layer for layer in range(5) if before[layer] != after[layer])
        for (before, _), (after, _) in pairwise(steps)
    ]
    assert order == [4, 1, 2, 2, 0, 0, 3, 3, 1, 4]
    assert [wanted for wanted, _ in (steps[0], steps[-1])] == [(3,) * 5, (1,) * 5]
    assert all(value == harm(wanted) for wanted, value in steps)
    assert len(set(asked)) < 3 * len(steps) < 5 * len(steps)
    asked.clear()
    assert steps_of((3,) * 5, harm, 8) == steps[: len(steps_of((3,) * 5, harm, 8))]
    assert len(asked) <= 2 * 8


def test_a_model_without_a_choice() -> None:
    """One expert a token leaves nothing to take."""
    assert steps_of((1, 0, 1), lambda _wanted: 0.5, 10) == [((1, 0, 1), 0.5)]
