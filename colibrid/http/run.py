"""Runs the generations of one job and turns their tokens into text."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from colibrid.errors import EngineFaultError
from colibrid.text.output import OutputText
from colibrid.text.reply import Reply

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from colibrid.batch.interfaces import Generation
    from colibrid.batch.request import ExpertUsage, FinishReason, TokenRecord
    from colibrid.http.params import Job
    from colibrid.text.structured_masks import Masker
    from colibrid.text.tokenizer import Tokenizer
    from colibrid.text.tools_reader import Event


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What is known of one choice when it has ended."""

    finish_reason: FinishReason | Literal["tool_calls"]
    prompt_tokens: int  # 0 for the choices behind the first of a prompt, which has them
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    experts: ExpertUsage | None = None
    timing_ms: tuple[float, float, float] | None = None  # queue, prefill, decode


@dataclass(slots=True)
class Delta:
    """What is new in one choice: text, the tokens behind it, and where in the text each token begins, where that counts."""

    text: str
    records: Sequence[TokenRecord] = ()
    offsets: Sequence[int] = ()
    events: Sequence[Event] = ()  # the text taken apart, where the job asks for it


class Choice:
    """One generation of a job, read once. `outcome` is set when `feed` gives its last delta."""

    __slots__ = (
        "_first",
        "_generation",
        "_logprobs",
        "_masker",
        "_plain",
        "_reply",
        "_text",
        "_watches",
        "index",
        "outcome",
        "prompt",
        "split",
    )

    def __init__(self, number: int, generation: Generation, job: Job, tokenizer: Tokenizer) -> None:
        """`number`: among all generations of the job."""
        self.index = number  # in the answer
        self.prompt = job.prompts[number // job.best_of]
        self.split = job.reply is not None  # deltas have events
        self._first = number % job.best_of == 0
        self._logprobs = 0.0  # sum over the text's tokens, where they are known
        self.outcome: Outcome | None = None
        self._generation = generation
        self._text = OutputText(tokenizer, job.output)
        self._reply = None if job.reply is None else Reply(job.reply)
        self._watches = bool(job.output.stops) or self._reply is not None  # the text may be over before the tokens
        self._plain = not self._watches and generation.request.logprobs is None  # nobody asks where tokens begin
        self._masker = job.maskers[number] if job.maskers else None
        if self._masker is not None:
            generation.submit_mask(0, self._masker.first)

    @property
    def tokens(self) -> tuple[int, int]:
        """Of the prompt, and of the text so far."""
        return len(self.prompt.ids), self._text.tokens

    @property
    def mean_logprob(self) -> float:
        """Of the tokens so far; 0 without any."""
        return self._logprobs / max(self._text.tokens, 1)

    @property
    def prompt_records(self) -> tuple[TokenRecord, ...]:
        """Log-probabilities of the prompt; complete from the first delta on."""
        return self._generation.prompt_records

    def pace(self, interval_s: float) -> None:
        """After the next delta, those of one such interval may come as one; 0: each as it comes.

        Of no effect where a token may end the text, or decides which ones may follow: then each counts.
        """
        if self._masker is None and not self._watches:
            self._generation.pace(interval_s)

    async def feed(self, use: Callable[[Delta], Awaitable[None] | None]) -> None:
        """Gives `use` what arrives, and waits for what it returns, if anything; the last delta is the text that was held
        back, often none. A call, as each coroutine more that waits for tokens is memory that has left the caches meanwhile.

        Raises what the generation raises.
        """
        async for records in self._generation:
            delta = self._take(records)
            over = self._watches and self._over
            if over:
                self._generation.stop()
                self._end_reply(delta)
                self.outcome = self._outcome()
            elif self._masker is not None:
                await self._allow(records, self._masker)
            busy = use(delta)
            if busy is not None:
                await busy
            if over:
                return
        rest = Delta(self._text.finish())
        if self._reply is not None:
            rest.events = self._reply.push(rest.text)
        self._end_reply(rest)
        self.outcome = self._outcome()
        busy = use(rest)
        if busy is not None:
            await busy

    async def _allow(self, records: Sequence[TokenRecord], masker: Masker) -> None:
        """The mask of the next position, before anything waits for the client."""
        request, tokens = self._generation.request, [record.token for record in records]
        ended = self._text.tokens == request.max_tokens or not set(tokens).isdisjoint(request.stop_token_ids)
        if not ended:
            self._generation.submit_mask(self._text.tokens, await masker.after(tokens))

    def _take(self, records: list[TokenRecord]) -> Delta:
        text, reply = self._text, self._reply
        if self._plain:
            return Delta(text.push_all([record.token for record in records]), records)
        pieces: list[str] = []
        offsets: list[int] = []
        events: list[Event] = []
        for record in records:
            offsets.append(text.chars)
            if record.logprob is not None:
                self._logprobs += record.logprob
            piece = text.push(record.token)
            pieces.append(piece)
            if reply is not None:
                events += reply.push(piece, offsets[-1:])
            if self._watches and self._over:
                break
        joined = pieces[0] if len(pieces) == 1 else "".join(pieces)
        return Delta(joined, records[: len(pieces)], offsets, events)

    @property
    def _over(self) -> bool:
        """True once the text is complete by itself, whatever more the engine computes."""
        return self._text.stopped or (self._reply is not None and self._reply.over)

    def _end_reply(self, delta: Delta) -> None:
        if self._reply is not None:
            delta.events = [*delta.events, *self._reply.finish()]

    def _outcome(self) -> Outcome:
        result, stopped = self._generation.result, self._over
        if result is None and not stopped:  # cancelled from outside while the client still listens
            raise EngineFaultError("The generation was cancelled; try again.", code="cancelled")
        reason = "stop" if result is None or stopped else result.finish_reason
        reasoning = 0 if self._reply is None else self._reply.reasoning_tokens
        outcome = Outcome(
            finish_reason="tool_calls"
            if reason == "stop" and self._reply is not None and self._reply.calls
            else reason,
            prompt_tokens=len(self.prompt.ids) if self._first else 0,
            completion_tokens=self._text.tokens,
            reasoning_tokens=reasoning,
        )
        if result is not None:  # else the engine died after the last token of the text
            outcome.prompt_tokens = result.prompt_tokens if self._first else 0
            outcome.completion_tokens = self._text.tokens if stopped else result.completion_tokens
            outcome.cached_tokens = result.cached_tokens
            outcome.experts = result.experts
            outcome.timing_ms = (result.queue_ms, result.prefill_ms, result.decode_ms)
        return outcome


class Choices:
    """All choices of one job. Leaving the block cancels what still runs."""

    def __init__(self, job: Job, generations: Iterable[Generation], tokenizer: Tokenizer) -> None:
        self._generations = tuple(generations)
        self._job = job
        self.profile = job.profile
        self.all = [Choice(index, one, job, tokenizer) for index, one in enumerate(self._generations)]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        for generation in self._generations:
            generation.cancel()

    async def each(self, work: Callable[[Choice], Awaitable[None]]) -> None:
        """Runs `work` on all choices at once; the first error ends them all."""
        if len(self.all) == 1:
            # As a task: each wake-up of it would come through all the coroutines that wait for the answer.
            await asyncio.ensure_future(work(self.all[0]))
            return
        tasks = [asyncio.ensure_future(work(choice)) for choice in self.all]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def best(self) -> list[Choice]:
        """Those to give, with their places in the answer: of each prompt the n of highest mean log-probability."""
        n, best_of = self._job.n, self._job.best_of
        if n == best_of:
            return self.all
        kept = []
        for start in range(0, len(self.all), best_of):
            ranked = sorted(self.all[start : start + best_of], key=lambda choice: -choice.mean_logprob)
            kept += ranked[:n]
        for index, choice in enumerate(kept):
            choice.index = index
        return kept

    @property
    def tokens(self) -> int:
        """Of all prompts, each once, and of all texts so far."""
        prompts = sum(len(prompt.ids) for prompt in self._job.prompts)
        return prompts + sum(choice.tokens[1] for choice in self.all)

    @property
    def outcomes(self) -> list[Outcome]:
        """What is known of each choice, in order. Only after all have ended."""
        outcomes = [choice.outcome for choice in self.all if choice.outcome is not None]
        assert len(outcomes) == len(self.all), "a choice has not ended"
        return outcomes
