"""What the engine's shared KV runs hold, so that a prompt that begins alike need not be computed again. Pure.

        open              publish                leave, last user          drop
  free ──────▶ computing ─────────▶ published ◀────────────────────▶ idle ──────▶ free
                   │ leave: ended before its prompt was complete     use  ▲
                   └──────────────────────────────▶ free                  └ the least recently used goes first

A holding may be used by whoever has its scope: that is the tenant and the expert policies, which the bits of K and V
depend on. Only whole token ids decide what is alike. A slot's users are its writer, who generates into it, slots that
see it as long as they last, and slots that copy from it while they open.
Invariant: a holding that is not published has a user; one that is holds a token for each of its ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator

HELD_TOKENS = 16  # shorter prompts, and beginnings that are shorter, are computed faster than looked up
_ID_BYTES = 4


class Prefix(NamedTuple):
    """The first `tokens` positions of a shared run."""

    run: int
    tokens: int


@dataclass(slots=True)
class Holding:
    """One shared run; changed by its table only."""

    run: int
    scope: Hashable | None  # None: for the choices of one request alone
    ids: bytes  # int32 token ids of its positions
    capacity: int  # KV tokens that it takes
    tokens: int = 0  # positions that others may see; 0 until published
    users: int = 1
    used: int = 0  # the larger, the more recently
    released: bool = False  # the engine was told to forget it, so nobody new may use it


class Holdings:
    """All shared runs of one engine."""

    def __init__(self, runs: int) -> None:
        """`runs`: how many ids there are, from 1 on."""
        self._runs = runs
        self._holdings: dict[int, Holding] = {}
        self._clock = 0

    def __iter__(self) -> Iterator[Holding]:
        return iter(self._holdings.values())

    def __getitem__(self, run: int) -> Holding:
        return self._holdings[run]

    @property
    def capacity(self) -> int:
        """KV tokens that all take together."""
        return sum(holding.capacity for holding in self)

    def free(self) -> list[int]:
        """Ids without a run, lowest first."""
        return [run for run in range(1, self._runs + 1) if run not in self._holdings]

    def idle(self) -> list[Holding]:
        """Holdings that nobody uses, least recently used first."""
        return sorted((holding for holding in self if not holding.users), key=lambda holding: holding.used)

    def match(self, scope: Hashable, ids: bytes, skip: Collection[int] = ()) -> Prefix | None:
        """The longest beginning of `ids` that is held, but for the last token, which somebody has to compute."""
        best = None
        for holding in sorted(self, key=lambda holding: -holding.used):
            usable = holding.tokens and not holding.released and holding.run not in skip
            if holding.scope is None or holding.scope != scope or not usable:
                continue
            tokens = min(_alike(holding.ids, ids), len(ids) // _ID_BYTES - 1)
            if tokens >= HELD_TOKENS and (best is None or tokens > best.tokens):
                best = Prefix(holding.run, tokens)
        return best

    def covered(self, run: int) -> list[int]:
        """Idle holdings of the same scope that hold nothing which `run` does not hold."""
        whole = self._holdings[run]
        return [other.run for other in self if not other.users and _covers(whole, other)]

    def is_covered(self, run: int) -> bool:
        """Does another holding of the same scope hold all that `run` holds?"""
        return any(_covers(other, self._holdings[run]) for other in self)

    # --------------------------------------------------------------- changes

    def open(self, run: int, scope: Hashable | None, ids: bytes, capacity: int) -> None:
        """A slot begins to compute the prompt `ids` into a free run; it is the first user."""
        assert 1 <= run <= self._runs, f"run {run} of {self._runs}"
        assert run not in self._holdings, f"run {run} is held"
        self._holdings[run] = Holding(run, scope, ids, capacity)
        self._touch(run)

    def publish(self, run: int) -> None:
        """The prompt is computed."""
        holding = self._holdings[run]
        assert holding.tokens == 0, f"run {run} is published"
        holding.tokens = len(holding.ids) // _ID_BYTES
        self._touch(run)

    def grow(self, run: int, ids: bytes) -> None:
        """Positions behind the prompt are computed and stay."""
        holding = self._holdings[run]
        assert holding.tokens * _ID_BYTES == len(holding.ids), f"run {run} grows in order"
        holding.ids += ids
        holding.tokens = len(holding.ids) // _ID_BYTES

    def use(self, run: int) -> None:
        """One more user."""
        self._holdings[run].users += 1
        self._touch(run)

    def leave(self, run: int) -> bool:
        """One user fewer. True: nobody can ever use the run again; drop it."""
        holding = self._holdings[run]
        assert holding.users, f"run {run} has no user"
        holding.users -= 1
        self._touch(run)
        return not holding.users and (holding.released or holding.scope is None or not holding.tokens)

    def drop(self, run: int) -> None:
        """The run is given back; its id is free."""
        assert not self._holdings[run].users, f"run {run} is in use"
        del self._holdings[run]

    def clear(self) -> None:
        """The engine is gone."""
        self._holdings.clear()

    def _touch(self, run: int) -> None:
        self._clock += 1
        self._holdings[run].used = self._clock

    def check(self) -> None:
        """AssertionError if the invariant is broken."""
        for run, holding in self._holdings.items():
            assert holding.run == run
            assert 1 <= run <= self._runs
            assert holding.users or holding.tokens, f"run {run} is neither used nor published"
            assert holding.tokens in (0, len(holding.ids) // _ID_BYTES)
            assert holding.capacity >= holding.tokens


def _covers(whole: Holding, part: Holding) -> bool:
    if whole is part or whole.scope != part.scope or whole.released or not (whole.tokens and part.tokens):
        return False
    return whole.ids.startswith(part.ids)


def _alike(held: bytes, ids: bytes) -> int:
    """How many token ids both begin with. Compares pieces at once: prompts are long."""
    count = min(len(held), len(ids)) // _ID_BYTES
    low, high = 0, count + 1  # the first `low` are alike, the first `high` are not, or there are fewer
    step = min(HELD_TOKENS, count)
    while high - low > 1:
        middle = low + step if low + step < high else (low + high) // 2
        if held.startswith(ids[low * _ID_BYTES : middle * _ID_BYTES], low * _ID_BYTES):
            low, step = middle, step * 2
        else:
            high = middle
    return low
