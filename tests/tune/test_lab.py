"""colibrid.tune.lab."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from colibrid.tune import lab as module
from colibrid.tune.cost import Load
from colibrid.tune.data import Data, Item
from colibrid.tune.forecast import Forecast, Left
from colibrid.tune.lab import LAYERS, SEARCH, EngineLab
from colibrid.tune.progress import silent
from colibrid.tune.result import Point

if TYPE_CHECKING:
    import pytest

    from colibrid.tune.runner import Runner

IDS = tuple(range(300, 340))
DATA = Data(
    name="d",
    sha256="00",
    task="generate",
    items=tuple(Item(file=0, line=line, ids=IDS[line:], prompt=IDS[line:]) for line in range(6)),
    longest_answer=4,
)
LOAD = Load(concurrency=2, requests=2, output_tokens=8)
ONE = Point(per_token=1)


def made(runner: Runner, data: Data = DATA) -> tuple[EngineLab, Forecast, list[str]]:
    told: list[str] = []
    forecast = Forecast(lambda _done, _total, what: told.append(what))
    return EngineLab(runner, data, (Point(), ONE), LOAD, 64, forecast), forecast, told


def test_the_models_own_answers_are_made_once_and_forecast(runner: Runner) -> None:
    """Two pieces of work, when they are first needed; all others are compared with them."""
    lab, forecast, told = made(runner)
    lab.prepare()
    assert told[0].endswith(": divergence of all points")
    assert told[-1].endswith(": the model's own answers")
    assert forecast.left() == Left(0, whole=True)
    count = len(told)
    own, one = lab.quality(Point(), silent), lab.quality(ONE, silent)
    assert len(told) == count
    assert (own.kl, own.same) == (0.0, 1.0)
    assert one.kl is not None
    assert one.kl > 0
    assert lab.cost(ONE, silent).requests == 2


def test_small_data_has_no_part_worth_a_look(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that would be more than half of the data is none; else its figures are of fewer tokens."""
    lab, _, _ = made(runner)
    assert lab.glimpse(ONE, silent) is None
    monkeypatch.setattr(module, "GLIMPSE_TOKENS", 64)
    lab, _, _ = made(runner)
    part = lab.glimpse(ONE, silent)
    assert part is not None
    assert 0 < part.tokens < lab.quality(ONE, silent).tokens
    assert part.same is None  # nothing is answered


def test_layers_are_looked_at_one_by_one(runner: Runner) -> None:
    """Statistics of each, then points with a number for each, whose divergence is known."""
    lab, forecast, told = made(runner)
    forecast.plan(LAYERS, 1)
    forecast.plan(SEARCH, 1)
    stats = lab.layers()
    assert [one.layer for one in stats] == list(range(len(runner.manifest.layers)))
    proposed = lab.search(Point())
    assert proposed
    assert all(isinstance(point.per_token, tuple) for point in proposed)
    assert forecast.left() == Left(0, whole=True)
    count = len(told)
    assert lab.quality(proposed[0], silent).kl is not None
    assert len(told) == count


def test_texts_to_embed_need_no_divergence(runner: Runner) -> None:
    """Their quality is in vectors."""
    items = tuple(msgspec.structs.replace(item, prompt=None) for item in DATA.items)
    lab, forecast, _ = made(runner, msgspec.structs.replace(DATA, task="embed", items=items))
    quality = lab.quality(ONE, silent)
    assert quality.kl is None
    assert quality.cosine is not None
    assert forecast.left() == Left(0, whole=True)
