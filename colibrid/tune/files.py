"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from colibrid.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def remove_file(path: Path) -> None:
    """Harmless if it is not there. ConfigError: it cannot be removed."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be removed: {error.strerror}; choose another folder with --out") from error


def replace_file(path: Path, data: bytes) -> None:
    """Writes `path` anew in one step. ConfigError: it cannot be written."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_bytes(data)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {error.strerror}; choose another folder with --out") from error
