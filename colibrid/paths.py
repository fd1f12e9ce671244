"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path

from colibrid.errors import ConfigError


def user_path(text: str) -> Path:
    """With `~` as a shell has it: of a user that there is not it stays. ConfigError: no path of any system."""
    if "\0" in text:
        raise ConfigError(f"{text!r}: a path cannot hold a NUL character; leave it out")
    return Path(os.path.expanduser(text))  # noqa: PTH111 (Path.expanduser raises for users that there are not)
