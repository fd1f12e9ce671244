"""Which of the tried points is taken, and why, in one sentence. Pure.

With limits: of the points that keep all of them the fastest, by tokens a second; those that are as fast within what a
clock can tell are told apart by quality. Without: the best quality; those that are as good, as near as makes no
difference, are told apart by what they compute, which no clock has a part in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from colibrid.tune.points import point_name
from colibrid.tune.result import Point
from colibrid.tune.slo import excess, misses, rises

if TYPE_CHECKING:
    from collections.abc import Sequence

    from colibrid.tune.result import Cost, Quality, Tried
    from colibrid.tune.slo import Limit

ALIKE = 0.001  # as a share: figures of quality that near are a tie
AS_FAST = 0.02  # as a share: speeds that near are a tie, two runs of one setting differ as much
_FIGURES = ("loss", "kl", "cosine", "exact", "same")  # what stands for quality, the first that was measured
_SEARCHED = ("loss", "kl", "cosine")


class Choice(NamedTuple):
    """The index of the chosen point, None: none keeps the limits."""

    chosen: int | None
    reason: str


def quality_figure(tried: Sequence[Tried]) -> str | None:
    """The name of the figure that all points are compared by; None: nothing was measured of all of them."""
    whole = [one for one in tried if one.hopeless is None]
    return next(
        (name for name in _FIGURES if whole and all(getattr(one.quality, name) is not None for one in whole)), None
    )


def badness(quality: Quality, figure: str) -> float:
    """Less is better, whatever the figure."""
    value = float(getattr(quality, figure))
    return -value if rises(figure) else value


def latency(cost: Cost) -> float:
    """Milliseconds: the median between two tokens, else to the first one, else of a whole request."""
    return next(spread.p50 for spread in (cost.itl_ms, cost.ttft_ms, cost.e2e_ms) if spread is not None)


def front(tried: Sequence[Tried]) -> tuple[int, ...]:
    """Points that no other one beats: as good in quality and in latency, and better in one. Hopeless ones are left out."""
    figure = quality_figure(tried)
    if figure is None:
        return ()
    places = {
        index: (badness(one.quality, figure), latency(one.cost))
        for index, one in enumerate(tried)
        if one.hopeless is None and one.cost is not None
    }
    return tuple(
        index
        for index, place in places.items()
        if not any(other != place and other[0] <= place[0] and other[1] <= place[1] for other in places.values())
    )


def choose(tried: Sequence[Tried], limits: Sequence[Limit]) -> Choice:
    """See the module's docstring."""
    figure = quality_figure(tried)
    whole = [index for index, one in enumerate(tried) if one.hopeless is None and one.cost is not None]
    if figure is None or not whole:
        return Choice(None, "No point was measured to the end, so there is nothing to choose from.")
    if not limits:
        return _best(tried, whole, figure)
    kept = [index for index in whole if not misses(limits, tried[index])]
    words = " and ".join(map(str, limits))
    if not kept:
        return _nobody(tried, whole, limits, words)
    return _fastest(tried, kept, figure, words)


def uniform_best(tried: Sequence[Tried], own_most: int) -> Point | None:
    """Where a search of a number for each layer begins: the best number for all of them, of equal ones the smallest. None:
    that is one expert, of which none can be left out, or the data has nothing that a search could measure, which knows no
    answers. own_most: the largest number that the model has of its own in a layer.
    """
    figure = quality_figure(tried)
    same = [
        index
        for index, one in enumerate(tried)
        if one.hopeless is None
        and not isinstance(one.point.per_token, tuple)
        and one.point == Point(per_token=one.point.per_token)
    ]
    if figure not in _SEARCHED or not same:
        return None
    ties = [tried[index].point for index in _as_good_as_the_best(tried, same, figure)]
    chosen = min(ties, key=lambda point: point.per_token or own_most)
    return None if (chosen.per_token or own_most) == 1 else chosen


def _best(tried: Sequence[Tried], among: Sequence[int], figure: str) -> Choice:
    ties = _as_good_as_the_best(tried, among, figure)
    chosen = _least_work(tried, ties)
    value = f"{figure} {getattr(tried[chosen].quality, figure):.4f}"
    if len(ties) == 1:
        return Choice(chosen, f"No limits were given, and {point_name(tried[chosen].point)} has the best {value}.")
    return Choice(
        chosen,
        f"No limits were given, and of the {len(ties)} points whose {figure} is within {100 * ALIKE:g} % of the best, "
        f"{point_name(tried[chosen].point)} ({value}) computes the fewest experts.",
    )


def _as_good_as_the_best(tried: Sequence[Tried], among: Sequence[int], figure: str) -> list[int]:
    best = min(badness(tried[index].quality, figure) for index in among)
    return [index for index in among if badness(tried[index].quality, figure) <= best + ALIKE * abs(best)]


def _least_work(tried: Sequence[Tried], among: Sequence[int]) -> int:
    return min(among, key=lambda index: (*_work(tried[index]), index))


def _fastest(tried: Sequence[Tried], kept: Sequence[int], figure: str, words: str) -> Choice:
    usable = [index for index in kept if not _beaten(tried, index, kept, figure)]
    most = max(_speed(tried[index]) for index in usable)
    ties = [index for index in usable if _speed(tried[index]) >= (1 - AS_FAST) * most]
    chosen = min(ties, key=lambda index: (badness(tried[index].quality, figure), *_work(tried[index]), index))
    name, speed = point_name(tried[chosen].point), f"{_speed(tried[chosen]):.0f} tokens/s"
    if len(kept) == 1:
        return Choice(chosen, f"Only {name} keeps {words}, at {speed}.")
    among = f"Of the {len(kept)} points that keep {words}"
    if len(usable) < len(kept):
        out = len(kept) - len(usable)
        among += (
            f", {out} {'computes' if out == 1 else 'compute'} more than another for no better {figure}; of the others"
        )
    if len(ties) == 1:
        return Choice(chosen, f"{among}, {name} is the fastest, {speed}.")
    return Choice(
        chosen,
        f"{among}, {len(ties)} are as fast as a clock can tell, and of these {name} has the best {figure} ({speed}).",
    )


def _nobody(tried: Sequence[Tried], whole: Sequence[int], limits: Sequence[Limit], words: str) -> Choice:
    nearest = min(whole, key=lambda index: (excess(limits, tried[index]), index))
    missed = "; ".join(misses(limits, tried[nearest]))
    return Choice(None, f"No point keeps {words}; the nearest, {point_name(tried[nearest].point)}, misses {missed}.")


def _beaten(tried: Sequence[Tried], index: int, among: Sequence[int], figure: str) -> bool:
    """Whether a point computes more for less than another one that differs from it in nothing but experts.

    No clock is asked: where such a point comes out faster, that was chance.
    """
    mine = tried[index]
    for other in among:
        one = tried[other]
        if other == index or not _same_machine(one, mine):
            continue
        worse = badness(mine.quality, figure) >= badness(one.quality, figure)
        if worse and _work(mine)[0] > _work(one)[0]:
            return True
    return False


def _same_machine(one: Tried, other: Tried) -> bool:
    return all(
        getattr(one.point, name) == getattr(other.point, name)
        for name in ("max_tokens_per_expert", "window_ms", "slots")
    )


def _work(tried: Tried) -> tuple[float, float, float]:
    """What a token costs: experts and bytes, which are counted, then time."""
    assert tried.cost is not None, "only measured points are compared"
    return tried.cost.experts_per_token, tried.cost.bytes_per_token, -tried.cost.tokens_per_s


def _speed(tried: Tried) -> float:
    assert tried.cost is not None, "only measured points are compared"
    return tried.cost.tokens_per_s
