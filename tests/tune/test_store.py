"""colibrid.tune.store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from tune_results import KEY, tried

from colibrid.errors import ConfigError
from colibrid.tune.result import LayerStats, Point
from colibrid.tune.store import Layers, Store

if TYPE_CHECKING:
    from pathlib import Path

ONE = tried(0.3, 150.0, 1.0, Point(per_token=1))


def test_what_was_kept_is_known_to_the_next_run(tmp_path: Path) -> None:
    """To the last digit, whatever the order."""
    store = Store(tmp_path / "run", KEY, resume=False)
    exact = tried(0.1 + 0.2, 1 / 3, 1.7, Point(per_token=(1, 2), threshold=0.1))
    store.keep(exact, None, whole=True)
    store.keep(ONE, None, whole=True)
    again = Store(tmp_path / "run", KEY, resume=True)
    assert again.record(ONE.point, "kl<1") == ONE
    assert again.record(exact.point, None) == exact
    assert again.record(Point(), None) is None


def test_layers_are_kept(tmp_path: Path) -> None:
    """Statistics and proposed points."""
    store = Store(tmp_path, KEY, resume=False)
    assert store.layers is None
    stats = LayerStats(layer=0, experts=2, per_token=1, load=(0.25, 0.75), entropy=0.5)
    layers = Layers(stats=(stats,), proposed=(Point(per_token=(1, 2)),))
    store.keep_layers(layers)
    assert Store(tmp_path, KEY, resume=True).layers == layers


def test_what_was_given_up_for_other_limits_is_not_known(tmp_path: Path) -> None:
    """Unless all of its data was read: then its quality is."""
    lost = msgspec.structs.replace(ONE, cost=None, hopeless="kl<0.02: kl is 0.07")
    store = Store(tmp_path, KEY, resume=False)
    store.keep(lost, "kl<0.02", whole=False)
    assert store.record(ONE.point, "kl<0.02") == lost
    assert store.record(ONE.point, None) is None
    store.keep(lost, "kl<0.02", whole=True)
    assert store.record(ONE.point, None) == msgspec.structs.replace(ONE, cost=None)


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


def test_resuming_nothing_begins(tmp_path: Path) -> None:
    """--resume on an empty folder is a new run, so that one command can be repeated."""
    assert Store(tmp_path / "new", KEY, resume=True).layers is None


@pytest.mark.parametrize("text", [b"", b"{", b'{"tried": 5}', b'{"more": 1}', b"\xff"])
def test_a_damaged_file_is_named(tmp_path: Path, text: bytes) -> None:
    """With what to do."""
    store = Store(tmp_path, KEY, resume=False)
    store.keep(ONE, None, whole=True)
    (file,) = (tmp_path / "points").iterdir()
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=rf"{file.name}: .*; remove it"):
        store.record(ONE.point, None)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """A file is in its place."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--out .* cannot be created"):
        Store(tmp_path / "file", KEY, resume=False)
