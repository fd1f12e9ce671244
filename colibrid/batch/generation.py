"""One request on its way through the scheduler: what has arrived, who waits for it, and how it ended.

The scheduler writes, one consumer reads; both on the event loop.
"""

from __future__ import annotations

import asyncio
from array import array
from typing import TYPE_CHECKING, Protocol, Self

import msgspec

from colibrid.batch.request import TokenRecord
from colibrid.batch.translate import token_record
from colibrid.engine.channel import read_records

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from types import TracebackType

    from colibrid.batch.queue import Group
    from colibrid.batch.request import GenerateRequest, GenerateResult, Switch
    from colibrid.errors import RequestError


class GenerationOwner(Protocol):
    """The scheduler, as a generation sees it."""

    def cancelled(self, generation: LiveGeneration) -> None:
        """Its consumer wants no more."""
        ...

    def masked(self, generation: LiveGeneration, position: int, mask: bytes) -> None:
        """Its consumer allows ids of an output position."""
        ...

    def stopped(self, generation: LiveGeneration) -> None:
        """Its consumer wants no more, but to know what was done."""
        ...

    def consumed(self, generation: LiveGeneration) -> None:
        """Its consumer has taken all that had arrived."""
        ...


class Place(msgspec.Struct, frozen=True):
    """Where a placed generation runs."""

    slot: int
    generation: int


class Clock(msgspec.Struct):
    """Seconds of the event loop's clock; None = not yet."""

    submitted: float
    placed: float | None = None  # commands pushed
    first: float | None = None  # first token, or the end

    @property
    def waited(self) -> float:
        """From submission to the first token."""
        assert self.first is not None, "its prompt is complete"
        return self.first - self.submitted


class LiveGeneration:
    """Implements interfaces.Generation."""

    __slots__ = (
        "__weakref__",
        "_ended",
        "_error",
        "_iterated",
        "_masks",
        "_owner",
        "_pace_s",
        "_prompt_records",
        "_raw",
        "_waiter",
        "advanced",
        "choice",
        "clock",
        "consumed",
        "due",
        "early_masks",
        "group",
        "last_token",
        "lead",
        "place",
        "read_prompt",
        "request",
        "result",
        "switches",
        "tokens",
    )

    def __init__(self, request: GenerateRequest, owner: GenerationOwner, now: float, choice: int = 0) -> None:
        self.request = request
        self.choice = choice
        self.group: Group | None = None  # with which it was queued last; until it ends
        self.lead: LiveGeneration | None = None  # another choice that computed the prompt for it
        self.read_prompt: Callable[[], tuple[TokenRecord, ...]] = tuple  # set when the prompt is complete
        self.result: GenerateResult | None = None
        self.clock = Clock(now)
        self.place: Place | None = None  # while it has a slot
        self.tokens = array("i")  # that have arrived
        self.last_token = 0.0  # when the last one did, on time.monotonic; 0: none has
        self.consumed = 0  # records that the consumer has taken
        self.advanced = 0  # records that the engine knows as read
        self.switches: list[Switch] = []  # experts that were replaced since its first position
        self.due = 0.0  # of the loop's clock: before it nobody is woken for tokens
        self.early_masks: dict[int, bytes] = {}  # submitted before it had a slot, by output position
        self._masks = 0  # submitted
        self._pace_s = 0.0
        self._owner = owner
        self._raw = bytearray()  # records of tokens that were not consumed: kept small until they are read
        self._prompt_records: tuple[TokenRecord, ...] | None = None
        self._error: RequestError | None = None
        self._ended = False
        self._iterated = False
        self._waiter: asyncio.Future[None] | None = None

    # ------------------------------------------------------------ scheduler

    @property
    def ended(self) -> bool:
        """Finished, failed or cancelled."""
        return self._ended

    @property
    def received(self) -> int:
        """Records that have arrived."""
        return len(self.tokens)

    def move(self, owner: GenerationOwner) -> None:
        """It waits at another scheduler from now on."""
        self._owner = owner

    def add(self, token: int, raw: bytes = b"") -> None:
        """A token has arrived, `raw`: with its record, where log-probabilities are asked for; the consumer sees it after
        wake().
        """
        self._raw += raw
        self.tokens.append(token)

    def finish(self, result: GenerateResult) -> None:
        """It ended normally."""
        self.result = result
        self._end()

    def fail(self, error: RequestError) -> None:
        """It cannot go on; the consumer gets what has arrived, then the error."""
        self._error = error
        self._end()

    def wake_at(self, now: float) -> None:
        """Let the consumer look, for the last time until the next beat of its pace or its end.

        All of one pace share their beats, so that their wakings, and what they write, come together.
        """
        pace = self._pace_s
        self.due = now - now % pace + pace if pace else now
        self.wake()

    def wake(self) -> None:
        """Let the consumer look."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _end(self) -> None:
        self._ended = True
        self.place = None
        self.group = None  # which has this in its list: only a full collection would find the two
        self.wake()

    # ------------------------------------------------------------- consumer

    @property
    def prompt_records(self) -> tuple[TokenRecord, ...]:
        """One per prompt token, if asked for; not before the first token. Made when first asked for, by any thread."""
        if self._prompt_records is None:
            self._prompt_records = self.read_prompt()
        return self._prompt_records

    def cancel(self) -> None:
        """Stop and release the slot; the iteration ends without a result. Harmless when already ended."""
        if not self._ended:
            self._owner.cancelled(self)
            self._end()

    def submit_mask(self, position: int, mask: bytes) -> None:
        """Allow the ids of the next output position without a mask. See interfaces.Generation."""
        if self._ended:
            return
        if not self.request.masked:
            raise ValueError("the request was not submitted as masked")
        if position != self._masks or position > self.received + 1:
            raise ValueError(f"a mask for output position {position} after {self._masks} masks, {self.received} tokens")
        self._owner.masked(self, position, mask)
        self._masks += 1

    def pace(self, interval_s: float) -> None:
        """See interfaces.Generation."""
        self._pace_s = interval_s

    def stop(self) -> None:
        """The consumer has all that it wants: release the slot; `result` then says what was done, where that is known."""
        if not self._ended:
            self._owner.stopped(self)

    def __aiter__(self) -> AsyncIterator[list[TokenRecord]]:
        if self._iterated:
            raise RuntimeError("a generation can be iterated once")
        self._iterated = True
        return self._batches()

    async def _batches(self) -> AsyncIterator[list[TokenRecord]]:
        try:
            while True:
                if len(self.tokens) > self.consumed:
                    batch = self._take()
                    self.consumed += len(batch)
                    self._owner.consumed(self)
                    yield batch
                elif self._error is not None:
                    raise self._error
                elif self._ended:
                    return
                else:
                    self._waiter = asyncio.get_running_loop().create_future()
                    await self._waiter
        finally:
            self.cancel()

    def _take(self) -> list[TokenRecord]:
        """All that has arrived."""
        tokens, wanted = self.tokens[self.consumed :], self.request.logprobs
        if wanted is None:
            return [TokenRecord(token) for token in tokens]
        raw, self._raw = self._raw, bytearray()
        return [token_record(token, one, wanted) for token, one in zip(tokens, read_records(raw), strict=True)]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
