"""colibrid.tune.files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from colibrid.errors import ConfigError
from colibrid.tune.files import remove_file, replace_file

if TYPE_CHECKING:
    from pathlib import Path


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    """The old text goes when the new one is complete."""
    path = tmp_path / "a.json"
    replace_file(path, b"one")
    replace_file(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_in_the_way_is_told(tmp_path: Path) -> None:
    """And no part stays behind."""
    (tmp_path / "a").mkdir()
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        replace_file(tmp_path / "a", b"one")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_a_file_is_removed_once(tmp_path: Path) -> None:
    """One that is not there is no mistake, a folder is."""
    path = tmp_path / "a"
    path.write_bytes(b"")
    remove_file(path)
    remove_file(path)
    path.mkdir()
    with pytest.raises(ConfigError, match="cannot be removed: Is a directory; choose another folder"):
        remove_file(path)
