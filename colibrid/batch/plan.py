"""What to tell the engine next, as data. Pure: no clock, no I/O, and nothing that it is given changes.

A Plan holds changes only. Requests are placed in the order of the queue, all choices of one at once or none: a request
that does not fit the slots and the KV memory that are left waits, and those behind it wait with it, so that a long
request cannot be starved by short ones. Holdings that nobody uses make room, least recently used first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from colibrid.batch.holdings import HELD_TOKENS, Holdings, Prefix
from colibrid.engine.abi import CommandKind
from colibrid.engine.channel import Command
from colibrid.engine.spec import run_tokens

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

Owner = TypeVar("Owner")


class FreeSlot(NamedTuple):
    """A slot that can be opened, and the generation that its next owner has."""

    slot: int
    generation: int


class Close(NamedTuple):
    """A slot whose owner wants to end."""

    slot: int
    generation: int


class Mask(NamedTuple):
    """An output position of a placed request whose mask is written."""

    slot: int
    generation: int
    position: int


class Opening(NamedTuple):
    """A slot that is to take its request block, and the output positions whose masks are there already."""

    slot: int
    generation: int
    prompt_tokens: int
    masks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Changes:
    """What is due in any case."""

    closes: tuple[Close, ...] = ()
    masks: tuple[Mask, ...] = ()
    releases: tuple[int, ...] = ()  # runs that the engine may forget
    openings: tuple[Opening, ...] = ()  # of slots that were reserved


@dataclass(frozen=True, slots=True)
class Waiting(Generic[Owner]):
    """A request in the queue: one prompt, and so many choices to generate from it."""

    owner: Owner
    prompt_ids: bytes  # int32
    max_tokens: int
    choices: int = 1
    scope: Hashable | None = None  # None: other requests do not share its prompt
    uses_prefix: bool = True  # False: every position of the prompt is to be computed
    masks: tuple[tuple[int, ...], ...] = ()  # by choice: output positions whose masks are there already

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids) // 4

    @property
    def shares(self) -> bool:
        """Choices behind the first one see its prompt, and compute the last token of it themselves."""
        return self.choices > 1 and self.prompt_tokens > 1

    @property
    def publishes(self) -> bool:
        return self.shares or (self.scope is not None and self.prompt_tokens >= HELD_TOKENS)

    @property
    def lead_tokens(self) -> int:
        """KV tokens of the first choice."""
        return run_tokens(self.prompt_tokens + self.max_tokens)

    @property
    def other_tokens(self) -> int:
        """KV tokens of each other choice: the last token of the prompt, and its own output."""
        return run_tokens(1 + self.max_tokens)

    @property
    def tokens(self) -> int:
        """KV tokens of all."""
        return reserved_tokens(self.prompt_tokens, self.max_tokens, self.choices)


@dataclass(frozen=True, slots=True)
class Placement(Generic[Owner]):
    """One request's place: a slot for each choice."""

    waiting: Waiting[Owner]
    slots: tuple[FreeSlot, ...]
    run: int  # that the first choice publishes; 0: none
    prefix: Prefix | None

    @property
    def openings(self) -> list[Opening]:
        """What opens now: the first choice, or all that compute the prompt themselves."""
        waiting = self.waiting
        count = 1 if waiting.shares else waiting.choices
        masks = waiting.masks or ((),) * waiting.choices
        return [Opening(*self.slots[i], waiting.prompt_tokens, masks[i]) for i in range(count)]


@dataclass(frozen=True, slots=True)
class Plan(Generic[Owner]):
    """Changes that are pushed together."""

    changes: Changes
    releases: tuple[int, ...]  # beside those of `changes`: runs that make room
    placements: tuple[Placement[Owner], ...]

    def __bool__(self) -> bool:
        due = self.changes
        return bool(self.placements or due.closes or due.masks or due.releases or due.openings)

    def commands(self) -> list[Command]:
        """What ends, then what makes room, then all opens, then what these want: read at one step boundary."""
        due = self.changes
        openings = [*due.openings, *(opening for place in self.placements for opening in place.openings)]
        return [
            *(Command(CommandKind.SET, slot, generation, position) for slot, generation, position in due.masks),
            *(Command(CommandKind.CLOSE, slot, generation) for slot, generation in due.closes),
            *(Command(CommandKind.RELEASE_RUN, 0, 0, run) for run in (*due.releases, *self.releases)),
            *(Command(CommandKind.OPEN, one.slot, one.generation) for one in openings),
            *(Command(CommandKind.PREFILL, one.slot, one.generation, 0, one.prompt_tokens) for one in openings),
            *(
                Command(CommandKind.SET, one.slot, one.generation, position)
                for one in openings
                for position in one.masks
            ),
        ]


class _Room:
    """Slots, run ids and KV memory while a plan is made."""

    def __init__(self, free: Sequence[FreeSlot], holdings: Holdings, kv_free_tokens: int) -> None:
        self._slots = list(free)
        self._runs = holdings.free()
        self._left = kv_free_tokens
        self._holdings = holdings
        self._wanted: set[int] = set()  # runs that a placement of this plan reads
        self.evicted: list[int] = []

    def place(self, waiting: Waiting[Owner]) -> Placement[Owner] | None:
        """Take what the request needs; None, and nothing is taken, if it does not fit."""
        if waiting.choices > len(self._slots):
            return None
        found = None
        if waiting.uses_prefix and waiting.scope is not None:
            found = self._holdings.match(waiting.scope, waiting.prompt_ids, self.evicted)
        for prefix in (found, None) if found else (None,):
            evicted = self._evicted_for(waiting, prefix)
            if evicted is not None:
                return self._take(waiting, prefix, evicted)
        return None

    def _evicted_for(self, waiting: Waiting[Owner], prefix: Prefix | None) -> list[int] | None:
        """The runs that have to go; None if that is not enough."""
        kept = {*self.evicted, *self._wanted, *((prefix.run,) if prefix else ())}
        left, runs = self._left, len(self._runs)
        evicted: list[int] = []
        idle = (holding for holding in self._holdings.idle() if holding.run not in kept)
        while left < waiting.tokens or runs < waiting.publishes:
            victim = next(idle, None)
            if victim is None:
                return None
            left, runs = left + victim.capacity, runs + 1
            evicted.append(victim.run)
        return evicted

    def _take(self, waiting: Waiting[Owner], prefix: Prefix | None, evicted: list[int]) -> Placement[Owner]:
        self.evicted += evicted
        self._runs += evicted
        self._left += sum(self._holdings[run].capacity for run in evicted) - waiting.tokens
        slots, self._slots = self._slots[: waiting.choices], self._slots[waiting.choices :]
        if prefix is not None:
            self._wanted.add(prefix.run)
        return Placement(waiting, tuple(slots), self._runs.pop(0) if waiting.publishes else 0, prefix)


def make_plan(
    queue: Iterable[Waiting[Owner]],
    free: Sequence[FreeSlot],
    holdings: Holdings,
    kv_free_tokens: int,
    due: Changes | None = None,
) -> Plan[Owner]:
    """Place the head of the queue, one request after another, while slots and KV memory are left for it."""
    room = _Room(free, holdings, kv_free_tokens)
    placements: list[Placement[Owner]] = []
    for waiting in queue:
        place = room.place(waiting)
        if place is None:
            break
        placements.append(place)
    return Plan(due or Changes(), tuple(room.evicted), tuple(placements))


def reserved_tokens(prompt_tokens: int, max_tokens: int, choices: int) -> int:
    """KV tokens that a request reserves: its prompt once, and all that each choice may generate."""
    return run_tokens(prompt_tokens + max_tokens) + (choices - 1) * run_tokens(1 + max_tokens)
