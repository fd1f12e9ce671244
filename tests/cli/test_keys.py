"""`colibrid keys`."""

from __future__ import annotations

import io
import multiprocessing
import stat
import sys
from typing import TYPE_CHECKING

import pytest

from colibrid.cli.main import run
from colibrid.config.settings import KeyLimits
from colibrid.http.auth import read_key_file
from colibrid.http.credentials import digest_of

if TYPE_CHECKING:
    from pathlib import Path

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def keys(*arguments: str) -> int:
    return run(["keys", *arguments])


def test_add(file: Path, capsys: Capture) -> None:
    """The key is printed once, the file has only its hash with what was given, and nobody else may read the file."""
    options = ["--scopes", "inference,metrics", "--requests-per-minute", "60", "--priority", "0"]
    assert (
        keys("add", "alice", "--file", str(file), *options, "--expires", "2099-01-31", "--comment", "her\nlaptop") == 0
    )
    key = capsys.readouterr().out.strip()
    assert key not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    (found,) = read_key_file(file, "x").keys
    assert found.digest == digest_of(key)
    assert (found.id, found.scopes, found.comment) == ("alice", {"inference", "metrics"}, "her laptop")
    assert found.limits == KeyLimits(requests_per_minute=60, priority=0)
    assert list(file.parent.iterdir()) == [file]


def test_other_lines_stay(file: Path, capsys: Capture) -> None:
    """Adding and revoking leave comments, other keys, owner and mode of the file as they are."""
    file.write_text("# ours\nplain-key-1   # old\n\n")
    file.chmod(0o640)
    assert keys("add", "bob", "--file", str(file)) == 0
    assert keys("add", "eve", "--file", str(file)) == 0
    assert file.read_text().startswith("# ours\nplain-key-1   # old\n\nbob sha256:")
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert keys("revoke", "bob", "--file", str(file)) == 0
    assert [key.id for key in read_key_file(file, "x").keys] == ["plain-1", "eve"]
    assert keys("revoke", "plain-1", "--file", str(file)) == 0
    assert file.read_text().startswith("# ours\n\neve sha256:")
    assert "SIGHUP" in capsys.readouterr().err


def test_list(file: Path, capsys: Capture) -> None:
    """The list names what a key may do, shows no hash, and marks what is over or plain."""
    keys("add", "alice", "--file", str(file), "--tokens-per-day", "1000", "--priority", "0", "--expires", "2099-01-01")
    file.write_text(file.read_text().replace("2099-", "2001-") + "plain-key-1\n")
    capsys.readouterr()
    assert keys("list", "--file", str(file)) == 0
    first, second = capsys.readouterr().out.splitlines()
    for part in ("alice", "inference", "tokens_per_day=1000", "priority=0", "expires=2001-01-01", "EXPIRED"):
        assert part in first
    assert "plain-2" in second
    assert "plain-key-1" not in second
    assert "sha256" not in first


def test_key_from_outside(file: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key may come from standard input, and is then not printed; a short one is refused."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("sk-from-elsewhere\n"))
    assert keys("add", "alice", "--file", str(file), "--stdin") == 0
    assert capsys.readouterr().out == ""
    assert read_key_file(file, "x").find("sk-from-elsewhere") is not None
    monkeypatch.setattr(sys, "stdin", io.StringIO("short\n"))
    assert keys("add", "bob", "--file", str(file), "--stdin") == 78
    assert "at least 8 characters" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["add", "al/ice"], "is no id"),
        (["add", "alice"], "has a key called 'alice' already; revoke it first"),
        (["add", "bob", "--scopes", "all"], "scope 'all' is not known"),
        (["add", "bob", "--requests-at-once", "0"], "requests_at_once=0 must be"),
        (["add", "bob", "--expires", "soon"], "is no day"),
        (["add", "bob", "--expires", "2001-01-01"], "--expires 2001-01-01 is over already"),
        (["revoke", "bob"], "no key called 'bob'"),
    ],
)
def test_mistakes_change_nothing(file: Path, capsys: Capture, arguments: list[str], text: str) -> None:
    """A wrong command is one line with exit code 78, prints no key and leaves the file as it was."""
    keys("add", "alice", "--file", str(file))
    before = file.read_bytes()
    capsys.readouterr()
    assert keys(*arguments, "--file", str(file)) == 78
    shown = capsys.readouterr()
    assert text in shown.err
    assert shown.out == ""
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


def test_file_of_the_configuration(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --file the configuration's file is meant, or the service manager's; without any, the error says so."""
    monkeypatch.delenv("COLIBRID_CONFIG", raising=False)
    config = tmp_path / "c.yaml"
    config.write_text(f"auth: {{keys_file: {tmp_path}/k}}\n")
    assert keys("add", "alice", "--config", str(config)) == 0
    assert (tmp_path / "k").exists()
    assert keys("list") == 78
    assert "give --file" in capsys.readouterr().err
    (tmp_path / "k").rename(tmp_path / "colibrid-keys")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert keys("list") == 0
    assert "alice" in capsys.readouterr().out


def test_folder_that_is_not_there(tmp_path: Path, capsys: Capture) -> None:
    """A missing folder is told, not made."""
    assert keys("add", "alice", "--file", str(tmp_path / "no" / "keys")) == 78
    assert "cannot be opened" in capsys.readouterr().err


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    """The file behind a symbolic link is changed."""
    (tmp_path / "real").write_text("plain-key-1\n")
    (tmp_path / "link").symlink_to("real")
    assert keys("add", "alice", "--file", str(tmp_path / "link")) == 0
    assert (tmp_path / "link").is_symlink()
    assert "alice" in (tmp_path / "real").read_text()


def _add_some(file: str, name: str) -> None:
    for number in range(5):
        run(["keys", "add", f"{name}{number}", "--file", file])


def test_commands_at_once_lose_nothing(file: Path) -> None:
    """Several commands that change one file at a time all get their keys in."""
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_add_some, args=(str(file), name)) for name in "abc"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(300)
    assert len(read_key_file(file, "x").keys) == 15
