"""What is told from an address alone."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """True iff binding to `host` reaches only this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
