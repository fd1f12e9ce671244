"""Byte sizes as people write them: 65536, "64KiB", "80GiB", "1.5 GB". Pure."""

from __future__ import annotations

import re

from colibrid.errors import ConfigError

MAX_BYTES = (1 << 63) - 1
_UNITS = {
    "": 1, "B": 1,
    "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
    "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"([0-9]{1,19})(?:\.([0-9]{1,9}))? ?([A-Za-z]{0,3})")


def parse_bytes(value: str | int) -> int:
    """Bytes of `value`: a whole number, or a number with one of the units B, KiB … TiB, KB … TB.

    ConfigError when it is not such a text, negative, not a whole number of bytes or over 2**63 - 1.
    """
    if isinstance(value, bool):
        raise ConfigError(f"{value!r} is not a size; write it like 64KiB, 2MiB or 80GiB")
    if isinstance(value, int):
        return _bounded(value, value)
    match = _SIZE.fullmatch(value.strip())
    if match is None or match[3] not in _UNITS:
        raise ConfigError(f"{value!r} is not a size; write it like 64KiB, 2MiB or 80GiB")
    unit = _UNITS[match[3]]
    fraction = match[2] or ""
    numerator = int(match[1] + fraction) * unit
    denominator: int = 10 ** len(fraction)
    if numerator % denominator:
        raise ConfigError(f"{value!r} is not a whole number of bytes; use a smaller unit")
    return _bounded(numerator // denominator, value)


def format_bytes(count: int) -> str:
    """`count` bytes for people: "312 B", "64.0 KiB", "1.50 GiB"."""
    if count < 1024:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.2f} {unit}" if size < 10 else f"{size:.1f} {unit}"
    return f"{size / 1024:.2f} TiB"


def _bounded(count: int, shown: str | int) -> int:
    if not 0 <= count <= MAX_BYTES:
        raise ConfigError(f"{shown!r} is outside 0 to {MAX_BYTES} bytes; choose a smaller size")
    return count
