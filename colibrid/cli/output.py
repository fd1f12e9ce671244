"""Files that a verb leaves with its result."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from colibrid.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def check_outputs(*paths: Path | None) -> None:
    """Before the work, whose result would be lost. ConfigError: a file has no folder, or one that is closed to us."""
    for path in filter(None, paths):
        if path.is_dir():
            raise ConfigError(f"{path} cannot be written: it is a folder; name a file in it")
        if not path.parent.is_dir():
            raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}; make it")
        if not os.access(path.parent, os.W_OK):
            raise ConfigError(f"{path} cannot be written: no permission in {path.parent}; choose another place")


def write_output(path: Path, data: bytes) -> None:
    """In place, as the path may be a device. ConfigError: it cannot be written."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; choose another place") from error
