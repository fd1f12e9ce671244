"""A consumer of one generation of the fake engine, for random histories."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fake_engine import expected_tokens

from colibrid.errors import EngineFaultError

if TYPE_CHECKING:
    from colibrid.batch.generation import LiveGeneration


class Client:
    """Reads a generation to its end, and knows what must have come out."""

    def __init__(self, generation: LiveGeneration, reads: bool) -> None:
        self.generation = generation
        self.tokens: list[int] = []
        self.faulted = False
        self.cancelled = False
        self.task = asyncio.ensure_future(self._read()) if reads else None

    def read_now(self) -> None:
        if self.task is None:
            self.task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        try:
            async for records in self.generation:
                assert records
                self.tokens += [record.token for record in records]
        except EngineFaultError:
            self.faulted = True

    def check(self) -> None:
        """What has come is the beginning of what must come; all of it if there is a result."""
        request = self.generation.request
        expected = expected_tokens(
            request.prompt_ids, request.sampling.seed, request.max_tokens, self.generation.choice
        )
        assert self.tokens == expected[: len(self.tokens)]
        if self.task is not None and self.task.done():
            self.task.result()  # no other exception
            ended_well = self.generation.result is not None
            assert ended_well or self.faulted or self.cancelled
            if ended_well:
                assert self.tokens == expected
                assert not self.faulted
