"""colibrid.tune.sweep."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec
import pytest
from tune_results import KEY, cost

from colibrid.tune.forecast import Forecast, Left
from colibrid.tune.points import experts_only
from colibrid.tune.result import Cost, Point, Quality, Tried
from colibrid.tune.slo import parse_slo
from colibrid.tune.store import Store
from colibrid.tune.sweep import LONG_ENOUGH_S, ROUNDS, Sweep, far_beyond

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    Progress = Callable[[int, int], None]

OWN = Point()
KL = {OWN: 0.0, Point(per_token=1): 0.07, Point(threshold=0.5): 0.011, Point(per_token=3): 0.005}
POINTS = list(KL)


class FakeLab:
    """Quality by a table; counts what it is asked for."""

    def __init__(self, *, glimpses: bool = True) -> None:
        self.glimpses = glimpses
        self.asked: list[tuple[str, Point]] = []
        self.fail_at: int | None = None
        self.prepared = 0
        self.round_s = LONG_ENOUGH_S

    def prepare(self) -> None:
        self.prepared += 1

    def _note(self, what: str, point: Point, progress: Progress) -> None:
        if self.fail_at == len(self.asked):
            raise KeyboardInterrupt
        self.asked.append((what, point))
        progress(1, 2)

    def glimpse(self, point: Point, progress: Progress) -> Quality | None:
        self._note("glimpse", point, progress)
        return Quality(tokens=100, kl=KL[experts_only(point)] * 0.9) if self.glimpses else None

    def quality(self, point: Point, progress: Progress) -> Quality:
        self._note("quality", point, progress)
        return Quality(tokens=1000, loss=0.2, kl=KL[experts_only(point)])

    def cost(self, point: Point, progress: Progress) -> Cost:
        self._note("cost", point, progress)
        return cost(seconds=self.round_s * self.count("cost").count(point))

    def count(self, what: str) -> list[Point]:
        return [point for kind, point in self.asked if kind == what]


def sweep_of(
    folder: Path, lab: FakeLab, slo: str | None = None, *, resume: bool = False, to_the_end: bool = False
) -> tuple[Sweep, Forecast]:
    forecast = Forecast(lambda _done, _total, _what: None, lambda: 0.0)
    limits = () if slo is None else parse_slo(slo, "generate")
    store = Store(folder, KEY, resume=resume)
    return Sweep(lab, store, forecast, limits, to_the_end=to_the_end), forecast


def tried_of(sweep: Sweep, points: Sequence[Point]) -> list[Tried]:
    """Quality and costs."""
    return sweep.measure(sweep.assess(points, OWN))


def test_without_limits_everything_is_measured_to_the_end(tmp_path: Path) -> None:
    """Each point once, in the order of the points, and all that was planned is done."""
    lab = FakeLab()
    sweep, forecast = sweep_of(tmp_path, lab)
    tried = tried_of(sweep, POINTS)
    assert [one.point for one in tried] == POINTS
    assert all(one.cost is not None and one.hopeless is None for one in tried)
    assert [len(lab.count(what)) for what in ("glimpse", "quality", "cost")] == [0, 4, 4]
    assert lab.prepared == 1
    assert forecast.left() == Left(0, whole=True)


def test_hopeless_points_cost_nothing_more(tmp_path: Path) -> None:
    """Far beyond a limit: given up after a part of the data, whose figures it keeps. Just beyond: after all of it."""
    lab = FakeLab()
    sweep, forecast = sweep_of(tmp_path, lab, "kl<0.0095")
    own, one, half, three = tried_of(sweep, POINTS)
    assert own.cost is not None
    assert three.cost is not None
    assert one.hopeless == "after 100 tokens: kl<0.0095: kl is 0.063"
    assert (one.quality.tokens, one.cost) == (100, None)
    assert half.hopeless == "kl<0.0095: kl is 0.011"
    assert (half.quality.tokens, half.cost) == (1000, None)
    assert lab.count("quality") == [OWN, Point(threshold=0.5), Point(per_token=3)]
    assert lab.count("cost") == [OWN, Point(per_token=3)]
    assert forecast.left() == Left(0, whole=True)


def test_the_own_setting_is_never_given_up(tmp_path: Path) -> None:
    """Others are compared with it, whatever the limits."""
    lab = FakeLab()
    own, *_ = tried_of(sweep_of(tmp_path, lab, "loss<0.1")[0], POINTS)
    assert own.cost is not None
    assert own.hopeless is None
    assert OWN not in lab.count("glimpse")


def test_small_data_is_read_as_a_whole(tmp_path: Path) -> None:
    """Where there is no part worth a look, points are given up after all of it."""
    lab = FakeLab(glimpses=False)
    _, one, *_ = tried_of(sweep_of(tmp_path, lab, "kl<0.02")[0], POINTS)
    assert one.hopeless == "kl<0.02: kl is 0.07"
    assert one.quality.tokens == 1000


def test_nothing_is_given_up_where_all_is_wanted(tmp_path: Path) -> None:
    """Points that keep no limit are measured to the end, too."""
    tried = tried_of(sweep_of(tmp_path, FakeLab(), "kl<0.02", to_the_end=True)[0], POINTS)
    assert all(one.cost is not None for one in tried)


def test_points_that_differ_in_speed_alone_share_their_quality(tmp_path: Path) -> None:
    """Slots and window change no answer; where experts drop tokens they do."""
    points = [Point(per_token=1, slots=slots) for slots in (4, 8)]
    lab = FakeLab()
    sweep, forecast = sweep_of(tmp_path, lab)
    tried = tried_of(sweep, [OWN, *points])
    assert len(lab.count("quality")) == 2
    assert len(lab.count("cost")) == 3
    assert tried[1].quality == tried[2].quality
    assert forecast.left() == Left(0, whole=True)


def test_what_is_given_up_is_given_up_with_other_slots_too(tmp_path: Path) -> None:
    """One look is enough for all of them."""
    points = [Point(per_token=1, slots=slots) for slots in (4, 8, 16)]
    lab = FakeLab()
    sweep, forecast = sweep_of(tmp_path, lab, "kl<0.02")
    tried = tried_of(sweep, [OWN, *points])
    assert len(lab.count("glimpse")) == 1
    assert all(one.hopeless is not None for one in tried[1:])
    assert [one.point for one in tried[1:]] == points
    assert forecast.left() == Left(0, whole=True)


def test_services_are_opened_as_seldom_as_can_be(tmp_path: Path) -> None:
    """Costs are measured service by service, whatever the order of the points."""
    points = [OWN, *(Point(per_token=k, slots=slots) for k in (1, 3) for slots in (4, 8))]
    lab = FakeLab()
    tried_of(sweep_of(tmp_path, lab)[0], points)
    slots = [point.slots for point in lab.count("cost")]
    assert slots == [None, 4, 4, 8, 8]


@pytest.mark.parametrize("interrupted_at", range(12))
@pytest.mark.parametrize("slo", [None, "kl<0.0095"])
def test_an_interrupted_run_goes_on(tmp_path: Path, interrupted_at: int, slo: str | None) -> None:
    """Wherever it was: nothing that was finished is measured again, and the result is that of a run that was not."""
    whole = tried_of(sweep_of(tmp_path / "whole", FakeLab(), slo)[0], POINTS)
    lab = FakeLab()
    lab.fail_at = interrupted_at
    with contextlib.suppress(KeyboardInterrupt):
        tried_of(sweep_of(tmp_path / "run", lab, slo)[0], POINTS)
    before, lab.fail_at = list(lab.asked), None
    sweep, forecast = sweep_of(tmp_path / "run", lab, slo, resume=True)
    assert tried_of(sweep, POINTS) == whole
    assert forecast.left() == Left(0, whole=True)
    repeated = [asked for asked in lab.asked[len(before) :] if asked in before and asked[0] != "glimpse"]
    assert repeated == []


def test_short_rounds_take_turns(tmp_path: Path) -> None:
    """Points of one service are measured one after another, until the first had time enough; the last sum counts. All is
    forecast once the first round is over.
    """
    lab = FakeLab()
    lab.round_s = LONG_ENOUGH_S / 3
    sweep, forecast = sweep_of(tmp_path, lab)
    tried = tried_of(sweep, POINTS)
    assert lab.count("cost") == POINTS * 3
    assert [one.cost.seconds for one in tried if one.cost] == pytest.approx([LONG_ENOUGH_S] * 4)
    assert forecast.left() == Left(0, whole=True)
    lab.round_s = LONG_ENOUGH_S / 100
    lab.asked.clear()
    tried_of(sweep_of(tmp_path / "shorter", lab)[0], POINTS)
    assert lab.count("cost") == POINTS * ROUNDS


def test_points_that_will_come_later_are_forecast(tmp_path: Path) -> None:
    """Until it is said that none are left to come, with as many rounds as the others take."""
    lab = FakeLab()
    lab.round_s = LONG_ENOUGH_S / 3
    sweep, forecast = sweep_of(tmp_path, lab, "kl<1")
    sweep.expect(2)
    tried_of(sweep, POINTS)
    assert [forecast.planned(kind) for kind in ("glimpse", "quality", "cost")] == [2, 2, 6]
    sweep.expect(0)
    assert forecast.left() == Left(0, whole=True)
    assert forecast.planned("cost") == 0


def test_a_finished_run_measures_nothing(tmp_path: Path) -> None:
    """It prepares nothing either."""
    first = tried_of(sweep_of(tmp_path, FakeLab())[0], POINTS)
    lab = FakeLab()
    assert tried_of(sweep_of(tmp_path, lab, resume=True)[0], POINTS) == first
    assert lab.asked == []
    assert lab.prepared == 0


def test_other_limits_keep_what_is_known(tmp_path: Path) -> None:
    """Costs and qualities of all the data stay; a point that a look had settled is measured."""
    tried_of(sweep_of(tmp_path, FakeLab(), "kl<0.0095")[0], POINTS)
    lab = FakeLab()
    tried = tried_of(sweep_of(tmp_path, lab, resume=True)[0], POINTS)
    assert all(one.cost is not None for one in tried)
    assert lab.count("quality") == [Point(per_token=1)]
    assert lab.count("cost") == [Point(per_token=1), Point(threshold=0.5)]


def test_a_part_counts_only_when_it_is_far_beyond() -> None:
    """In both directions, and only where it was measured."""
    part = Quality(tokens=100, kl=0.024, top1=0.8)
    assert far_beyond(parse_slo("kl<0.02,top1>0.9,exact>0.5", "generate"), part) == []
    assert far_beyond(parse_slo("kl<0.019", "generate"), part) == ["kl<0.019: kl is 0.024"]
    assert far_beyond(parse_slo("top1>0.95", "generate"), msgspec.structs.replace(part, top1=0.7)) == [
        "top1>0.95: top1 is 0.7"
    ]
    assert far_beyond(parse_slo("kl<=0", "generate"), part) == ["kl<=0: kl is 0.024"]
