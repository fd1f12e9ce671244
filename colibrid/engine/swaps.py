"""Experts that replace others while all engines serve: one after another, in every engine or in none.

    replace ─▶ read and check the file ─▶ stage in every ready engine ─▶ commit in all ─▶ record
                 │ anything wrong              │ one refuses: cancel in all
                 ▼                             ▼
               refused, nothing has changed

An engine that is started later has the pack's own experts; before it serves, it gets those that are recorded, read and
checked anew. An engine that cannot do as the others is ended, and comes back in that way.

Lives on the event loop; files are read in a thread.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
import structlog

from colibrid.engine import abi, control
from colibrid.errors import EngineError, EngineFaultError, OverloadedError, RequestError
from colibrid.model import layout
from colibrid.model.expert_file import ExpertFile, open_expert

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from colibrid.config.settings import ExpertsSettings
    from colibrid.engine.library import Library
    from colibrid.engine.state import Readiness
    from colibrid.model.manifest import Manifest

BEST = "auto"  # the kernel that the package would take
STEP_TIMEOUT_S = 10.0  # for a step boundary to come
_RETRY_AFTER_S = 1.0
_PADDING = 64  # rows or columns of a layout, at most
_WIDEST_BYTES = 4  # fp32
_GAPS_BYTES = 64 << 10  # between matrices, scales and zero points
_LATER = frozenset({abi.Status.FULL, abi.Status.STATE})
_OURS = frozenset({abi.Status.DEVICE, abi.Status.INTERNAL, abi.Status.MEMORY})


class SwapRefusedError(RequestError):
    """The engine does not take the expert: 400, or 409 where it may do so later."""

    def __init__(self, message: str, *, code: str, status: int) -> None:
        super().__init__(message, param="file", code=code)
        self.status = status


class Engine(Protocol):
    """A supervisor, as seen from here."""

    @property
    def readiness(self) -> Readiness: ...

    async def ask(self, message: control.Question, fds: Sequence[int] = ()) -> control.Answer: ...

    def end(self, reason: str) -> None: ...


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """What an expert is now, instead of what the pack says."""

    layer: int
    expert: int
    version: int  # how often it was replaced
    weights_generation: int  # since which it serves
    module: str | None  # None: the best of the package
    since: float  # Unix seconds
    file: str | None = None  # name of the file; these are None with the pack's own weights
    sha256: str | None = None
    precision: str | None = None


class Outcome(NamedTuple):
    """A swap that was done."""

    version: Version
    streams: int  # that had computed something before it and went on, in all engines
    free_slots: int
    milliseconds: float


class _Recorded(NamedTuple):
    version: Version
    path: str | None


class ExpertSwaps:
    """See the module's docstring. Records what is swapped; bounded by the model's experts."""

    def __init__(
        self, engines: Sequence[Engine], library: Library, manifest: Manifest, settings: ExpertsSettings
    ) -> None:
        self._engines = tuple(engines)
        self._library = library
        self._manifest = manifest
        self._settings = settings
        self._lock = asyncio.Lock()
        self._recorded: dict[tuple[int, int], _Recorded] = {}
        self._generation = 0
        self._id = 0
        self._running: set[asyncio.Task[Outcome]] = set()
        self._changed: Callable[[str], None] = lambda _digest: None
        self._log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

    def follow(self, settings: ExpertsSettings) -> None:
        """Take changed settings over."""
        self._settings = settings

    def when_changed(self, call: Callable[[str], None]) -> None:
        """Told after each swap what tells these weights from others: empty for those of the pack."""
        self._changed = call

    @property
    def weights_generation(self) -> int:
        """How many swaps there were."""
        return self._generation

    @property
    def versions(self) -> tuple[Version, ...]:
        """Of every expert that was replaced."""
        return tuple(self._recorded[key].version for key in sorted(self._recorded))

    async def replace(self, layer: int, expert: int, path: str | None, module: str | None) -> Outcome:
        """Put the expert of a file in the place of another one, or have another kernel (BEST: the package's) compute it.

        RequestError says what is wrong with what was asked for; OverloadedError: no engine is ready. Nothing has changed
        then. EngineFaultError: an engine failed meanwhile. A caller that is cancelled does not stop what has begun.
        """
        self._check_place(layer, expert)
        if path is None and module is None:
            raise RequestError("Neither file nor module is given; send one of them.", param="file")
        task = asyncio.create_task(self._replace(layer, expert, path, None if module == BEST else module))
        self._running.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Outcome]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # is its caller's, who may be gone

    async def _replace(self, layer: int, expert: int, path: str | None, module: str | None) -> Outcome:
        started = time.monotonic()
        async with self._lock:
            source = None if path is None else await self._open(path)
            try:
                done = await self._in_all(layer, expert, source, module)
            finally:
                if source is not None:
                    os.close(source.fd)
            version = self._record(layer, expert, path, source, module)
        outcome = Outcome(
            version,
            sum(one.streams for one in done),
            min(one.free_slots for one in done),
            (time.monotonic() - started) * 1000,
        )
        self._log.info(
            "expert_replaced",
            streams=outcome.streams,
            ms=round(outcome.milliseconds, 1),
            **msgspec.structs.asdict(version),
        )
        return outcome

    def _check_place(self, layer: int, expert: int) -> None:
        layers = self._manifest.layers
        if not 0 <= layer < len(layers):
            raise RequestError(f"layer is {layer}; the model has 0 to {len(layers) - 1}.", param="layer")
        experts = layers[layer].experts
        if not 0 <= expert < experts:
            have = f"0 to {experts - 1}" if experts else "none: it is a dense layer"
            raise RequestError(f"expert is {expert}; layer {layer} has {have}.", param="expert")

    async def _open(self, path: str) -> ExpertFile:
        return await asyncio.to_thread(
            open_expert, path, self._settings.swap_folders, self._checksum, _most_bytes(self._manifest)
        )

    def _checksum(self, data: bytes) -> int:
        return int(self._library.c.clb_crc32c(0, data, len(data)))

    def _record(
        self, layer: int, expert: int, path: str | None, source: ExpertFile | None, module: str | None
    ) -> Version:
        before = self._recorded.get((layer, expert))
        self._generation += 1
        version = Version(
            layer=layer,
            expert=expert,
            version=1 if before is None else before.version.version + 1,
            weights_generation=self._generation,
            module=module,
            since=time.time(),
        )
        if source is not None:
            version = msgspec.structs.replace(
                version, file=source.name, sha256=source.sha256, precision=source.precision
            )
        elif before is not None:  # only the kernel changes
            path, old = before.path, before.version
            version = msgspec.structs.replace(version, file=old.file, sha256=old.sha256, precision=old.precision)
        self._recorded[layer, expert] = _Recorded(version, path)
        self._changed(self._digest())
        return version

    def _digest(self) -> str:
        """The same for the same weights and kernels, however they came to be."""
        pack = {file.name: file.sha256 for file in self._manifest.files}
        parts = []
        for (layer, expert), (version, _) in sorted(self._recorded.items()):
            own = pack[self._manifest.layers[layer].expert_files[expert]]
            if version.module is not None or version.sha256 not in (None, own):
                parts.append(f"{layer}:{expert} {version.sha256} {version.module}")
        return "\n".join(parts)

    # ------------------------------------------------------------ the engines

    async def _in_all(
        self, layer: int, expert: int, source: ExpertFile | None, module: str | None
    ) -> list[control.Swapped]:
        engines = [one for one in self._engines if one.readiness.ready]
        if not engines:
            raise OverloadedError(
                "No engine is ready; try again later.", code="model_loading", retry_after_s=_RETRY_AFTER_S
            )
        staged = await asyncio.gather(
            *(self._stage(one, layer, expert, source, module) for one in engines), return_exceptions=True
        )
        wrong = [error for error in staged if isinstance(error, BaseException)]
        if wrong:
            await asyncio.gather(*map(self._cancel, engines), return_exceptions=True)
            raise wrong[0]
        done = await asyncio.gather(
            *(self._commit(one, self._generation + 1) for one in engines), return_exceptions=True
        )
        swapped = [answer for answer in done if isinstance(answer, control.Swapped)]
        failed = [(one, answer) for one, answer in zip(engines, done, strict=True) if isinstance(answer, BaseException)]
        if not swapped:
            raise failed[0][1]
        for one, error in failed:
            one.end(f"the engine did not replace an expert as the others did: {error}")
        return swapped

    async def _stage(
        self, engine: Engine, layer: int, expert: int, source: ExpertFile | None, module: str | None
    ) -> None:
        question = control.Stage(
            id=self._next_id(),
            layer=layer,
            expert=expert,
            file=None if source is None else source.file,
            module=module,
        )
        await self._ask(engine, question, () if source is None else (source.fd,))

    async def _commit(self, engine: Engine, generation: int) -> control.Answer:
        timeout_ms = round(STEP_TIMEOUT_S * 1000)
        question = control.Commit(id=self._next_id(), weights_generation=generation, timeout_ms=timeout_ms)
        return await self._ask(engine, question)

    async def _cancel(self, engine: Engine) -> None:
        await self._ask(engine, control.Cancel(id=self._next_id()))

    def _next_id(self) -> int:
        self._id += 1
        return self._id

    async def _ask(self, engine: Engine, question: control.Question, fds: Sequence[int] = ()) -> control.Answer:
        try:
            answer = await engine.ask(question, fds)
        except EngineError as error:
            raise EngineFaultError(f"The engine failed while an expert was replaced: {error}; try again.") from error
        if isinstance(answer, control.NotSwapped):
            raise _refusal(answer)
        return answer

    # ------------------------------------------------------------- new engines

    async def bring_up(self, engine: Engine) -> None:
        """Before a new engine serves: all experts that are recorded. EngineError says which of them it cannot have."""
        async with self._lock:
            for version, path in sorted(self._recorded.values(), key=lambda one: one.version.weights_generation):
                place = f"layer {version.layer} expert {version.expert}"
                try:
                    await self._bring(engine, version, path)
                except RequestError as error:
                    raise EngineError(f"{place}, which was replaced, cannot be replaced again: {error}") from error
            if self._recorded:
                self._log.info("experts_brought_up", count=len(self._recorded))

    async def _bring(self, engine: Engine, version: Version, path: str | None) -> None:
        source = None if path is None else await self._open(path)
        try:
            if source is not None and source.sha256 != version.sha256:
                raise RequestError("its file holds other bytes by now; put the file back")
            await self._stage(engine, version.layer, version.expert, source, version.module)
            await self._commit(engine, version.weights_generation)
        finally:
            if source is not None:
                os.close(source.fd)


def _most_bytes(manifest: Manifest) -> int:
    """Of any file with an expert of this model: in the widest format, with padding. Larger ones need not be read."""
    width = max((layer.expert_width for layer in manifest.layers), default=0)
    matrices = len(layout.EXPERT_ROLES) * (manifest.hyperparameters.hidden + _PADDING) * (width + _PADDING)
    return matrices * _WIDEST_BYTES + _GAPS_BYTES


def _refusal(answer: control.NotSwapped) -> RequestError:
    if answer.status in _OURS:
        return EngineFaultError(f"The engine could not replace the expert: {answer.message}.")
    status = abi.Status(answer.status)
    return SwapRefusedError(f"{answer.message}.", code=status.name.lower(), status=409 if status in _LATER else 400)
