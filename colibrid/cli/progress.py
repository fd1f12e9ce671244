"""A progress bar on stderr: redrawn in place on a terminal, a line every ten percent elsewhere."""

from __future__ import annotations

import sys
import time
from typing import IO, TYPE_CHECKING

from colibrid.cli.say import say
from colibrid.config.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

_WIDTH = 30
_REDRAW_S = 0.1


class Progress:
    """Shows how much of `total` is done: bytes, or what `show` makes of the numbers.

    Call it with (done, total, what); close() ends the line.
    """

    def __init__(self, label: str, file: IO[str] | None = None, *, show: Callable[[int], str] = format_bytes) -> None:
        self._label = label
        self._show = show
        self._file = sys.stderr if file is None else file
        self._terminal = self._file.isatty()
        self._drawn_at = 0.0
        self._percent = -1
        self._open_line = False

    def __call__(self, done: int, total: int, what: str) -> None:
        percent = 100 * done // total if total else 100
        if self._terminal:
            now = time.monotonic()
            if percent < 100 and now - self._drawn_at < _REDRAW_S:
                return
            self._drawn_at = now
            filled = _WIDTH * percent // 100
            bar = "#" * filled + "-" * (_WIDTH - filled)
            text = f"{self._label} [{bar}] {percent:3d}% {self._show(done)} of {self._show(total)} {what}"
            say(f"\r{text[:110]:<110}", self._file)
            self._open_line = True
        elif percent // 10 > self._percent // 10 or (percent == 100 != self._percent):
            say(f"{self._label}: {percent}% of {self._show(total)}\n", self._file)
        self._percent = percent

    def close(self) -> None:
        if self._open_line:
            say("\n", self._file)
            self._open_line = False
