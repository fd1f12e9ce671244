"""colibrid.tune.store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tune_results import KEY, tried

from colibrid.config.settings import BatchSettings, LoggingSettings, ModelSettings, Settings
from colibrid.errors import ConfigError
from colibrid.tune.points import Shape
from colibrid.tune.result import LayerStats, Point
from colibrid.tune.slo import parse_slo
from colibrid.tune.store import Layers, Store, service_settings

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = Shape(own=(1, 2), experts=(2, 2))
ONE = tried(0.3, 150.0, 1.0, Point(per_token=1))


def test_what_was_kept_is_known_to_the_next_run(tmp_path: Path) -> None:
    """To the last digit, whatever the order."""
    store = Store(tmp_path / "run", KEY, resume=False)
    exact = tried(0.1 + 0.2, 1 / 3, 1.7, Point(per_token=(1, 2), threshold=0.1))
    store.keep(exact, (), whole=True)
    store.keep(ONE, (), whole=True)
    again = Store(tmp_path / "run", KEY, resume=True)
    assert again.record(ONE.point, parse_slo("kl<1", "generate")) == ONE
    assert again.record(exact.point, ()) == exact
    assert again.record(Point(), ()) is None


def test_layers_are_kept(tmp_path: Path) -> None:
    """Statistics and proposed points."""
    store = Store(tmp_path, KEY, resume=False)
    assert store.layers(SHAPE) is None
    stats = LayerStats(layer=0, experts=2, per_token=1, load=(0.25, 0.75), entropy=0.5)
    layers = Layers(stats=(stats,), proposed=(Point(per_token=(1, 2)),))
    store.keep_layers(layers)
    assert Store(tmp_path, KEY, resume=True).layers(SHAPE) == layers


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"layer": 2}, "layer 2 is not the model's"),
        ({"experts": 3}, "layer 0 is not the model's"),
        ({"load": ()}, "layer 0 is not the model's"),
        ({"proposed": (1,)}, "not for the model's layers"),
        ({"proposed": (1, 3)}, "not for the model's layers"),
        ({"proposed": (0, 1)}, "not for the model's layers"),
    ],
)
def test_layers_of_another_model_are_named(changed: dict[str, Any], words: str, tmp_path: Path) -> None:
    """An edited file is told before an engine is asked for what it says."""
    point = Point(per_token=changed.pop("proposed", (1, 2)))
    stats = LayerStats(layer=0, experts=2, per_token=1, load=(0.25, 0.75), entropy=0.5)
    store = Store(tmp_path, KEY, resume=False)
    store.keep_layers(Layers(stats=(msgspec.structs.replace(stats, **changed),), proposed=(point,)))
    with pytest.raises(ConfigError, match=rf"layers.json: .*{words}; remove it"):
        store.layers(SHAPE)


def test_what_was_given_up_for_other_limits_is_not_known(tmp_path: Path) -> None:
    """Unless all of its data was read: then its quality is."""
    lost = msgspec.structs.replace(ONE, cost=None, hopeless="kl<0.02: kl is 0.07")
    store = Store(tmp_path, KEY, resume=False)
    limits = parse_slo("kl<0.02", "generate")
    store.keep(lost, limits, whole=False)
    assert store.record(ONE.point, parse_slo("kl < 0.02", "generate")) == lost
    assert store.record(ONE.point, ()) is None
    store.keep(lost, limits, whole=True)
    assert store.record(ONE.point, ()) == msgspec.structs.replace(ONE, cost=None)


def test_an_earlier_run_is_not_overwritten(tmp_path: Path) -> None:
    """Without --resume the folder is refused."""
    Store(tmp_path, KEY, resume=False)
    with pytest.raises(ConfigError, match="holds an earlier run; add --resume"):
        Store(tmp_path, KEY, resume=False)


def test_another_run_does_not_go_on_here(tmp_path: Path) -> None:
    """What differs is named."""
    Store(tmp_path, KEY, resume=False)
    other = msgspec.structs.replace(KEY, pack="other@11", requests=32)
    with pytest.raises(ConfigError) as caught:
        Store(tmp_path, other, resume=True)
    assert "pack was 'small@00', now 'other@11'; requests was 64, now 32" in str(caught.value)
    with pytest.raises(ConfigError, match="batch.slots was 8, now the default; kv.precision was the default, now"):
        Store(tmp_path, msgspec.structs.replace(KEY, service={"kv.precision": '"fp16"'}), resume=True)
    with pytest.raises(ConfigError, match="tokenizer, chat template or what is read of the data is another"):
        Store(tmp_path, msgspec.structs.replace(KEY, ids_sha256="00"), resume=True)


def test_points_without_their_run_are_of_nobody_knows_what(tmp_path: Path) -> None:
    """Who removed run.json does not get them as those of other data."""
    Store(tmp_path, KEY, resume=False).keep(ONE, (), whole=True)
    (tmp_path / "run.json").unlink()
    for resume in (True, False):
        with pytest.raises(ConfigError, match="holds points of a run, but no run.json.*choose another folder"):
            Store(tmp_path, KEY, resume=resume)


def test_the_settings_of_a_service_are_those_that_are_not_the_default() -> None:
    """Of the parts that figures depend on; the rest may change."""
    settings = Settings(
        batch=BatchSettings(slots=3, prefix_reuse="off"),
        model=ModelSettings(path="elsewhere", max_seq_len=64),
        logging=LoggingSettings(level="error"),
    )
    assert service_settings(Settings()) == {}
    assert service_settings(settings) == {"batch.slots": "3", "model.max_seq_len": "64"}


def test_resuming_nothing_begins(tmp_path: Path) -> None:
    """--resume on an empty folder is a new run, so that one command can be repeated."""
    assert Store(tmp_path / "new", KEY, resume=True).layers(SHAPE) is None


@pytest.mark.parametrize("text", [b"", b"{", b'{"tried": 5}', b'{"more": 1}', b"\xff"])
def test_a_damaged_file_is_named(tmp_path: Path, text: bytes) -> None:
    """With what to do."""
    store = Store(tmp_path, KEY, resume=False)
    store.keep(ONE, (), whole=True)
    (file,) = (tmp_path / "points").iterdir()
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=rf"{file.name}: .*; remove it"):
        store.record(ONE.point, ())


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """A file is in its place."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--out .* cannot be created"):
        Store(tmp_path / "file", KEY, resume=False)
