"""Paths as users write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from colibrid.cli.main import run
from colibrid.errors import ConfigError
from colibrid.paths import user_path


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
