"""colibrid.tune.cost: what is counted, on the bundled model. Times are only there; nothing is asserted of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from colibrid.model.footprint import footprint
from colibrid.tune.cost import Load, cost_of, measure_round
from colibrid.tune.data import Data, Item
from colibrid.tune.result import Cost, Point

if TYPE_CHECKING:
    from colibrid.tune.result import Task
    from colibrid.tune.runner import Runner

PROMPT = (4092, 366, 198, 336, 339, 438)
LOAD = Load(concurrency=3, requests=7, output_tokens=16)
TRIES = (
    6  # where the processor is somebody else's for a while, requests get out of step and counters are looked at late
)


def data(task: Task, *prompts: tuple[int, ...]) -> Data:
    items = [Item(file=0, line=1, ids=ids, prompt=ids if task == "generate" else None) for ids in prompts]
    return Data(name="d", sha256="00", task=task, items=tuple(items))


def measure_cost(runner: Runner, data: Data, point: Point, load: Load = LOAD) -> Cost:
    """Of one round."""
    return cost_of(measure_round(runner, data, point, load), runner.manifest, data.task, load.concurrency)


@pytest.fixture(scope="module")
def generated(runner: Runner) -> Cost:
    """Of the model's own setting."""
    return measure_cost(runner, data("generate", PROMPT, (*PROMPT, 336)), Point(), LOAD)


def test_every_request_is_measured(generated: Cost) -> None:
    """As many as were asked for, all of one length, with every time that there is."""
    assert (generated.concurrency, generated.requests) == (3, 7)
    assert generated.tokens_per_s * generated.seconds == pytest.approx(7 * 16)
    for spread in (generated.ttft_ms, generated.itl_ms, generated.e2e_ms):
        assert spread is not None
        assert 0 <= spread.p50 <= spread.p99
    assert generated.ttft_ms is not None
    assert 0 < generated.ttft_ms.p50 < generated.e2e_ms.p99


def test_experts_are_those_that_the_engine_counted(runner: Runner, generated: Cost) -> None:
    """Two a token by the model's own setting, one with one, fewer with a threshold."""
    both = data("generate", PROMPT)
    assert generated.experts_per_token == 2.0
    assert measure_cost(runner, both, Point(per_token=1), LOAD).experts_per_token == 1.0
    assert measure_cost(runner, both, Point(per_token=3), LOAD).experts_per_token == 3.0
    assert 1.0 < measure_cost(runner, both, Point(threshold=0.5), LOAD).experts_per_token < 2.0


def test_bytes_are_of_steps_that_only_decode(runner: Runner) -> None:
    """Three equal requests in each step: dense weights once and two experts a layer, shared by three rows."""
    load = msgspec.structs.replace(LOAD, output_tokens=96)
    figures = footprint(runner.manifest)
    layers = len(runner.manifest.layers)
    each = (figures.dense_read + 2 * layers * figures.mean_expert) / 3
    for _ in range(TRIES):
        cost = measure_cost(runner, data("generate", PROMPT), Point(), load)
        if cost.bytes_per_token == pytest.approx(each, rel=0.15):
            break
    assert cost.distinct_experts == pytest.approx(
        2.0, abs=0.2
    )  # the same token in each row; a step may be half counted
    assert cost.bytes_per_token == pytest.approx(each, rel=0.15)


def test_what_is_only_read_has_no_tokens_in_between(runner: Runner) -> None:
    """Scores and vectors: prompt tokens a second, the time of the whole, and prompt steps."""
    for task in ("score", "embed"):
        cost = measure_cost(runner, data(task, PROMPT), Point(per_token=1), LOAD)
        assert (cost.ttft_ms, cost.itl_ms) == (None, None)
        assert cost.tokens_per_s * cost.seconds == pytest.approx(7 * len(PROMPT))
        assert cost.experts_per_token == 1.0
        assert cost.bytes_per_token > 0


def test_texts_that_nobody_asks_are_gone_on_with(runner: Runner) -> None:
    """Their first half is the prompt; long ones are cut where there would be no room for output."""
    text = Item(file=0, line=1, ids=PROMPT * 300)
    whole = Data(name="d", sha256="00", task="generate", items=(text,))
    few = msgspec.structs.replace(LOAD, requests=1, concurrency=1)
    cost = measure_cost(runner, whole, Point(), few)
    assert cost.tokens_per_s * cost.seconds == pytest.approx(16)


def test_progress_counts_requests(runner: Runner) -> None:
    """Each that is measured, none of the warm-up."""
    seen: list[tuple[int, int]] = []
    measure_round(runner, data("generate", PROMPT), Point(), LOAD, lambda *done: seen.append(done))
    assert seen == [(done, 7) for done in range(1, 8)]


def test_rounds_are_measured_as_one(runner: Runner) -> None:
    """Requests and seconds add up, and quantiles are of all of them."""
    rounds = [measure_round(runner, data("generate", PROMPT), Point(), LOAD) for _ in range(2)]
    both = rounds[0].and_then(rounds[1])
    cost = cost_of(both, runner.manifest, "generate", LOAD.concurrency)
    assert (cost.requests, cost.seconds) == (14, rounds[0].seconds + rounds[1].seconds)
    assert cost.tokens_per_s * cost.seconds == pytest.approx(14 * 16)
    assert cost.e2e_ms.p99 == max(one.whole for one in both.seen)
    assert cost.experts_per_token == 2.0


def test_slots_are_those_of_the_point(runner: Runner) -> None:
    """With one slot a decode step has one row, however many requests wait."""
    figures = footprint(runner.manifest)
    each = figures.dense_read + 2 * len(runner.manifest.layers) * figures.mean_expert
    for _ in range(TRIES):
        cost = measure_cost(runner, data("generate", PROMPT), Point(slots=1), LOAD)
        if cost.bytes_per_token == pytest.approx(each, rel=0.15):
            break
    assert runner.slots == 1
    assert cost.bytes_per_token == pytest.approx(each, rel=0.15)
    runner.use(Point())
