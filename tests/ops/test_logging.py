"""colibrid.ops.logging."""

from __future__ import annotations

import json
import logging
import os
from typing import IO, TYPE_CHECKING

import pytest
import structlog

from colibrid.config.settings import LoggingSettings
from colibrid.ops.logging import MAX_LINE_BYTES, configure

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def lines() -> Iterator[IO[str]]:
    """The reading end of what is logged as JSON."""
    reading, writing = os.pipe()
    configure(LoggingSettings(format="json"), descriptor=writing)
    with os.fdopen(reading, encoding="utf-8") as file:
        os.set_blocking(reading, False)
        yield file
    os.close(writing)


@pytest.mark.parametrize("value", ["a\nb", '"}\n{"event": "forged"', "\x1b[31m\x00\r", "\ud800", "x" * 100_000, {"a": {1}},
                                   object(), 1 << 70, float("nan"), b"\xff", ["\u2028"] * 10_000,
                                   "a\u0085b\u2028c\u2029d", "\x7f\x9b31m"])  # fmt: skip
def test_one_object_a_line_whatever_is_logged(lines: IO[str], value: object) -> None:
    """Line breaks, quotes, controls, surrogates, huge and odd values leave exactly one JSON object on one line."""
    structlog.get_logger().info("thing_happened", value=value, other=value)
    text = lines.read()
    assert len(text.splitlines()) == text.count("\n") == 1
    assert text.removesuffix("\n").isprintable()
    assert text.endswith("\n")
    assert len(text.encode()) <= MAX_LINE_BYTES
    event = json.loads(text)
    assert event["event"] == "thing_happened"
    assert event["level"] == "info"


def test_exceptions_stay_on_their_line(lines: IO[str]) -> None:
    """A traceback is one field."""
    try:
        int("bad\nthing")
    except ValueError:
        structlog.get_logger().exception("it_broke")
    text = lines.read()
    assert text.count("\n") == 1
    assert "ValueError" in json.loads(text)["exception"]


def test_a_changed_level_counts_for_loggers_that_exist() -> None:
    """A reload configures again: loggers with fields of their own, made before, follow it."""
    reading, writing = os.pipe()
    configure(LoggingSettings(format="json", level="warning"), descriptor=writing)
    log = structlog.get_logger(engine=3)
    log.info("before")
    configure(LoggingSettings(format="json"), descriptor=writing)
    log.info("after")
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as file:
        events = [json.loads(line) for line in file]
    assert [(event["event"], event["engine"]) for event in events] == [("after", 3)]


def test_level_is_respected(lines: IO[str]) -> None:
    """Events below the level are not written."""
    structlog.get_logger().debug("unimportant")
    structlog.get_logger().info("important")
    assert [json.loads(line)["event"] for line in lines.read().splitlines()] == ["important"]


def test_library_warnings_come_through(lines: IO[str]) -> None:
    """Warnings of the standard logging module become events; its info does not."""
    logging.getLogger("aiohttp.server").info("noise")
    logging.getLogger("aiohttp.server").warning("broken %s", "pipe")
    event = json.loads(lines.read())
    assert (event["event"], event["logger"], event["message"]) == ("library_message", "aiohttp.server", "broken pipe")


def test_unread_stderr_never_blocks(lines: IO[str]) -> None:
    """A full pipe drops lines at once, and the next line that gets through tells how many."""
    log = structlog.get_logger()
    for number in range(5000):
        log.info("filler", number=number)
    kept = lines.read().splitlines()
    assert 0 < len(kept) < 5000
    log.info("after")
    notice, after = (json.loads(line) for line in lines.read().splitlines())
    assert (notice["event"], notice["count"]) == ("log_lines_dropped", 5000 - len(kept))
    assert after["event"] == "after"


def test_lost_reader_is_not_an_error() -> None:
    """A closed pipe ends no one."""
    reading, writing = os.pipe()
    configure(LoggingSettings(format="json"), descriptor=writing)
    os.close(reading)
    structlog.get_logger().info("nobody_listens")
    os.close(writing)


def test_console_shows_controls_as_escapes() -> None:
    """The console form keeps an event on its line and never sends escapes to the terminal."""
    reading, writing = os.pipe()
    configure(LoggingSettings(format="console"), descriptor=writing)
    structlog.get_logger().warning("odd", text="a\n\x1b[2Jb", count=3)
    text = os.read(reading, 1 << 16).decode()
    os.close(reading)
    os.close(writing)
    assert text.count("\n") == 1
    assert "warning odd text=a\\n\\x1b[2Jb count=3" in text
