"""How far a piece of work is: what is told while it goes on."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]  # with what is done, and all


def silent(_done: int, _total: int) -> None:
    """Where nobody asks."""
