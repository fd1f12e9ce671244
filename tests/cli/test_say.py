"""Words for people go out if somebody takes them, and never stop a program."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

from colibrid.cli.say import plain, say, say_to

if TYPE_CHECKING:
    import pytest


def test_a_file_and_a_pipe_get_the_text(tmp_path: Path) -> None:
    """What can be written is written at once, whatever buffers the file object has."""
    with (tmp_path / "said").open("w") as file:
        say("one é\n", file)
        assert (tmp_path / "said").read_text() == "one é\n"
    text = io.StringIO()
    say("two\n", text)
    assert text.getvalue() == "two\n"


def test_a_full_disk_is_survived() -> None:
    """A device that has no room says so to each write; nobody hears of it."""
    with Path("/dev/full").open("w") as file:
        say("lost\n", file)


def test_a_pipe_that_nobody_reads_is_survived() -> None:
    """A full pipe does not block, and one without a reader raises nothing."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while os.write(writing, b"x" * 4096):
            pass
    except BlockingIOError:
        os.set_blocking(writing, True)
    say_to("lost\n", writing)
    os.close(reading)
    say_to("lost\n", writing)
    os.close(writing)
    say_to("lost\n", writing)


def test_a_closed_file_is_survived(capsys: pytest.CaptureFixture[str]) -> None:
    """A stream that was closed takes nothing."""
    text = io.StringIO()
    text.close()
    say("lost\n", text)
    assert capsys.readouterr().err == ""


def test_plain_text_rules_no_terminal() -> None:
    """Control characters, marks of direction and half characters are written out; the rest stays."""
    assert plain("café 日本") == "café 日本"
    assert plain("a\x1b[31m\r\u202e\udcff") == "a\\x1b[31m\\r\\u202e\\udcff"
