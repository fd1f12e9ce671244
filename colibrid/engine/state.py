"""Values that describe an engine process to the rest of the daemon. Immutable; no I/O."""

from __future__ import annotations

from typing import Literal

import msgspec

EnginePhase = Literal["starting", "loading", "ready", "restarting", "failed", "stopped"]


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The memory bill of one engine, in bytes unless the name says tokens (`clb_memory_plan`)."""

    weights: int
    kv: int
    kv_bytes_per_token: int
    kv_tokens: int  # tokens that the KV tier holds
    temp: int
    dispatch: int  # part of temp
    host: int
    total: int  # weights + kv + temp + host
    arena: int = 0  # device memory: weights, kv and temp; 0 on the CPU
    pinned: int = 0  # part of host: page-locked


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
