"""Paths as users write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from colibrid.cli.main import run
from colibrid.errors import ConfigError
from colibrid.paths import read_bounded, user_path


def test_a_tilde_is_the_home_of_a_user_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of others it stays, as in a shell."""
    monkeypatch.setenv("HOME", "/home/me")
    assert user_path("~/a") == Path("/home/me/a")
    assert user_path("~no-such-user/a") == Path("~no-such-user/a")


def test_what_is_no_path_is_named() -> None:
    """A configuration can hold what a command line cannot."""
    with pytest.raises(ConfigError, match="NUL"):
        user_path("a\0b")


def test_a_file_of_nobody_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """And no traceback."""
    assert run(["tune", "--data", "~no-such-user/a.jsonl"]) == 78
    assert "~no-such-user/a.jsonl: cannot be read: No such file" in capsys.readouterr().err


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    """One byte more is an error, and so is a device without an end or no file at all."""
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert read_bounded(path, 5, "--x a", "look") == b"12345"
    for place in (path, Path("/dev/zero")):
        with pytest.raises(ConfigError, match=r"^--x a: more than 4 bytes; look$"):
            read_bounded(place, 4, "--x a", "look")
    with pytest.raises(ConfigError, match=r"^--x a: cannot be read: No such file or directory; look$"):
        read_bounded(tmp_path / "b", 4, "--x a", "look")
