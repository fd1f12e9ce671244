"""What to tell the engine next, as data. Pure: no clock, no I/O, and nothing that it is given changes.

A Plan holds changes only. Requests are placed first come first served: a request that does not fit the KV memory
that is left waits, and those behind it wait with it, so that a long request cannot be starved by short ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from colibrid.engine.abi import CommandKind
from colibrid.engine.channel import Command
from colibrid.engine.spec import run_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from colibrid.batch.request import GenerateRequest

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


@dataclass(frozen=True, slots=True)
class Waiting(Generic[Owner]):
    """A request in the queue."""

    owner: Owner
    prompt_tokens: int
    run_tokens: int  # KV tokens that it will reserve
    masks: tuple[int, ...] = ()  # output positions whose masks are there already


@dataclass(frozen=True, slots=True)
class Placement(Generic[Owner]):
    """One request's place."""

    waiting: Waiting[Owner]
    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class Plan(Generic[Owner]):
    """Slots to close, requests to open and masks to use, to be pushed together."""

    closes: tuple[Close, ...]
    placements: tuple[Placement[Owner], ...]
    masks: tuple[Mask, ...]

    def __bool__(self) -> bool:
        return bool(self.closes or self.placements or self.masks)

    def commands(self) -> list[Command]:
        """Masks, closes, then all opens, then what these want: the engine reads them at one step boundary."""
        return [
            *(Command(CommandKind.SET, slot, generation, position) for slot, generation, position in self.masks),
            *(Command(CommandKind.CLOSE, slot, generation) for slot, generation in self.closes),
            *(Command(CommandKind.OPEN, place.slot, place.generation) for place in self.placements),
            *(
                Command(CommandKind.PREFILL, place.slot, place.generation, 0, place.waiting.prompt_tokens)
                for place in self.placements
            ),
            *(
                Command(CommandKind.SET, place.slot, place.generation, position)
                for place in self.placements
                for position in place.waiting.masks
            ),
        ]


def make_plan(
    queue: Iterable[Waiting[Owner]],
    free: Sequence[FreeSlot],
    kv_free_tokens: int,
    closes: Sequence[Close] = (),
    masks: Sequence[Mask] = (),
) -> Plan[Owner]:
    """Place the head of the queue, one after another, while a slot and KV memory are left for it."""
    placements: list[Placement[Owner]] = []
    left = kv_free_tokens
    for waiting, place in zip(queue, free, strict=False):
        if waiting.run_tokens > left:
            break
        left -= waiting.run_tokens
        placements.append(Placement(waiting, place.slot, place.generation))
    return Plan(tuple(closes), tuple(placements), tuple(masks))


def reserved_tokens(request: GenerateRequest) -> int:
    """KV tokens that a request reserves when it opens: its prompt and all that it may generate."""
    return run_tokens(len(request.prompt_ids) + request.max_tokens)
