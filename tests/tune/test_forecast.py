"""colibrid.tune.forecast."""

from __future__ import annotations

import pytest

from colibrid.tune.forecast import Forecast, Left, pieces


class Watch:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def made() -> tuple[Forecast, Watch, list[tuple[int, int, str]]]:
    watch = Watch()
    told: list[tuple[int, int, str]] = []
    return Forecast(lambda *report: told.append(report), watch), watch, told


def done(forecast: Forecast, watch: Watch, kind: str, seconds: float) -> None:
    """One piece that takes so long."""
    with forecast.piece(kind, kind):
        watch.now += seconds


def test_what_is_left_is_what_that_kind_has_taken() -> None:
    """The mean of each kind, times how many of it are left."""
    forecast, watch, _ = made()
    forecast.plan("quality", 3)
    forecast.plan("cost", 3)
    done(forecast, watch, "quality", 10)
    done(forecast, watch, "cost", 100)
    assert forecast.left() == Left(2 * 10 + 2 * 100, whole=True)
    done(forecast, watch, "quality", 20)
    assert forecast.left() == Left(15 + 200, whole=True)
    forecast.drop("cost")
    assert forecast.left() == Left(15 + 100, whole=True)


def test_kinds_that_were_never_seen_are_not_guessed() -> None:
    """There is a lower bound then, and it is called one."""
    forecast, watch, told = made()
    forecast.plan("quality", 2)
    forecast.plan("cost", 1)
    with forecast.piece("quality", "first"):
        assert told[-1] == (0, 3000, "unknown time left: first")
        watch.now += 30
    assert forecast.left() == Left(30, whole=False)
    assert str(forecast.left()) == "more than 30 s left"


def test_a_piece_under_way_counts_by_its_share() -> None:
    """Once something of it is done, its own pace says what is left of it; before, that of others of its kind."""
    forecast, watch, told = made()
    forecast.plan("quality", 2)
    done(forecast, watch, "quality", 8)
    with forecast.piece("quality", "second") as progress:
        assert told[-1] == (1000, 2000, "8 s left: second")
        watch.now += 5
        progress(1, 4)
        assert told[-1] == (1250, 2000, "15 s left: second")
        progress(0, 0)
        assert told[-1] == (2000, 2000, "1 s left: second")
        watch.now += 15
    assert forecast.left() == Left(0, whole=True)


def test_more_work_may_be_found_on_the_way() -> None:
    """What is planned later is counted from then on."""
    forecast, watch, told = made()
    forecast.plan("quality", 1)
    done(forecast, watch, "quality", 10)
    forecast.plan("quality", 4)
    assert forecast.left() == Left(40, whole=True)
    with forecast.piece("quality", "more"):
        pass
    assert told[-1][:2] == (1000, 5000)


def test_only_planned_work_is_done_or_dropped() -> None:
    """Anything else would make the numbers wrong."""
    forecast, _, _ = made()
    forecast.plan("quality", 1)
    with pytest.raises(AssertionError):
        forecast.drop("quality", 2)
    forecast.drop("quality")
    with pytest.raises(AssertionError), forecast.piece("quality", "none"):
        pass


def test_a_piece_that_fails_is_not_done() -> None:
    """Nor does its time count."""
    forecast, watch, _ = made()
    forecast.plan("cost", 1)
    with pytest.raises(ValueError, match="broken"), forecast.piece("cost", "c"):
        watch.now += 5
        raise ValueError("broken")
    assert forecast.left() == Left(0, whole=False)


@pytest.mark.parametrize(
    ("left", "words"),
    [
        (Left(0.2, whole=True), "1 s left"),
        (Left(59, whole=True), "59 s left"),
        (Left(120, whole=False), "more than 2 min left"),
        (Left(5400, whole=True), "1.5 h left"),
        (Left(0, whole=False), "unknown time left"),
    ],
)
def test_words(left: Left, words: str) -> None:
    """In the unit that fits."""
    assert str(left) == words


def test_pieces_are_shown_as_whole_numbers() -> None:
    """Not as the thousandths that they are counted in."""
    assert pieces(7000) == "7"
