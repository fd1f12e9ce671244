"""The queue in front of the engine's slots, and the fan-out of what comes back.

    submit ─▶ admission ─▶ placer: queue, plan, one push ─▶ engine
                                                               │ eventfd
    consumer ◀─ LiveGeneration ◀─ all events that arrived ◀────┘

The scheduler owns the placer (queue, slots, memory) and, between engine_ready and engine_lost, the session. It lives on
one event loop and never blocks. Planning is pure (plan.py); writing happens after.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from typing import TYPE_CHECKING, Protocol

import msgspec

from colibrid.batch.admission import check_request
from colibrid.batch.deadline import QueueDeadline
from colibrid.batch.fanout import FanOut, Tally
from colibrid.batch.generation import LiveGeneration
from colibrid.batch.placer import Model, Placer
from colibrid.batch.reports import slot_report
from colibrid.batch.request import ExpertPolicy, GenerateRequest
from colibrid.errors import EngineFaultError, OverloadedError, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from colibrid.batch.interfaces import EngineInfo
    from colibrid.batch.measures import Measures
    from colibrid.batch.queue import Group
    from colibrid.batch.reports import SlotReport
    from colibrid.config.settings import BatchSettings, ExpertsSettings, LimitsSettings, TaskExpertsSettings
    from colibrid.engine.state import Readiness
    from colibrid.engine.supervisor import EngineListener, EngineSession

RETRY_AFTER_LOADING_S = 1.0
_MIN_RETRY_AFTER_S = 1.0
_MAX_RETRY_AFTER_S = 30.0
_RETRY_PUSH_S = 0.005  # the command ring was full


class Engine(Protocol):
    """The supervisor, as the scheduler sees it."""

    @property
    def readiness(self) -> Readiness: ...

    def attach(self, listener: EngineListener) -> None: ...


def with_defaults(asked: ExpertPolicy, task: TaskExpertsSettings, general: ExpertsSettings) -> ExpertPolicy:
    """What a request asks for, completed by what the settings say for its task, then in general."""
    per_token = next((k for k in (asked.per_token, task.per_token, general.per_token) if k is not None), None)
    threshold = next((t for t in (asked.threshold, task.threshold) if t is not None), general.threshold)
    return ExpertPolicy(per_token=tuple(per_token) if isinstance(per_token, list) else per_token, threshold=threshold)


def _task(request: GenerateRequest, experts: ExpertsSettings) -> TaskExpertsSettings:
    if request.pooling is not None:
        return experts.embed
    return experts.score if request.max_tokens == 0 else experts.generate


class SchedulerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler holds now, and has done."""

    queued: int
    running: int
    submitted: int
    finished: int
    failed: int
    cancelled: int
    refused: int
    pushes: int  # calls of clb_command_push that published something


class Scheduler:
    """Implements interfaces.GenerationService; see the module's docstring."""

    def __init__(
        self,
        engine: Engine,
        info: EngineInfo,
        layer_experts: Sequence[int],
        *,
        batch: BatchSettings,
        limits: LimitsSettings,
        experts: ExpertsSettings,
        measures: Measures,
    ) -> None:
        """layer_experts: the most experts per token in each layer, 0 in dense layers."""
        self._engine = engine
        self._info = info
        self._fingerprint = info.fingerprint  # with the pack's own experts
        self._weights = ""
        self._batch = batch
        self._limits = limits
        self._experts = experts
        self._session: EngineSession | None = None
        self._placer = Placer(Model(info.slots, tuple(layer_experts), info.output_is_prompt))
        self._draining = False
        self._held = 0  # answers
        self._idle = asyncio.Event()
        self._idle.set()
        self._pump_handle: asyncio.Handle | None = None
        self._window: asyncio.TimerHandle | None = None
        self._changed: Callable[[], None] = lambda: None
        self._tally = Tally(measures)
        self._fan_out = FanOut(self._placer, self._tally, info)
        self._deadline = QueueDeadline(self._placer.queue, limits.queue_timeout_s, self._waited_in_vain)
        engine.attach(self)

    # ------------------------------------------------------------ for others

    @property
    def info(self) -> EngineInfo:
        """What requests are checked against."""
        return self._info

    @property
    def readiness(self) -> Readiness:
        """The engine's."""
        return self._engine.readiness

    @property
    def draining(self) -> bool:
        """True from drain() or stop() on: new requests are refused."""
        return self._draining

    @property
    def idle(self) -> bool:
        """True iff nothing runs, waits or is held."""
        return self._idle.is_set()

    @property
    def counts(self) -> SchedulerCounts:
        """For logs and tests."""
        tally = self._tally
        return SchedulerCounts(
            queued=self._placer.queue.choices,
            running=self._placer.slots.busy,
            submitted=tally.submitted,
            finished=tally.finished,
            failed=tally.failed,
            cancelled=tally.cancelled,
            refused=tally.refused,
            pushes=tally.pushes,
        )

    @property
    def measures(self) -> Measures:
        """What it has seen of its requests."""
        return self._tally.measures

    @property
    def engine_counters(self) -> dict[str, int] | None:
        """The engine's own counters since it was opened, by the names of clb_stats; None without an engine."""
        if self._session is None:
            return None
        stats = self._session.channel.stats()[1]
        return {field[0]: getattr(stats, field[0]) for field in stats._fields_}

    @property
    def slot_reports(self) -> tuple[SlotReport, ...]:
        """Every slot of the engine."""
        now = asyncio.get_running_loop().time()
        slots = self._placer.slots
        return tuple(slot_report(slots[index], now) for index in range(len(slots)))

    @property
    def placer(self) -> Placer:
        """For those who choose between engines; only to look at, but for its queue."""
        return self._placer

    def follow(
        self, *, batch: BatchSettings, limits: LimitsSettings, experts: ExpertsSettings, fingerprint: str
    ) -> None:
        """Take changed settings over: they count for requests that come from now on."""
        self._batch, self._limits, self._experts = batch, limits, experts
        self._fingerprint = fingerprint
        self.weights_changed(self._weights)
        self._deadline.set_timeout(limits.queue_timeout_s)

    def weights_changed(self, weights: str) -> None:
        """Experts were replaced: `weights` tells the present ones from others, and is empty for those of the pack."""
        self._weights = weights
        fingerprint = self._fingerprint
        if weights:
            fingerprint = f"fp_{hashlib.sha256(f'{fingerprint} {weights}'.encode()).hexdigest()[:12]}"
        self._info = msgspec.structs.replace(self._info, fingerprint=fingerprint)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """See GenerationService.held."""
        self._held += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._held -= 1
            self._update_idle()

    def submit(self, request: GenerateRequest, *, begun: bool = False) -> LiveGeneration:
        """Queue one request of one choice. Raises as GenerationService.submit."""
        assert request.n == 1, "submit_all takes requests of several choices"
        return self._submit((request,), begun=begun)[0]

    def submit_all(self, requests: Sequence[GenerateRequest]) -> tuple[LiveGeneration, ...]:
        """Queue all or none. Raises as GenerationService.submit."""
        return self._submit(requests, begun=False)

    def _submit(self, requests: Sequence[GenerateRequest], *, begun: bool) -> tuple[LiveGeneration, ...]:
        try:
            return self._admit([self._with_defaults(request) for request in requests], begun=begun)
        except RequestError:
            self._tally.refused += sum(request.n for request in requests)
            raise

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for all accepted ones. False: the time was up and the rest has been failed."""
        self._draining = True
        self._cancel_window()
        self._schedule_pump()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            self._fail_all("the server stopped before the request was complete; send it again")
            return False
        return True

    def stop(self) -> None:
        """Fail everything that is left and let go of the engine. The supervisor is stopped by its owner."""
        self._draining = True
        self._fail_all("the server stopped before the request was complete; send it again")
        self._deadline.cancel()
        self._detach()

    # ------------------------------------------------------------- admission

    def _with_defaults(self, request: GenerateRequest) -> GenerateRequest:
        policy = with_defaults(request.experts, _task(request, self._experts), self._experts)
        return request if policy == request.experts else msgspec.structs.replace(request, experts=policy)

    def check_room(self) -> None:
        """See GenerationService.check_room."""
        try:
            self._check_open(begun=False)
            self._check_places(1)
        except OverloadedError:
            self._tally.refused += 1
            raise

    def _check_open(self, *, begun: bool) -> None:
        if self._draining and not begun:
            raise OverloadedError(
                "the server is shutting down; send the request again later",
                code="draining",
                retry_after_s=RETRY_AFTER_LOADING_S,
            )
        readiness = self._engine.readiness
        if not readiness.ready or self._session is None:
            raise OverloadedError(
                f"the model is not ready (engine {readiness.phase}); try again later",
                code="model_loading",
                retry_after_s=RETRY_AFTER_LOADING_S,
            )

    def _check_places(self, wanted: int) -> None:
        slots, queued = self._placer.slots, self._placer.queue.choices
        if wanted > self._limits.queue + len(slots) - slots.busy - queued:
            raise OverloadedError(
                f"the queue is full ({queued} requests wait, limits.queue is {self._limits.queue}); try again later",
                code="server_is_overloaded",
                retry_after_s=self._retry_after_s(),
            )

    def _admit(self, requests: Sequence[GenerateRequest], *, begun: bool) -> tuple[LiveGeneration, ...]:
        self._check_open(begun=begun)
        for request in requests:
            check_request(request, self._info)
        slots = len(self._placer.slots)
        wanted, most = sum(request.n for request in requests), self._limits.queue + slots
        if wanted > most:
            raise RequestError(
                f"{wanted} choices at once, of all prompts together, are more than the {most} that this server holds "
                f"({slots} slots, limits.queue {self._limits.queue}); send them in several requests",
                param="n" if wanted > len(requests) else "prompt",
            )
        self._check_places(wanted)
        now = asyncio.get_running_loop().time()
        generations = []
        for request in requests:
            members = [LiveGeneration(request, self, now, choice) for choice in range(request.n)]
            generations += members
            self._placer.add(members, self._scope(request))
        self._tally.submitted += len(generations)
        self._deadline.watch(now)
        self._idle.clear()
        self._after_submit()
        return tuple(generations)

    def scope(self, request: GenerateRequest) -> Hashable | None:
        """Whose prompts may share computed beginnings with this one, which was not submitted yet."""
        return self._scope(self._with_defaults(request))

    def _scope(self, request: GenerateRequest) -> Hashable | None:
        """Whose prompts may share computed beginnings with this one; None: nobody's.

        With a limit on an expert's tokens what is computed depends on company, so nobody gets what another has computed.
        Pooling needs every position.
        """
        off = self._batch.prefix_reuse == "off" or self._experts.max_tokens_per_expert is not None
        if off or request.pooling is not None:
            return None
        return ("" if self._batch.prefix_reuse == "all" else request.tenant), request.experts

    def _retry_after_s(self) -> float:
        """About when a place in the queue is free, from the mean duration of requests."""
        estimate = self._tally.mean_duration_s * (self._placer.queue.choices + 1) / len(self._placer.slots)
        return min(max(estimate, _MIN_RETRY_AFTER_S), _MAX_RETRY_AFTER_S)

    def _after_submit(self) -> None:
        """An idle engine waits for company, at most batch.window_ms; a running one takes requests at its next step."""
        alone = not self._placer.slots.busy and self._placer.queue.choices < self._batch.window_requests
        if not alone or self._batch.window_ms == 0:
            self._cancel_window()
            self._schedule_pump()
        elif self._window is None:
            self._window = asyncio.get_running_loop().call_later(self._batch.window_ms / 1000, self._window_over)

    def _window_over(self) -> None:
        self._window = None
        self._schedule_pump()

    def _cancel_window(self) -> None:
        if self._window is not None:
            self._window.cancel()
            self._window = None

    # ------------------------------------------------------------------ down

    def _schedule_pump(self) -> None:
        """Plan once after everything that this turn of the loop brings, so that it goes down in one push."""
        if self._pump_handle is None:
            self._pump_handle = asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_handle = None
        if self._session is None or self._window is not None:
            return
        assert self._info.memory is not None, "an engine that is ready has a memory plan"
        loop = asyncio.get_running_loop()
        plan = self._placer.plan(self._info.memory.kv_tokens)
        if plan and self._placer.execute(self._session.channel, plan, loop.time()):
            self._session.wake()
            self._tally.pushes += 1
        elif plan:
            self._pump_handle = loop.call_later(_RETRY_PUSH_S, self._pump)
        if self._placer.queue:
            self._changed()

    def cancelled(self, generation: LiveGeneration) -> None:
        """A consumer wants no more: take it from the queue, or close its slot."""
        self._tally.cancel()
        self._let_go(generation)

    def masked(self, generation: LiveGeneration, position: int, mask: bytes) -> None:
        """A consumer allows ids: write them down and tell the engine, at once or with the opening."""
        if len(mask) != self._info.mask_bytes:
            raise ValueError(f"a mask of {len(mask)} bytes; the vocabulary takes {self._info.mask_bytes}")
        self._placer.mask(None if self._session is None else self._session.channel, generation, position, mask)
        self._schedule_pump()

    def stopped(self, generation: LiveGeneration) -> None:
        """A consumer has all that it wants: as `cancelled`, but a request that runs ends with what is known of it."""
        place, session = generation.place, self._session
        if place is None or session is None or generation.clock.first is None:
            generation.cancel()
            return
        result = self._fan_out.result(session.channel, place.slot, generation, "stop", None)
        self._let_go(generation)
        self._tally.finish(generation, result)

    def _let_go(self, generation: LiveGeneration) -> None:
        self._placer.let_go(generation)
        self._update_idle()
        self._schedule_pump()

    def consumed(self, generation: LiveGeneration) -> None:
        """A consumer has read: its ring has room again. The engine hears of it in steps, a part of the ring each."""
        session = self._session
        if generation.place is None or session is None:
            return
        channel = session.channel
        if generation.consumed - generation.advanced < channel.advance_step:
            return
        if channel.advance(generation.place.slot, generation.advanced, generation.consumed):
            session.wake()
        generation.advanced = generation.consumed

    # -------------------------------------------------------------------- up

    def engine_ready(self, session: EngineSession) -> None:
        """Called by the supervisor."""
        self._session = session
        self._info = msgspec.structs.replace(self._info, memory=session.memory, device=session.device)
        asyncio.get_running_loop().add_reader(session.event_fd, self._on_events)
        self._schedule_pump()

    def engine_lost(self, reason: str) -> None:
        """Called by the supervisor: what has arrived is delivered, what runs fails, what waits goes on waiting."""
        if self._session is not None:
            self._fan_out.take(self._session)
            self._detach()
        for generation in self._placer.lost():
            self._tally.fail(
                generation, EngineFaultError(f"the engine failed while it served this request: {reason}; send it again")
            )
        self._update_idle()

    def engine_gave_up(self, reason: str) -> None:
        """Called by the supervisor: nothing that waits will be served."""
        for generation in self._placer.queue.clear():
            self._tally.fail(generation, EngineFaultError(f"the engine is not available: {reason}"))
        self._update_idle()

    def _detach(self) -> None:
        if self._session is not None:
            asyncio.get_running_loop().remove_reader(self._session.event_fd)
            self._session = None

    def _on_events(self) -> None:
        assert self._session is not None, "events are watched while there is a session"
        self._session.clear_events()
        self._fan_out.take(self._session)
        self._update_idle()
        if self._placer.due:
            self._schedule_pump()
        self._changed()

    # ------------------------------------------------------- between engines

    def when_changed(self, call: Callable[[], None]) -> None:
        """After events of the engine, which may have freed slots, and when something has to wait."""
        self._changed = call

    def release(self, group: Group) -> None:
        """A waiting group goes to another scheduler."""
        self._placer.queue.take(group)
        self._update_idle()

    def adopt(self, group: Group) -> None:
        """A group of another scheduler waits here from now on."""
        for member in group.members:
            member.move(self)
        self._placer.queue.put_back(group)
        self._deadline.watch(group.members[0].clock.submitted)
        self._idle.clear()
        self._schedule_pump()

    # ------------------------------------------------------------------- end

    def _waited_in_vain(self, generation: LiveGeneration) -> None:
        error = OverloadedError(
            f"no slot was free within limits.queue_timeout_s = {self._limits.queue_timeout_s:g} s; try again later",
            code="server_is_overloaded",
            retry_after_s=self._retry_after_s(),
        )
        self._let_go(generation)
        self._tally.fail(generation, error)

    def _fail_all(self, reason: str) -> None:
        error = OverloadedError(reason, code="draining", retry_after_s=RETRY_AFTER_LOADING_S)
        for generation in self._placer.let_all_go():
            self._tally.fail(generation, error)
        self._schedule_pump()
        self._update_idle()

    def _update_idle(self) -> None:
        if self._placer.idle and not self._held:
            self._idle.set()
