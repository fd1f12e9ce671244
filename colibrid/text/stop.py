"""Finds stop strings in text that arrives in pieces, and never gives out any part of one. Pure; no I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class StopMatcher:
    """Holds back just enough text that a stop string can never leak.

    The first stop string to be complete wins; of two complete at the same character the longer. The outcome does
    not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`include`: the stop string found is part of the text."""
        self._stops = tuple(dict.fromkeys(stops))
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str, *, armed: bool = True) -> str:
        """Takes more text, returns what may be given out. Once `matched` is set, no more text may come.

        `armed=False` (fewer than `min_tokens` so far): no stop string may end in this piece.
        """
        assert self.matched is None, "text after a stop string"
        if not self._stops:
            return piece
        searched = len(self._held)
        self._held += piece
        if armed:
            found = self._first_complete(searched)
            if found is not None:
                return self._end(*found)
        return self._release(self._undecided())

    def flush(self) -> str:
        """The text still held, when no more comes and nothing matched."""
        return self._release(0)

    def _first_complete(self, searched: int) -> tuple[int, str] | None:
        """(start, stop) of the match that ends first; it must end after `searched`, where the new piece begins."""
        best: tuple[int, int, str] | None = None  # end, start, stop
        for stop in self._stops:
            start = self._held.find(stop, max(0, searched - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _end(self, start: int, stop: str) -> str:
        self.matched = stop
        text = self._held[: start + len(stop) if self._include else start]
        self._held = ""
        return text

    def _undecided(self) -> int:
        """Length of the longest tail that is the beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for count in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:count]):
                    longest = count
                    break
        return longest

    def _release(self, keep: int) -> str:
        cut = len(self._held) - keep
        text = self._held[:cut]
        self._held = self._held[cut:]
        return text
