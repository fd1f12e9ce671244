"""Values that describe an engine process to the rest of the daemon. Immutable; no I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

EnginePhase = Literal["starting", "loading", "ready", "restarting", "failed", "stopped"]


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The memory bill of one engine, in bytes unless the name says tokens (`clb_memory_plan`)."""

    weights: int
    kv: int
    kv_bytes_per_token: int
    kv_tokens: int  # tokens that the KV tier holds
    temp: int
    dispatch: int  # part of temp: activations of experts, partial results of (token, rank)
    host: int
    total: int  # weights + swap + kv + temp + graphs + host
    arena: int = 0  # device memory: weights, swap, kv and temp; 0 on the CPU
    pinned: int = 0  # part of host: page-locked
    swap: int = 0  # blocks for experts that replace others
    graphs: int = 0  # device memory beside the arena

    def parts(self) -> list[tuple[str, int]]:
        """What the memory is for, in the order of the arena; parts of no bytes are left out."""
        named = (
            ("weights", self.weights),
            ("swap slots", self.swap),
            ("kv runs", self.kv),
            ("workspace", self.temp),
            ("graphs", self.graphs),
            ("engine", self.host),
        )
        return [(name, size) for name, size in named if size]


class StartTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of one engine start went, in milliseconds."""

    process_ms: float  # spawn until the worker read its first frame
    pack_ms: float  # reading colibri.json and building the tables
    open_ms: float  # memory, weights, kernels
    total_ms: float  # spawn until ready


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """What /readyz says. `percent` and `last_step_age_s` are None where they have no meaning."""

    phase: EnginePhase
    percent: int | None = None  # of the weights, while loading
    reason: str | None = None  # why the engine failed or is restarting; safe to show to clients
    last_step_age_s: float | None = None  # seconds since the progress counter last moved
    restarts: int = 0

    @property
    def ready(self) -> bool:
        """True iff requests are served."""
        return self.phase == "ready"


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What /health says of one engine; nothing secret."""

    index: int
    device: str
    phase: EnginePhase
    percent: int | None
    reason: str | None
    last_step_age_s: float | None
    restarts: int
    slots: int
    running: int
    queued: int
    memory: MemoryPlan | None  # None until it was ready once


# From what serves to what never will.
_PHASES: tuple[EnginePhase, ...] = ("ready", "loading", "starting", "restarting", "failed", "stopped")


def overall(engines: Sequence[Readiness]) -> Readiness:
    """What several engines are together: as ready as the best of them, its steps as old as those of the slowest.

    The reason is that of any engine that does not serve as it should.
    """
    best = min(engines, key=lambda one: _PHASES.index(one.phase))
    alike = [one for one in engines if one.phase == best.phase]
    ages = [one.last_step_age_s for one in alike if one.last_step_age_s is not None]
    percents = [one.percent for one in alike if one.percent is not None]
    reasons = [one.reason for one in engines if one.reason is not None]
    return Readiness(
        phase=best.phase,
        percent=max(percents, default=None),
        reason=next(iter(reasons), None),
        last_step_age_s=max(ages, default=None),
        restarts=sum(one.restarts for one in engines),
    )
