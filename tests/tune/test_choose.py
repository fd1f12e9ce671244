"""colibrid.tune.choose."""

from __future__ import annotations

import msgspec
import pytest
from tune_results import cost, tried

from colibrid.tune.choose import badness, choose, front, latency, quality_figure
from colibrid.tune.result import Point, Tried
from colibrid.tune.slo import parse_slo

OWN = tried(0.2000, speed=100, experts=2.0, kl=0.0)
ONE = tried(0.3000, speed=150, experts=1.0, kl=0.07, point=Point(per_token=1))
THREE = tried(0.2040, speed=80, experts=3.0, kl=0.005, point=Point(per_token=3))
WEAK = tried(0.2001, speed=105, experts=1.8, kl=0.0003, point=Point(threshold=0.1))
HARD = tried(0.2100, speed=130, experts=1.4, kl=0.011, point=Point(threshold=0.5))


def test_without_limits_the_best_quality_is_taken() -> None:
    """More experts that give nothing and fewer that give less are left alone."""
    found = choose([OWN, ONE, THREE], ())
    assert found.chosen == 0
    assert "best loss 0.2000" in found.reason


def test_of_equal_quality_the_one_that_computes_least_is_taken() -> None:
    """A second expert that adds nothing is left out; speeds as a clock has seen them play no part."""
    useless = tried(0.2000, speed=90, experts=1.0, point=Point(per_token=1))
    found = choose([OWN, useless, THREE], ())
    assert found.chosen == 1
    assert "per_token 1 (loss 0.2000) computes the fewest experts" in found.reason
    assert choose([OWN, WEAK], ()).chosen == 1


@pytest.mark.parametrize(
    ("slo", "chosen"),
    [("kl<0.1", 1), ("kl<0.02", 4), ("kl<0.001", 3), ("kl<0.0001", 0), ("tokens_per_s>140", 1), ("loss<0.205", 3)],
)
def test_of_those_that_keep_the_limits_the_fastest_is_taken(slo: str, chosen: int) -> None:
    """A tighter limit of quality leaves slower points."""
    found = choose([OWN, ONE, THREE, WEAK, HARD], parse_slo(slo, "generate"))
    assert found.chosen == chosen
    assert slo in found.reason


def test_speeds_that_a_clock_cannot_tell_apart_leave_it_to_quality() -> None:
    """One percent faster is no reason to take the worse answers."""
    near = msgspec.structs.replace(ONE, cost=cost(101, 1.0))
    found = choose([OWN, near], parse_slo("kl<0.1", "generate"))
    assert found.chosen == 0
    assert "2 are as fast as a clock can tell" in found.reason


def test_more_work_for_worse_answers_is_never_chosen() -> None:
    """Three experts that happened to be measured faster than two lose to them all the same."""
    lucky = msgspec.structs.replace(THREE, cost=cost(200, 3.0))
    found = choose([OWN, lucky], parse_slo("kl<0.1", "generate"))
    assert found.chosen == 0
    assert (
        "Of the 2 points that keep kl<0.1, 1 computes more than another for no better loss; of the others"
        in found.reason
    )


def test_with_other_slots_more_experts_may_be_faster() -> None:
    """Only points that differ in nothing but experts are known to cost more."""
    other = tried(0.2040, speed=200, experts=3.0, kl=0.005, point=Point(per_token=3, slots=32))
    assert choose([OWN, other], parse_slo("kl<0.1", "generate")).chosen == 1


def test_nothing_keeps_the_limits() -> None:
    """The nearest point is named with what it misses."""
    found = choose([OWN, ONE, HARD], parse_slo("kl<0.02,tokens_per_s>140", "generate"))
    assert found.chosen is None
    assert "No point keeps kl<0.02 and tokens_per_s>140" in found.reason
    assert "threshold 0.5, misses tokens_per_s>140: tokens_per_s is 130" in found.reason


def test_points_that_were_given_up_are_not_chosen() -> None:
    """Nor are those without a cost; where there are no others, nothing is."""
    hopeless = msgspec.structs.replace(ONE, cost=None, hopeless="kl<0.02: kl is 0.07")
    assert choose([OWN, hopeless], parse_slo("kl<0.1", "generate")).chosen == 0
    assert choose([hopeless], ()).chosen is None


def test_front_holds_what_nothing_beats() -> None:
    """Three experts are slower and no better; all others are better in something. Equal points are both there."""
    assert front([OWN, ONE, THREE, WEAK, HARD]) == (0, 1, 3, 4)
    assert front([OWN, OWN]) == (0, 1)
    assert front([OWN, msgspec.structs.replace(ONE, cost=None, hopeless="no")]) == (0,)


def test_the_figure_that_all_points_have_stands_for_quality() -> None:
    """Loss, else KL, else the cosine of embeddings, of which more is better."""
    assert quality_figure([OWN, ONE]) == "loss"
    near, far = (tried(None, cosine=value) for value in (0.99, 0.9))
    assert quality_figure([near, far]) == "cosine"
    assert badness(near.quality, "cosine") < badness(far.quality, "cosine")
    assert choose([far, near], ()).chosen == 1
    assert quality_figure([OWN, near]) is None
    assert front([OWN, near]) == ()


def test_latency_is_the_finest_time_that_there_is() -> None:
    """Between tokens, else to the first one, else of the whole."""
    assert latency(cost(100)) == 80.0
    assert latency(cost(100, itl_ms=None)) == 20.0
    assert latency(cost(100, itl_ms=None, ttft_ms=None)) == 100.0


def test_points_of_one_speed_and_quality_are_told_apart_by_place() -> None:
    """The choice does not depend on anything but the points."""
    twins: list[Tried] = [tried(0.2, point=Point(slots=slots)) for slots in (4, 8)]
    assert choose(twins, ()).chosen == 0
    assert choose(twins, parse_slo("loss<1", "generate")).chosen == 0
