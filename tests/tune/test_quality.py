"""What a setting does to the answers, on the bundled model: figures by their definitions, and the same every time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from colibrid.model.compare import Reference
from colibrid.model.forward import OWN, Forward
from colibrid.model.pack_model import PackModel
from colibrid.tune.data import Data, load_data
from colibrid.tune.points import point_name
from colibrid.tune.quality import Base, Divergence, make_base, measure, read, routing_of
from colibrid.tune.result import Point, Quality

if TYPE_CHECKING:
    from colibrid.tune.runner import Runner

BUNDLED = Path(__file__).resolve().parents[1] / "data"
POINTS = (Point(per_token=1), Point(threshold=0.5), Point(per_token=(2, 2, 2, 1, 2, 2)), Point(max_tokens_per_expert=8))
LIMITED = (
    Point(max_tokens_per_expert=16),
    Point(max_tokens_per_expert=64),
    Point(max_tokens_per_expert=16, slots=2, threshold=0.3),
)


def write(folder: Path, name: str, source: str, count: int) -> str:
    place = folder / name
    place.write_text("\n".join((BUNDLED / source).read_text(encoding="utf-8").splitlines()[:count]))
    return str(place)


@pytest.fixture(scope="module")
def data(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Six questions with answers, and three texts."""
    folder = tmp_path_factory.mktemp("data")
    files = [
        write(folder, "some.jsonl", "hummingbird-13m.eval.jsonl", 6),
        write(folder, "texts.jsonl", "hummingbird-13m.text.jsonl", 3),
    ]
    return load_data(files, runner.text, "generate", context=runner.context, longest_answer=24)


@pytest.fixture(scope="module")
def base(runner: Runner, data: Data) -> Base:
    return make_base(runner, data, POINTS, kl_tokens=300)


def test_the_models_own_setting(runner: Runner, data: Data, base: Base) -> None:
    """It agrees with itself in everything."""
    own = measure(runner, data, Point(), base)
    assert (own.kl, own.top1, own.same) == (0.0, 1.0, 1.0)
    assert own.divergence == np.mean([len(tokens) for tokens in base.own.answers])
    assert own.exact is not None
    assert own.exact > 0.5
    assert own.tokens == sum(len(item.ids) - item.first for item in data.items)
    assert 0 < own.kl_tokens <= 300
    assert (own.cosine, own.neighbours) == (None, None)


def test_loss_is_of_the_texts_own_tokens(runner: Runner, data: Data, base: Base) -> None:
    """As the float32 pass has it."""
    texts = [item for item in data.items if item.prompt is None]
    part = msgspec.structs.replace(data, items=tuple(texts))
    found = measure(runner, part, Point(), Base(part, read(runner, part, Point()), (), base.divergence))
    weights = PackModel(runner.pack)
    wanted = Reference(weights, [list(item.ids) for item in texts]).distance(weights)
    assert found.loss == pytest.approx(wanted.loss, abs=2e-3)
    assert found.divergence is None
    assert found.exact is None


def test_other_settings_differ(runner: Runner, data: Data, base: Base) -> None:
    """One expert loses more than a threshold; one layer less than all; a tight limit the most."""
    own, one, share, layer, limited = (measure(runner, data, point, base) for point in (Point(), *POINTS))
    assert one.kl is not None
    assert layer.kl is not None
    assert share.kl is not None
    assert 0 < layer.kl < one.kl
    assert 0 < share.kl < one.kl
    assert own.loss is not None
    for found in (one, share, layer):
        assert found.top1 is not None
        assert 0 < found.top1 < 1
        assert found.loss != own.loss
    answers = read(runner, data, POINTS[0]).answers
    assert one.same == np.mean([mine == other for mine, other in zip(answers, base.own.answers, strict=True)])
    assert limited.kl is not None
    assert limited.kl > one.kl
    assert limited.kl_tokens == one.kl_tokens
    assert limited.loss is not None
    assert limited.loss > own.loss


def test_the_float32_pass_knows_the_limit_on_experts(runner: Runner, tmp_path: Path) -> None:
    """What it predicts is what the engine predicts of the same texts, read in the same waves; without the limit it is not."""
    file = write(tmp_path, "texts.jsonl", "hummingbird-13m.text.jsonl", 11)
    texts = load_data([file], runner.text, "score", context=runner.context)
    routings = [OWN, *(routing_of(point, runner.settings) for point in LIMITED)]
    model = Forward(PackModel(runner.pack), [item.ids for item in texts.items], routings)
    model.run()
    places = np.concatenate([np.arange(begin, end - 1) for begin, end in model.bounds])
    head, blocks = model.head(), model.x.reshape(len(routings), len(model.ids), -1)
    free, *limited = (
        model.predict(rows[places], head)[np.arange(len(places)), model.ids[places + 1]] for rows in blocks
    )
    for point, mine in zip(LIMITED, limited, strict=True):
        engine = np.concatenate(read(runner, texts, point).logprobs)
        assert -mine.mean() == pytest.approx(-engine.mean(), abs=5e-3), point_name(point)
        assert np.quantile(np.abs(mine - engine), 0.8) < 1e-3, point_name(point)
        assert np.abs(free - engine).mean() > 0.05, point_name(point)
    runner.use(Point())


def test_every_run_gives_the_same_digits(runner: Runner, data: Data, base: Base) -> None:
    """In another order, with another service, and KL of single points instead of all at once."""
    first = [measure(runner, data, point, base) for point in POINTS]
    runner.close_service()
    again = make_base(runner, data, kl_tokens=300)
    second = [measure(runner, data, point, again) for point in reversed(POINTS)]
    assert second[::-1] == first
    assert base.divergence.entropy == again.divergence.entropy
    assert base.loads == again.loads
    assert json.loads(msgspec.json.encode(first)) == json.loads(msgspec.json.encode(second[::-1]))


def test_loads_are_what_the_own_setting_used(runner: Runner, base: Base) -> None:
    """Of each layer the same number of pairs, over all of the data."""
    assert len({sum(layer) for layer in base.loads}) == 1
    assert all(len(layer) == 8 for layer in base.loads)


def test_embeddings(runner: Runner, tmp_path: Path) -> None:
    """Cosine and neighbours instead of a loss; fewer vectors than neighbours say nothing of neighbours."""
    file = tmp_path / "inputs.jsonl"
    words = ["a cat", "a dog", "the sea", "blue", "seven", "Oslo", "red wine", "run", "a tree", "snow", "Paris", "May"]
    file.write_text("\n".join(json.dumps({"input": f"{word} is here"}) for word in words))
    data = load_data([str(file)], runner.text, "embed", context=runner.context)
    base = make_base(runner, data, POINTS[:2])
    own, one, share = (measure(runner, data, point, base) for point in (Point(), *POINTS[:2]))
    assert own == Quality(tokens=data.tokens, cosine=own.cosine, neighbours=1.0)
    assert own.cosine == pytest.approx(1, abs=1e-6)
    for found in (one, share):
        assert found.cosine is not None
        assert found.cosine < own.cosine
        assert found.neighbours is not None
        assert 0 < found.neighbours < 1
    few = msgspec.structs.replace(data, items=data.items[:11])
    assert measure(runner, few, Point(per_token=1), make_base(runner, few)).neighbours is None
    assert base.harm(base.own) == pytest.approx(0, abs=1e-6)


def test_kl_is_spread_over_the_data(runner: Runner, data: Data) -> None:
    """Few tokens are of several items; where none of them counts there is no KL."""
    some = Divergence(runner.pack, runner.settings, data.scored, 200)
    some.add([Point(per_token=1)])
    assert 0 < some.positions <= 200
    assert some.of(Point(per_token=1)) == Divergence(runner.pack, runner.settings, data.scored, 200).of(
        Point(per_token=1)
    )
    none = Divergence(runner.pack, runner.settings, [item for item in data.scored if item.first > 1], 2)
    none.add([])
    assert none.of(Point(per_token=1)) is None
    assert len(none.entropy) == len(runner.manifest.layers)
