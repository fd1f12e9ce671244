"""What `colibrid doctor` finds: one line each, and what to do about it. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

from colibrid.errors import ColibridError, ConfigError, ModelError

Level = Literal["ok", "warning", "error"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one check. `fix` is there unless all is well."""

    check: str
    level: Level
    text: str
    fix: str | None = None
    configuration: bool = False  # an error of configuration or model, not of the host


def ok(check: str, text: str) -> Finding:
    """All is well."""
    return Finding(check=check, level="ok", text=text)


def warning(check: str, text: str, fix: str) -> Finding:
    """Serving works, but slower or less safely than it could."""
    return Finding(check=check, level="warning", text=text, fix=fix)


def error(check: str, text: str, fix: str) -> Finding:
    """Serving will not work."""
    return Finding(check=check, level="error", text=text, fix=fix)


def refused(check: str, reason: ColibridError) -> Finding:
    """Serving will not work: what it would say. In our messages a semicolon stands before the remedy."""
    lines = " ".join(line.strip() for line in str(reason).splitlines())
    text, semicolon, fix = lines.partition("; ")
    return Finding(
        check=check,
        level="error",
        text=text if semicolon else lines,
        fix=fix if semicolon else "correct it; docs/reference/configuration.md describes the settings",
        configuration=isinstance(reason, ConfigError | ModelError),
    )
