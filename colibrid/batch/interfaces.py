"""What the HTTP side may use of the scheduler: protocols and values, so that it can be tested with a fake.

Use of one generation::

    async with scheduler.submit(request) as generation:
        async for records in generation:  # never empty; a final stop id is the last record
            ...  # generation.prompt_records is complete from here on
        generation.result  # set when the loop has ended normally

Leaving the block, breaking out of the loop or cancelling the task releases the slot within one step.

A request with `masked` set generates only what its consumer allows: the token of output position p waits for
``generation.submit_mask(p, mask)``, and for nothing else; requests without masks never wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

import msgspec

from colibrid.engine.state import EngineStatus, MemoryPlan, Readiness

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    from colibrid.batch.reports import EngineReport, SlotReport
    from colibrid.batch.request import GenerateRequest, GenerateResult, TokenRecord


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What requests are checked against. All but `memory` is known before the engine is ready."""

    model_id: str
    family: str
    vocab_size: int
    max_seq_len: int  # tokens, prompt and output of one request together
    slots: int
    hidden: int  # values of an embedding
    experts_per_token: int  # the checkpoint's own k (largest of its layers); 0 = no MoE layer
    experts_most: int  # that a request may ask for; at least experts_per_token
    batch_dependent: bool  # experts.max_tokens_per_expert is on
    device: str  # for people, e.g. "cpu"
    fingerprint: str  # changes with anything that may change the text for equal request and seed
    output_is_prompt: bool = False  # K and V of a generated token have the bits that they would have in a prompt
    memory: MemoryPlan | None = None  # None until the engine was ready once

    @property
    def mask_bytes(self) -> int:
        """Size of the masks of Generation.submit_mask: a bit for each token id, in whole words of 32."""
        return (self.vocab_size + 31) // 32 * 4


class Generation(Protocol):
    """One running request."""

    @property
    def request(self) -> GenerateRequest:
        """The request as submitted."""
        ...

    @property
    def prompt_records(self) -> tuple[TokenRecord, ...]:
        """One per prompt token if prompt_logprobs was asked for; not to be read before the first token is yielded.

        Takes long for long prompts when read for the first time; may be read by any thread.
        """
        ...

    @property
    def result(self) -> GenerateResult | None:
        """None until the iteration has ended normally, or stop() was called."""
        ...

    def submit_mask(self, position: int, mask: bytes) -> None:
        """Allow the ids of output position `position` of a masked request: id i iff bit i % 8 of byte i // 8 is set.

        Positions are masked one after another, each once, from submit() on; two masks may be ahead of the records that
        have been yielded, no more. Ignored when the generation has ended. ValueError if it is another position's turn,
        the request is not masked, or the mask is not EngineInfo.mask_bytes long. A mask without a 1 in the vocabulary
        fails the request: no token is left to generate. A consumer that finds no mask in time should cancel.
        """
        ...

    def pace(self, interval_s: float) -> None:
        """From the next list of records on, the one after waits for the next multiple of this on the event loop's clock,
        which all of one pace share, unless the generation ends.

        Whoever needs them less often saves what each list costs; 0, as at the start: each as it arrives. Masks are asked
        for by records, so whoever submits them must not wait.
        """
        ...

    def cancel(self) -> None:
        """Stop and release the slot; the iteration then ends without a result. Harmless when already ended."""
        ...

    def stop(self) -> None:
        """End normally because the consumer has found a stop string: as cancel, but with a result.

        `result` counts all that the engine has computed, which may be more than was yielded. It stays None where
        nothing is known: the engine died, or has not computed the prompt yet.
        """
        ...

    def __aiter__(self) -> AsyncIterator[list[TokenRecord]]:
        """Yield all records that have arrived since the last time. Can be used once.

        Raises EngineFaultError if the engine died or failed the request, RequestError if it cannot be served.
        """
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel unless ended."""
        ...


class GenerationService(Protocol):
    """The scheduler as the HTTP side sees it. All methods are called from the event loop's thread."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def readiness(self) -> Readiness:
        """Of all engines together: ready if one of them is."""
        ...

    @property
    def engines(self) -> tuple[EngineStatus, ...]:
        """Each engine by itself."""
        ...

    @property
    def reports(self) -> tuple[EngineReport, ...]:
        """Each engine with what was counted, for metrics."""
        ...

    @property
    def slot_reports(self) -> tuple[tuple[SlotReport, ...], ...]:
        """The slots of each engine."""
        ...

    @property
    def expert_swaps(self) -> int:
        """Experts that were replaced since the start."""
        ...

    @property
    def draining(self) -> bool:
        """True from drain() on: new requests are refused."""
        ...

    def held(self) -> AbstractContextManager[None]:
        """An answer is being made of several requests, one after another: drain() waits for it, too."""
        ...

    def check_room(self) -> None:
        """Raises the OverloadedError that submit would raise now for any request: cheap enough to ask for each."""
        ...

    def submit(self, request: GenerateRequest, *, begun: bool = False) -> Generation:
        """Queue a request of one choice. begun: for an answer that is held, so that draining does not refuse it.

        Raises OverloadedError with code server_is_overloaded (queue full), model_loading (engine not ready) or
        draining; RequestError if the request can never fit.
        """
        ...

    def submit_all(self, requests: Sequence[GenerateRequest]) -> tuple[Generation, ...]:
        """Queue all or none. Raises as submit does.

        Returns the choices of the first request, then those of the second, and so on. The choices of one request are
        placed together, and its prompt is computed once; requests are placed one after another.
        """
        ...
