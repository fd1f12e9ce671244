"""Keeps one engine process running: starts it, watches it, restarts it, gives up when that is pointless.

                 spawn          Opening            Ready
    stopped ──────────▶ starting ──────▶ loading ────────▶ ready ──stop()──▶ stopped
                            ▲               │ death           │ death, stall
                            └── restarting ◀┴─────────────────┘
                                    │ exit 78, or 5 engines in 60 s that completed no request
                                    ▼
                                  failed

Who watches what: the pidfd tells of death at once; the progress counter in the channel tells of a stall. The counter
moves while the engine works and once a second while it idles, so an engine whose counter stands for
engine.stall_timeout_s is neither busy nor idle. Time is counted in ticks of this process, each at most twice its
nominal length, so that a daemon that was itself stopped does not blame its engine.

Owner of all engine processes; lives on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

import structlog

from colibrid.engine import control
from colibrid.engine.process import EngineProcess
from colibrid.engine.spec import EngineSpec, channel_shape
from colibrid.engine.state import EnginePhase, MemoryPlan, Readiness, StartTimings
from colibrid.errors import ColibridError, ConfigError, EngineError, ModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from colibrid.config.settings import EngineSettings
    from colibrid.engine.channel import DaemonChannel
    from colibrid.engine.library import Library
    from colibrid.model.manifest import Manifest

CRASH_LOOP_ENGINES = 5
CRASH_LOOP_SECONDS = 60.0
EXIT_CONFIG = 78
STOP_GRACE_S = 5.0
_MAX_TICK_S = 0.5


class EngineSession:
    """One ready engine, as its user sees it. Not valid after the listener's engine_lost has returned."""

    def __init__(self, process: EngineProcess, memory: MemoryPlan, device: str) -> None:
        self._process = process
        self.memory = memory
        self.device = device

    @property
    def channel(self) -> DaemonChannel:
        """Blocks and rings."""
        return self._process.channel

    @property
    def event_fd(self) -> int:
        """Readable when events have arrived; an eventfd."""
        return self._process.event_fd

    def wake(self) -> None:
        """Tell the engine that commands were pushed or results were read."""
        self._process.wake()

    def clear_events(self) -> None:
        """Make event_fd unreadable; call before taking events, so that none is missed."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.event_fd)


class EngineListener(Protocol):
    """Told about engines, on the event loop, never re-entrantly."""

    def engine_ready(self, session: EngineSession) -> None:
        """Requests may be pushed from now on."""
        ...

    def engine_lost(self, reason: str) -> None:
        """The session ends; its channel is released after this returns. `reason` is safe for clients."""
        ...

    def engine_gave_up(self, reason: str) -> None:
        """No engine will come any more."""
        ...


class Preparer(Protocol):
    """Does what a new engine needs before it serves."""

    async def __call__(self, engine: Supervisor) -> None:
        """EngineError: this engine cannot serve."""
        ...


class _Nobody:
    """Listens to nothing."""

    def engine_ready(self, session: EngineSession) -> None: ...

    def engine_lost(self, reason: str) -> None: ...

    def engine_gave_up(self, reason: str) -> None: ...


class Supervisor:
    """See the module's docstring. One life: start() once, then stop()."""

    def __init__(self, library: Library, spec: EngineSpec, manifest: Manifest, settings: EngineSettings) -> None:
        self._library = library
        self.spec = spec
        self._shape = channel_shape(spec, manifest)
        self._weight_bytes = sum(file.bytes for file in manifest.files)
        self._settings = settings
        self._listener: EngineListener = _Nobody()
        self._preparer: Preparer | None = None
        self._preparing: asyncio.Task[None] | None = None
        self._questions: dict[int, asyncio.Future[control.Answer]] = {}
        self._log: structlog.typing.FilteringBoundLogger = structlog.get_logger(engine=spec.index)
        self._process: EngineProcess | None = None
        self._session: EngineSession | None = None
        self._phase: EnginePhase = "stopped"
        self._reason: str | None = None
        self._failure: ColibridError | None = None
        self._reported: control.Failed | None = None  # by the current engine
        self._killed_because: str | None = None  # the current engine, by us
        self._stopping = False
        self._restarts = 0
        self._fruitless: deque[float] = deque(
            maxlen=CRASH_LOOP_ENGINES
        )  # when engines without a completed request died
        self._ticker: asyncio.TimerHandle | None = None
        self._settled = asyncio.Event()  # ready, failed or stopped
        self._ended = asyncio.Event()  # failed or stopped
        self._spawned_at = 0.0
        self._opening_at = 0.0
        self._last_tick = 0.0
        self._progress = -1
        self._progress_age = 0.0
        self._loading_age = 0.0
        self.timings: StartTimings | None = None  # of the last engine that became ready

    def attach(self, listener: EngineListener) -> None:
        """Name the one that is told about engines; before start()."""
        self._listener = listener

    def prepare_with(self, preparer: Preparer) -> None:
        """Called for each new engine, whose users hear of it when that has returned; before start()."""
        self._preparer = preparer

    # ------------------------------------------------------------ for others

    def follow(self, settings: EngineSettings) -> None:
        """Watch by these bounds from now on."""
        self._settings = settings

    @property
    def readiness(self) -> Readiness:
        """For /readyz and the watchdog."""
        age = self._progress_age + (time.monotonic() - self._last_tick) if self._phase == "ready" else None
        return Readiness(
            phase=self._phase,
            percent=self._percent(),
            reason=self._reason,
            last_step_age_s=age,
            restarts=self._restarts,
        )

    @property
    def failure(self) -> ColibridError | None:
        """Why it gave up; for the operator (may name files)."""
        return self._failure

    @property
    def engine_pid(self) -> int | None:
        """The current engine's process id."""
        return None if self._process is None else self._process.pid

    @property
    def memory(self) -> MemoryPlan | None:
        """The bill of the engine that is ready now."""
        return None if self._session is None else self._session.memory

    def start(self) -> None:
        """Spawn the first engine. Must be called on the event loop."""
        assert self._phase == "stopped", "a supervisor starts once"
        assert not self._stopping, "a supervisor is not started again"
        self._phase = "starting"
        self._spawn()

    async def wait_ready(self) -> None:
        """Return when an engine is ready. Raises the reason if it gave up, EngineError if it was stopped."""
        await self._settled.wait()
        if self._failure is not None:
            raise self._failure
        if self._phase == "stopped":
            raise EngineError("the engine was stopped before it was ready")

    async def wait_ended(self) -> ColibridError | None:
        """Return when no engine will come any more: the reason if it gave up, None after stop()."""
        await self._ended.wait()
        return self._failure

    def check(self) -> None:
        """Have the engine verify its invariants at the next step boundary; one with a broken invariant ends itself."""
        if self._session is not None and self._process is not None:
            control.send(self._process.sock, control.Check())

    async def ask(self, message: control.Question, fds: Sequence[int] = ()) -> control.Answer:
        """Send a question about experts to the engine, which has opened, and wait for its answer.

        EngineError if it ends before it answers. A caller that is cancelled misses the answer.
        """
        process = self._process
        if process is None:
            raise EngineError("there is no engine")
        answer: asyncio.Future[control.Answer] = asyncio.get_running_loop().create_future()
        self._questions[message.id] = answer
        try:
            control.send(process.sock, message, fds)
            return await answer
        except OSError as error:
            raise EngineError(f"the engine cannot be asked: {error.strerror}") from error
        finally:
            self._questions.pop(message.id, None)

    def end(self, reason: str) -> None:
        """Kill an engine that cannot do what it must; another one is started."""
        if self._process is not None:
            self._kill(self._process, reason)

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """End the engine; kill it if it does not end within `grace_s`. May be called at any time, also twice."""
        self._stopping = True
        process = self._process
        if process is None:
            if self._phase != "failed":
                self._end("stopped")
            return
        with contextlib.suppress(OSError):
            control.send(process.sock, control.Stop())
        try:
            await asyncio.wait_for(self._ended.wait(), grace_s)
        except TimeoutError:
            self._log.warning("engine_kill", pid=process.pid, after_s=grace_s)
            process.kill()
            await self._ended.wait()

    # ---------------------------------------------------------------- start

    def _spawn(self) -> None:
        self._spawned_at = self._last_tick = time.monotonic()
        self._reported = self._killed_because = None
        self._progress = -1
        self._progress_age = self._loading_age = 0.0
        try:
            process = EngineProcess(self._library, self.spec, self._shape)
        except (OSError, EngineError) as error:
            self._log.error("engine_spawn_failed", error=str(error))
            why = error.strerror if isinstance(error, OSError) else error  # the rest of an OSError may be a path
            self._ended_engine(f"the engine process cannot be started: {why}", completed=False)
            return
        self._process = process
        loop = asyncio.get_running_loop()
        loop.add_reader(process.pidfd, self._on_exit, process)
        loop.add_reader(process.sock.fileno(), self._on_control, process)
        self._ticker = loop.call_later(self._tick_s(), self._tick)
        self._log.info("engine_started", pid=process.pid)

    def _on_control(self, process: EngineProcess) -> None:
        try:
            while (received := control.receive(process.sock)) is not None:
                self._on_message(process, received[0])
            asyncio.get_running_loop().remove_reader(process.sock.fileno())  # its end; the pidfd tells the rest
        except BlockingIOError:
            return
        except (OSError, EngineError) as error:
            asyncio.get_running_loop().remove_reader(process.sock.fileno())
            self._log.error("engine_control_broken", error=str(error))
            process.kill()

    def _on_message(self, process: EngineProcess, message: control.Message) -> None:
        match message:
            case control.Ready() if self._stopping:
                pass
            case control.Opening():
                self._opening_at = time.monotonic()
                if self._phase == "starting":
                    self._phase = "loading"
            case control.Ready():
                self._on_ready(process, message)
            case control.Failed():
                self._reported = message
            case control.Staged() | control.Swapped() | control.NotSwapped():
                if self._session is None:
                    process.channel.pop()  # nobody reads yet, and the next swap waits until this one's events are taken
                question = self._questions.get(message.id)
                if question is not None and not question.done():
                    question.set_result(message)
            case control.Log():
                self._log.log(_LEVELS[message.level], message.event, **message.fields)
            case _:
                self._log.warning("engine_unexpected_frame", frame=type(message).__name__)

    def _on_ready(self, process: EngineProcess, message: control.Ready) -> None:
        if self._preparer is None:
            self._serve(process, message)
        else:
            self._preparing = asyncio.get_running_loop().create_task(self._prepare(self._preparer, process, message))

    async def _prepare(self, preparer: Preparer, process: EngineProcess, message: control.Ready) -> None:
        try:
            await preparer(self)
        except EngineError as error:
            if self._process is process:
                self._kill(process, str(error))
            return
        if self._process is process and self._killed_because is None and not self._stopping:
            self._serve(process, message)

    def _serve(self, process: EngineProcess, message: control.Ready) -> None:
        now = time.monotonic()
        self.timings = StartTimings(
            process_ms=(self._opening_at - self._spawned_at) * 1000,
            pack_ms=message.pack_ms,
            open_ms=message.open_ms,
            total_ms=(now - self._spawned_at) * 1000,
        )
        self._phase = "ready"
        self._reason = None
        self._progress_age = 0.0
        self._last_tick = now
        self._session = EngineSession(process, message.memory, message.device)
        self._log.info("engine_ready", pid=process.pid, total_ms=round(self.timings.total_ms, 1))
        self._settled.set()
        self._listener.engine_ready(self._session)

    # ---------------------------------------------------------------- watch

    def _tick_s(self) -> float:
        return min(_MAX_TICK_S, self._settings.stall_timeout_s / 10)

    def _tick(self) -> None:
        process = self._process
        if process is None:
            return
        self._ticker = asyncio.get_running_loop().call_later(self._tick_s(), self._tick)
        now = time.monotonic()
        passed = min(now - self._last_tick, 2 * self._tick_s())
        self._last_tick = now
        if self._phase != "ready":
            self._loading_age += passed
            if self._loading_age > self._settings.load_timeout_s:
                self._kill(
                    process, f"the engine was not ready within engine.load_timeout_s {self._settings.load_timeout_s}"
                )
            return
        progress = process.channel.stats()[1].progress
        self._progress_age = 0.0 if progress != self._progress else self._progress_age + passed
        self._progress = progress
        if self._progress_age > self._settings.stall_timeout_s:
            self._kill(
                process, f"the engine made no progress for engine.stall_timeout_s {self._settings.stall_timeout_s}"
            )

    def _kill(self, process: EngineProcess, reason: str) -> None:
        if self._killed_because is None:
            self._log.error("engine_stalled", pid=process.pid, reason=reason)
        self._killed_because = reason
        self._leave_ready(reason)
        process.kill()

    def _percent(self) -> int | None:
        if self._process is None or self._phase not in ("loading", "restarting") or not self._weight_bytes:
            return None
        loaded: int = self._process.channel.stats()[1].loaded_bytes
        return min(100, loaded * 100 // self._weight_bytes)

    # ------------------------------------------------------------------ end

    def _on_exit(self, process: EngineProcess) -> None:
        code = process.poll()
        if code is None:
            return
        self._on_control(process)  # its last frame says why
        stats = process.channel.stats()[1]
        completed = stats.requests_done > 0
        self._log.info("engine_totals", pid=process.pid, **{name: getattr(stats, name) for name in _TOTALS})
        loop = asyncio.get_running_loop()
        loop.remove_reader(process.pidfd)
        loop.remove_reader(process.sock.fileno())
        if self._ticker is not None:
            self._ticker.cancel()
        reason = self._exit_reason(code)
        for question in self._questions.values():
            if not question.done():
                question.set_exception(EngineError(reason))
        self._leave_ready(reason)
        self._process = None
        process.release()
        if self._stopping:
            self._end("stopped")
        elif code == EXIT_CONFIG:
            self._give_up(_final_error(self._reported, reason), "the engine refuses its settings or its model")
        else:
            self._log.error("engine_died", pid=process.pid, code=code, reason=reason)
            self._ended_engine(reason, completed)

    def _exit_reason(self, code: int) -> str:
        if self._reported is not None and self._reported.kind == "engine":
            return self._reported.message
        if self._killed_because is not None:
            return self._killed_because
        return f"the engine was ended by {signal.Signals(-code).name}" if code < 0 else f"the engine exited with {code}"

    def _leave_ready(self, reason: str) -> None:
        """Take the session from its user, once."""
        if self._session is not None:
            self._session = None
            self._phase = "restarting"
            self._reason = reason
            self._settled.clear()
            self._listener.engine_lost(reason)

    def _ended_engine(self, reason: str, completed: bool) -> None:
        """Restart, unless that keeps failing."""
        now = time.monotonic()
        if not completed:
            self._fruitless.append(now)
        if len(self._fruitless) == CRASH_LOOP_ENGINES and now - self._fruitless[0] <= CRASH_LOOP_SECONDS:
            self._give_up(
                EngineError(
                    f"{CRASH_LOOP_ENGINES} engines died within {CRASH_LOOP_SECONDS:.0f} s before completing one request; "
                    f"the last one: {reason}. Look at the log above, then start colibrid again"
                ),
                "engines keep dying before they complete a request",
            )
            return
        self._phase = "restarting"
        self._reason = reason
        self._restarts += 1
        # Not from here: spawning may fail at once, and would then recurse.
        asyncio.get_running_loop().call_soon(self._respawn)

    def _respawn(self) -> None:
        if self._stopping:
            self._end("stopped")
        else:
            self._spawn()

    def _give_up(self, error: ColibridError, reason: str) -> None:
        self._log.error("engine_gave_up", error=str(error))
        self._failure = error
        self._reason = reason
        self._end("failed")
        self._listener.engine_gave_up(reason)

    def _end(self, phase: EnginePhase) -> None:
        self._phase = phase
        if phase == "stopped":
            self._reason = None
        self._settled.set()
        self._ended.set()


# Counters that are logged when an engine has ended, however it did.
_TOTALS = (
    "requests_done", "requests_failed", "tokens_prefill", "tokens_decode", "steps_prefill", "steps_decode",
    "allocations_after_open", "kv_bytes_used",
)  # fmt: skip
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def _final_error(reported: control.Failed | None, reason: str) -> ColibridError:
    if reported is None:
        return ConfigError(reason)
    return ModelError(reported.message) if reported.kind == "model" else ConfigError(reported.message)
