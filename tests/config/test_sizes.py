"""colibrid.config.sizes."""

from __future__ import annotations

import pytest

from colibrid.config.sizes import format_bytes, parse_bytes
from colibrid.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "count"),
    [(0, 0), (4096, 4096), ("4096", 4096), ("64KiB", 65536), ("2 MiB", 2 << 20), ("80GiB", 80 << 30),
     ("1.5GiB", 3 << 29), ("1GB", 10**9), ("7B", 7), (" 1TiB ", 1 << 40)],
)  # fmt: skip
def test_sizes_are_read(text: str | int, count: int) -> None:
    """A number with or without a binary or decimal unit gives its bytes."""
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "1 gib", "1QiB", "1e3", "0.3B", "64KiB!", True, -1, 1 << 63, "9" * 40]
)
def test_anything_else_is_refused(text: str | int) -> None:
    """Unknown units, signs, parts of a byte and numbers that do not fit raise ConfigError."""
    with pytest.raises(ConfigError):
        parse_bytes(text)


def test_format_is_short() -> None:
    """Sizes for people carry three digits or so and a binary unit."""
    assert [format_bytes(count) for count in (0, 1023, 1024, 3 << 29, 20 << 40)] == [
        "0 B", "1023 B", "1.00 KiB", "1.50 GiB", "20.00 TiB",
    ]  # fmt: skip
