"""Files that a verb leaves with its result."""

from __future__ import annotations

from pathlib import Path

import pytest

from colibrid.cli.output import check_outputs, write_output
from colibrid.errors import ConfigError


def test_a_place_that_cannot_be_written_is_told_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is not there, or closed to us; what nobody asked for is no mistake."""
    check_outputs(None, tmp_path / "new.json", Path("new.json"))
    with pytest.raises(ConfigError, match=r"b/c.json cannot be written: there is no folder .*/b; make it"):
        check_outputs(tmp_path / "a.json", tmp_path / "b" / "c.json")
    monkeypatch.setattr("os.access", lambda _path, _mode: False)
    with pytest.raises(ConfigError, match=r"a.json cannot be written: no permission in "):
        check_outputs(tmp_path / "a.json")


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    """In one line, as any mistake of a user; else the file holds the bytes."""
    write_output(tmp_path / "a", b"one")
    assert (tmp_path / "a").read_bytes() == b"one"
    with pytest.raises(ConfigError, match="/dev/full cannot be written: No space left on device"):
        write_output(Path("/dev/full"), b"one")
