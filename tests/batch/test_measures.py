"""colibrid.batch.measures: plain numbers that never grow."""

from __future__ import annotations

import random
from array import array

import pytest

from colibrid.batch.measures import ExpertLoad, Gaps, Histogram, Measures
from colibrid.batch.request import ExpertUsage, FinishReason, GenerateResult


def result(reason: FinishReason) -> GenerateResult:
    return GenerateResult(
        finish_reason=reason,
        stop_token=None,
        prompt_tokens=20,
        completion_tokens=5,
        cached_tokens=0,
        experts=ExpertUsage(2, 0, 0, 0),
        queue_ms=1.0,
        prefill_ms=20.0,
        decode_ms=300.0,
    )


def test_histogram() -> None:
    """A value counts in the bucket whose bound it does not exceed, as Prometheus has it; the last has no bound."""
    histogram = Histogram((1.0, 2.0, 4.0))
    for value in (0.5, 1.0, 1.5, 4.0, 9.0):
        histogram.add(value)
    histogram.add(3.0, times=5)
    assert histogram.counts == [2, 1, 6, 1]
    assert histogram.sum == pytest.approx(31.0)


def test_load_is_the_sum_of_blocks() -> None:
    """Blocks of random counts up to the largest add up exactly, also over many times their pending number."""
    picked = random.Random(3)
    sizes, row, most = (3, 0, 5), 5, 1 << 30  # 3 blocks may be pending
    load = ExpertLoad(sizes, row, most)
    sums = [0] * (row * len(sizes))
    for number in range(50):
        block = [most if number % 7 == 0 else picked.randrange(most) for _ in sums]
        sums = [before + count for before, count in zip(sums, block, strict=True)]
        load.add(memoryview(array("I", block)))
        if number % 11 == 0:
            load.layers()
    first, second = load.layers()
    assert (first.layer, list(first.assignments)) == (0, sums[0:3])
    assert (second.layer, list(second.assignments)) == (2, sums[10:15])


def test_imbalance() -> None:
    """The most loaded expert against the mean, and how many have done nothing; a layer that did nothing is even."""
    load = ExpertLoad((4, 2), 4, 100)
    load.add(array("I", [6, 2, 0, 0, 0, 0, 0, 0]).tobytes())
    first, second = load.layers()
    assert (first.imbalance, first.unused) == (3.0, 2)
    assert (second.imbalance, second.unused) == (1.0, 2)


def test_a_model_without_experts() -> None:
    """Has no load, and its empty blocks are taken."""
    load = ExpertLoad((0, 0), 0, 100)
    load.add(b"")
    assert load.layers() == []


class Receiver:
    last_token = 0.0


def test_gaps() -> None:
    """Each request's time since its earlier token is counted; tokens of one turn have one time, a first one has none."""
    measures = Measures(ExpertLoad((), 0, 100))
    gaps, early, late = Gaps(measures), Receiver(), Receiver()
    for now, receivers in (
        (10.0, [early, early]),
        (10.25, [late, early]),
        (10.5, [late, early, early]),
        (12.0, [late]),
    ):
        gaps.begin_turn(now)
        for receiver in receivers:
            gaps.token(receiver)
        gaps.end_turn()
    assert measures.output_tokens == 8
    assert sum(measures.between_tokens_s.counts) == 4
    assert measures.between_tokens_s.sum == pytest.approx(0.25 * 3 + 1.5)


def test_a_finished_request() -> None:
    """Its times and sizes are counted once, and its end by reason."""
    measures = Measures(ExpertLoad((), 0, 100))
    measures.finished(result("stop"))
    measures.finished(result("length"))
    measures.finished(result("length"))
    assert measures.endings == {"stop": 1, "length": 2, "abort": 0, "error": 0}
    assert measures.whole_s.sum == pytest.approx(0.963)
    assert [measures.queue_s.sum, measures.prefill_s.sum, measures.decode_s.sum] == pytest.approx([0.003, 0.06, 0.9])
    assert (measures.prompt_sizes.sum, measures.output_sizes.sum) == (60, 15)
