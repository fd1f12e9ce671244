"""Words for people that must never stop a program: into full pipes, closed descriptors and full disks as well."""

from __future__ import annotations

import io
import os
import select
from typing import IO


def plain(text: str) -> str:
    """On one line and without anything that a terminal obeys: texts of servers, files and models may hold what they like."""
    return text if text.isprintable() else "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def say(text: str, file: IO[str]) -> None:
    """Write if somebody takes it now; otherwise it is lost. For texts shorter than a page, which pipes take whole."""
    try:
        descriptor = file.fileno()
    except (io.UnsupportedOperation, ValueError):  # no file of the system, or a closed one
        if not file.closed:
            file.write(text)
        return
    say_to(text, descriptor)


def say_to(text: str, descriptor: int) -> None:
    """As say, to a descriptor."""
    poll = select.poll()
    try:
        poll.register(descriptor, select.POLLOUT)
        ready = poll.poll(0)
        if ready and ready[0][1] & select.POLLOUT:
            os.write(descriptor, text.encode("utf-8", "backslashreplace"))
    except OSError:
        return
