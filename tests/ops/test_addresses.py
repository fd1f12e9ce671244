"""colibrid.ops.addresses."""

from __future__ import annotations

from colibrid.ops.addresses import is_loopback


def test_loopback() -> None:
    """Loopback addresses of both families and localhost are told from others."""
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "localhost.example", "")))
