"""Structured logs: one event a line to stderr, JSON or console. Never prompts, never keys.

An event is a snake_case fact with fields: ``log.info("engine_ready", pid=pid, ms=12)``. Whatever a field holds,
it stays on its line: control characters are escaped, long texts are cut. A stderr that nobody reads never blocks
the daemon: lines are dropped and their number is told with the next line that gets through.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import time
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from colibrid.config.settings import LoggingSettings

# A pipe that polls writable takes this many bytes without blocking (PIPE_BUF on Linux).
MAX_LINE_BYTES = 4096
MAX_TEXT_CHARACTERS = 1000
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def configure(settings: LoggingSettings, *, descriptor: int = 2) -> None:
    """Sets up structlog and sends the standard library's warnings through it. Call once, before the first event."""
    console = settings.format == "console" or (settings.format == "auto" and os.isatty(descriptor))
    level = _LEVELS[settings.level]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            _render_console if console else _render_json,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=_Factory(_Writer(descriptor)),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    root.handlers = [_StandardHandler()]
    root.setLevel(max(level, logging.WARNING))


class _Writer:
    """Owner of the descriptor's drop count. Each write is one whole line or nothing."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._dropped = 0
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    def line(self, data: bytes) -> None:
        if self._dropped:
            notice = _render_json(None, "warning", {"event": "log_lines_dropped", "level": "warning",
                                                    "count": self._dropped})  # fmt: skip
            if not self._write(notice):
                self._dropped += 1
                return
            self._dropped = 0
        if not self._write(data):
            self._dropped += 1

    def _write(self, data: bytes) -> bool:
        try:
            ready = self._poll.poll(0)
            if not ready or not ready[0][1] & select.POLLOUT:
                return False
            return os.write(self._descriptor, data + b"\n") > 0
        except OSError:  # disk full, reader gone: serving goes on
            return False


class _Logger:
    """What structlog calls with a rendered line."""

    def __init__(self, writer: _Writer) -> None:
        self._writer = writer

    def msg(self, line: bytes) -> None:
        self._writer.line(line)

    debug = info = warning = warn = error = critical = exception = fatal = log = msg


class _Factory:
    def __init__(self, writer: _Writer) -> None:
        self._writer = writer

    def __call__(self, *_names: object) -> _Logger:
        return _Logger(self._writer)


class _StandardHandler(logging.Handler):
    """Events of libraries that use the standard logging module."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception):  # a library's broken format string must not take a request down
            event: structlog.typing.FilteringBoundLogger = structlog.get_logger()
            event.log(
                record.levelno,
                "library_message",
                logger=record.name,
                message=record.getMessage(),
                exc_info=record.exc_info,
            )


# Ends of lines to some readers and commands to terminals, of which JSON has nothing to say.
_ODD = re.compile("[\x7f-\x9f\u2028\u2029]")


def _render_json(_logger: object, _method: str, event: MutableMapping[str, Any]) -> bytes:
    fields = {"time": _timestamp(), "level": event.pop("level", "info"), "event": _plain(event.pop("event", ""))}
    head = dict(fields)
    fields.update((str(key), _plain(value)) for key, value in event.items())
    line = _encode(fields)
    if len(line) >= MAX_LINE_BYTES:
        line = _encode(head | {"truncated_fields": sorted(map(str, event))[:20]})
    return line


def _render_console(_logger: object, _method: str, event: MutableMapping[str, Any]) -> bytes:
    level, name = event.pop("level", "info"), event.pop("event", "")
    trace = event.pop("exception", None)
    fields = " ".join(f"{key}={_visible(value)}" for key, value in event.items())
    line = f"{_timestamp()[11:23]} {level:<7} {_visible(name)} {fields}".rstrip()
    if trace:  # the only thing that takes several lines, and only for people; indented, so it cannot pose as an event
        line += "".join(f"\n    {_visible(part)}" for part in str(trace).splitlines())
    return line.encode("utf-8", "backslashreplace")[: MAX_LINE_BYTES - 1]


def _plain(value: object) -> object:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in list(value)[:50]]
    if isinstance(value, dict):
        return {str(key)[:100]: _plain(item) for key, item in list(value.items())[:50]}
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= MAX_TEXT_CHARACTERS else f"{text[:MAX_TEXT_CHARACTERS]}…"


def _visible(value: object) -> str:
    """One line whatever it holds: controls, separators and direction marks are shown as escapes."""
    text = str(_plain(value))
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def _encode(fields: Mapping[str, object]) -> bytes:
    try:
        line = msgspec.json.encode(fields)
    except (TypeError, ValueError):  # lone surrogates, integers over 64 bits
        line = msgspec.json.encode({key: _visible(value) for key, value in fields.items()})
    text = line.decode()
    return (
        line if text.isascii() and "\x7f" not in text else _ODD.sub(lambda one: f"\\u{ord(one[0]):04x}", text).encode()
    )


def _timestamp() -> str:
    now = time.time()
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now % 1 * 1000):03d}Z"
