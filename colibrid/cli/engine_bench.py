"""Measures the C engine in this process, step by step: prefill and decode at several numbers of slots.

A decode step is bound by the bytes that it reads. So each row says how many those were (dense weights, the distinct
experts that were hit, KV), and how close the time came to reading them at the bandwidth measured beside it.
"""

from __future__ import annotations

import ctypes
import os
import random
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

import msgspec
import numpy as np

from colibrid.engine import abi
from colibrid.engine.channel import Command, DaemonChannel, EngineChannel, Event, SlotRequest
from colibrid.engine.configure import EngineSetup
from colibrid.engine.library import KernelModules, Library
from colibrid.engine.spec import channel_shape
from colibrid.errors import EngineError
from colibrid.model.footprint import Footprint, footprint

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from numpy.typing import NDArray

    from colibrid.engine.device_cuda import CudaDevice
    from colibrid.engine.spec import EngineSpec
    from colibrid.engine.state import MemoryPlan
    from colibrid.model.manifest import Manifest

_T = TypeVar("_T")

_MOST_SECONDS = 3.0  # of repeating one measurement
_COUNTED_STEPS = 8  # of a GPU's decode steps whose experts are counted: waiting for each would spoil its time


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One number of slots and one length of prompt. Times are of the engine alone, without HTTP and text."""

    slots: int
    prompt_tokens: int  # of each slot
    context: int  # tokens of each slot in the middle of the decode measurement
    prefill_tokens_per_s: float  # the median of the samples
    prefill_samples: list[float]  # one a repeat
    decode_tokens_per_s: float  # slots / step_ms
    decode_samples: list[float]  # one a repeat
    step_ms: float  # the mean decode step of the median repeat
    layer_us: float  # the same, a layer
    layer_us_above_floor: float
    expert_runs_per_step: float  # distinct experts hit, counted on the device over all layers: each runs once
    expert_calls_saved_per_step: float  # beyond them, (token, expert) pairs: runs that one call a token would take
    bytes_per_step: int
    read_bandwidth: float  # bytes a second
    floor_ms: float  # bytes_per_step / read_bandwidth
    floor_share: float  # floor_ms / step_ms; 1 = as fast as memory can be read, above 1: from caches


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What a row is measured with."""

    slots: int
    prompt_tokens: int
    steps: int
    repeat: int  # at most; a slow engine repeats less

    def slack(self, prefill_tokens: int) -> int:
        """Decode steps of the slots that start first, until the last one has started."""
        return -(-self.slots * self.prompt_tokens // prefill_tokens) + 4 + _COUNTED_STEPS

    def context(self, prefill_tokens: int) -> int:
        """The most tokens that a slot comes to hold."""
        return self.prompt_tokens + self.steps + self.slack(prefill_tokens)


class _Decoded(msgspec.Struct, frozen=True):
    step_s: float
    runs: float  # a step
    assignments: float  # a step


class Probe(Protocol):
    """Measures how fast the device reads its memory."""

    @property
    def threads(self) -> int: ...

    @property
    def reader(self) -> str:
        """Who reads, for people."""
        ...

    def measure(self) -> float:
        """Bytes a second."""
        ...


class EngineBench:
    """An open engine and its channel, both in this process. Use as a context manager."""

    def __init__(self, library: Library, spec: EngineSpec, manifest: Manifest) -> None:
        self._library = library
        self._spec = spec
        self._manifest = manifest
        self._parts: Footprint = footprint(manifest)
        self._random = random.Random(0)  # noqa: S311 (repeatable prompts, not secrets)
        self._generation = 0
        self._stack = ExitStack()
        self.plan: MemoryPlan
        self.gpu: CudaDevice | None = None
        self.beside_arena = 0  # bytes of device memory that opening took beyond the arena: graphs
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise

    @property
    def threads(self) -> int:
        return int(self._setup.config.threads)

    def measure(self, load: Load, probe: Probe) -> Row:
        """Prefill `slots` prompts, then decode `steps` tokens of each; both several times."""
        slots, steps, layers = load.slots, load.steps, len(self._manifest.layers)
        bandwidth = probe.measure()
        prefill_s = _repeat(load.repeat, lambda: self._prefill(load))
        decoded = _repeat(load.repeat, lambda: self._decode(load))
        bandwidth = max(bandwidth, probe.measure())
        step_s = statistics.median(turn.step_s for turn in decoded)
        runs = statistics.mean(turn.runs for turn in decoded)
        context = load.prompt_tokens + steps // 2
        read = self._parts.dense_read + runs * self._parts.mean_expert
        read += slots * self._kv_read(context)
        floor_s = read / bandwidth
        tokens = slots * load.prompt_tokens
        return Row(
            slots=slots,
            prompt_tokens=load.prompt_tokens,
            context=context,
            prefill_tokens_per_s=tokens / statistics.median(prefill_s),
            prefill_samples=[tokens / seconds for seconds in prefill_s],
            decode_tokens_per_s=slots / step_s,
            decode_samples=[slots / turn.step_s for turn in decoded],
            step_ms=step_s * 1e3,
            layer_us=step_s * 1e6 / layers,
            layer_us_above_floor=(step_s - floor_s) * 1e6 / layers,
            expert_runs_per_step=runs,
            expert_calls_saved_per_step=statistics.mean(turn.assignments for turn in decoded) - runs,
            bytes_per_step=int(read),
            read_bandwidth=bandwidth,
            floor_ms=floor_s * 1e3,
            floor_share=floor_s / step_s,
        )

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> None:
        library, spec = self._library, self._spec
        shape = channel_shape(spec, self._manifest)
        self._channel = DaemonChannel(library, shape)
        self._stack.callback(self._channel.close)
        mapping = EngineChannel(library, self._channel.fd, shape)
        self._stack.callback(mapping.close)
        self._setup = setup = EngineSetup(library, spec, self._manifest)
        self.plan = setup.plan()
        if spec.device == "cuda":
            # Imported here: a CPU bench does without.
            from colibrid.engine.gpu import attach_gpu  # noqa: PLC0415

            self.plan, self.gpu = attach_gpu(setup, mapping, self._stack)
        free = 0 if self.gpu is None else self.gpu.free_bytes()
        self._engine, error = ctypes.c_void_p(), abi.Error()
        with ExitStack() as opening:
            modules = opening.enter_context(KernelModules())
            setup.use_modules(modules)
            setup.config.channel_base = mapping.base
            setup.config.channel_bytes = mapping.size
            if spec.weights == "files":
                setup.config.dir_fd = _open_folder(Path(spec.pack_dir), opening)
            status = library.c.clb_engine_open(
                ctypes.byref(setup.config), ctypes.byref(self._engine), ctypes.byref(error)
            )
        if status != abi.Status.OK:
            raise setup.error(status, error)
        self._stack.callback(library.c.clb_engine_close, self._engine)
        if self.gpu is not None:
            self.beside_arena = free - self.gpu.free_bytes()

    def warm_up(self) -> None:
        """Touch every buffer and let the clocks rise."""
        load = Load(slots=self._spec.slots, prompt_tokens=1, steps=2, repeat=1)
        self._prefill(load)
        self._decode(load)

    def _kv_read(self, context: int) -> float:
        """Bytes of K and V that one token of this position reads."""
        layers = self._manifest.layers
        tokens = sum(min(context, layer.window or context) for layer in layers)
        return tokens * self.plan.kv_bytes_per_token / len(layers)

    def _prefill(self, load: Load) -> float:
        """Seconds to compute the prompts and one token each."""
        self._start(load, 1)
        seconds, ended = 0.0, 0
        while ended < load.slots:
            seconds += self._turn()
            ended += sum(event.kind == abi.EventKind.TOKEN for event in self._events())
        return seconds

    def _decode(self, load: Load) -> _Decoded:
        """The mean of `steps` decode steps over all slots, and the experts that they ran."""
        self.start_decoding(load)
        before, seconds = self.stats(), 0.0
        begun = time.perf_counter()
        for _ in range(load.steps):
            seconds += self._turn()
            self._events()
        elapsed = time.perf_counter() - begun
        after = self.stats()
        done = after.steps_decode - before.steps_decode
        if self.gpu is not None:
            seconds = elapsed  # a GPU works while events are read, and steps end a turn late
        if abs(done - load.steps) > (0 if self.gpu is None else 1):
            raise EngineError(f"{load.steps} turns made {done} decode steps; report this as a bug")
        runs = (after.expert_launches - before.expert_launches) / done
        if self.gpu is not None:
            runs = self.count_runs(load.slots)
        self._push([Command(abi.CommandKind.CLOSE, slot, self._generation) for slot in range(load.slots)])
        while self.stats().slots_open:
            self._turn()
            self._events()
        return _Decoded(seconds / done, runs, (after.expert_assignments - before.expert_assignments) / done)

    def start_decoding(self, load: Load) -> None:
        """Prefill all slots, and leave each enough tokens to generate."""
        self._start(load, load.steps + load.slack(self._spec.prefill_tokens))
        started = set[int]()
        while len(started) < load.slots:
            self._turn()
            started |= {event.slot for event in self._events() if event.kind == abi.EventKind.TOKEN}

    def count_runs(self, slots: int) -> float:
        """Distinct experts that a decode step of the first `slots` slots hits, over all layers: the mean of a few."""
        runs = []
        before = self._counts(slots)
        for _ in range(_COUNTED_STEPS):
            self._turn()
            self._events()
            after = self._counts(slots)
            used = (after - before).sum(axis=0)
            if used.sum() != slots * sum(layer.experts_per_token for layer in self._manifest.layers):
                raise EngineError(f"one turn used {used.sum()} experts; report this as a bug")
            runs.append(int(np.count_nonzero(used)))
            before = after
        return statistics.mean(runs)

    def _counts(self, slots: int) -> NDArray[np.uint32]:
        """Assignments so far, (slots, layers x experts)."""
        self._check(self._library.c.clb_engine_count_experts(self._engine))
        return np.array([np.asarray(self._channel.expert_counts(slot)) for slot in range(slots)], dtype=np.uint32)

    def _start(self, load: Load, max_tokens: int) -> None:
        slots, prompt_tokens = load.slots, load.prompt_tokens
        self._generation += 1
        vocabulary = self._manifest.hyperparameters.vocab_size
        for slot in range(slots):
            prompt = [self._random.randrange(vocabulary) for _ in range(prompt_tokens)]
            self._channel.write_request(
                slot,
                SlotRequest(
                    generation=self._generation, seed=0, prompt_ids=prompt, max_tokens=max_tokens, temperature=0.0
                ),
            )
        commands = []
        for slot in range(slots):
            commands.append(Command(abi.CommandKind.OPEN, slot, self._generation))
            commands.append(Command(abi.CommandKind.PREFILL, slot, self._generation, 0, prompt_tokens))
        self._push(commands)

    def _push(self, commands: list[Command]) -> None:
        if not self._channel.push(commands):
            raise EngineError("the command ring is full; report this as a bug")

    def _turn(self) -> float:
        worked = ctypes.c_uint32()
        started = time.perf_counter()
        status = self._library.c.clb_engine_turn(self._engine, ctypes.byref(worked))
        seconds = time.perf_counter() - started
        self._check(status)
        return seconds

    def _check(self, status: int) -> None:
        if status != abi.Status.OK:
            raise EngineError(f"the engine stopped by itself ({self._library.status_name(status)})")

    def _events(self) -> list[Event]:
        events = self._channel.pop()
        for event in events:
            if event.kind == abi.EventKind.FAILED:
                raise EngineError(f"slot {event.slot} failed ({self._library.status_name(event.status)})")
            if event.kind == abi.EventKind.TOKEN:
                self._channel.advance(event.slot, event.record, event.record + 1)
        return events

    def stats(self) -> abi.Stats:
        """A fresh copy of the engine's counters."""
        stats = abi.Stats()
        self._library.c.clb_engine_stats(self._engine, ctypes.byref(stats))
        return stats


def _repeat(times: int, measure: Callable[[], _T]) -> list[_T]:
    """At least one measurement, and no new one once they took long enough."""
    end = time.perf_counter() + _MOST_SECONDS
    results = [measure()]
    while len(results) < times and time.perf_counter() < end:
        results.append(measure())
    return results


def _open_folder(path: Path, stack: ExitStack) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    return descriptor
