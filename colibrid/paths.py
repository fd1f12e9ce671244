"""Paths as users write them, and what their files hold."""

from __future__ import annotations

import os
from pathlib import Path

from colibrid.errors import ConfigError


def user_path(text: str) -> Path:
    """With `~` as a shell has it: of a user that there is not it stays. ConfigError: no path of any system."""
    if "\0" in text:
        raise ConfigError(f"{text!r}: a path cannot hold a NUL character; leave it out")
    return Path(os.path.expanduser(text))  # noqa: PTH111 (Path.expanduser raises for users that there are not)


def read_bounded(path: Path, most: int, what: str, remedy: str) -> bytes:
    """The whole file, also where it is a device without an end. ConfigError, with `what` it is and the remedy: it cannot be
    read, or holds more than `most` bytes.
    """
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise ConfigError(f"{what}: cannot be read: {error.strerror}; {remedy}") from error
    if len(data) > most:
        raise ConfigError(f"{what}: more than {most} bytes; {remedy}")
    return data
