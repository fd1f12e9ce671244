"""Measures the C engine in this process, step by step: prefill and decode at several numbers of slots.

A decode step is bound by the bytes that it reads. So each row says how many those were (dense weights, the experts
that were really run, KV), and how close the time came to reading them at the bandwidth measured in the same run.
"""

from __future__ import annotations

import ctypes
import os
import random
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec
import numpy as np

from colibrid.cli.footprint import Footprint, footprint
from colibrid.engine import abi
from colibrid.engine.channel import Command, DaemonChannel, EngineChannel, Event, SlotRequest
from colibrid.engine.configure import EngineSetup
from colibrid.engine.library import KernelModules, Library
from colibrid.engine.spec import channel_shape
from colibrid.errors import EngineError

if TYPE_CHECKING:
    from types import TracebackType

    from colibrid.engine.spec import EngineSpec
    from colibrid.engine.state import MemoryPlan
    from colibrid.model.manifest import Manifest

_BANDWIDTH_ROUNDS = 5
_BANDWIDTH_BYTES = (16 << 20, 1 << 30)  # smallest and largest buffer


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One number of slots. Times are of the engine alone, without HTTP and text."""

    slots: int
    prompt_tokens: int  # of each slot
    context: int  # tokens of each slot in the middle of the decode measurement
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    step_ms: float  # one decode step, the median
    layer_us: float  # the same, a layer
    expert_runs_per_step: float
    bytes_per_step: int
    floor_share: float  # (bytes_per_step / read bandwidth) / step time; 1 = as fast as the bytes can be read


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
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise

    def measure(self, slots: int, prompt_tokens: int, steps: int, bandwidth: float) -> Row:
        """Prefill `slots` prompts, then `steps` decode steps over all of them. `bandwidth` in bytes a second."""
        prefill_s = self._prefill(slots, prompt_tokens)
        before, step_s, after = self._decode(slots, prompt_tokens, steps)
        runs = (after.expert_launches - before.expert_launches) / steps
        context = prompt_tokens + steps // 2
        read = self._parts.dense_read + runs * self._parts.mean_expert
        read += slots * context * self.plan.kv_bytes_per_token
        return Row(
            slots=slots,
            prompt_tokens=prompt_tokens,
            context=context,
            prefill_tokens_per_s=slots * prompt_tokens / prefill_s,
            decode_tokens_per_s=slots / step_s,
            step_ms=step_s * 1e3,
            layer_us=step_s * 1e6 / len(self._manifest.layers),
            expert_runs_per_step=runs,
            bytes_per_step=int(read),
            floor_share=read / bandwidth / step_s,
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
        setup = EngineSetup(library, spec, self._manifest)
        self.plan = setup.plan()
        self._engine, error = ctypes.c_void_p(), abi.Error()
        with ExitStack() as opening:
            modules = opening.enter_context(KernelModules())
            setup.use_modules(modules.names, modules.paths)
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

    def _prefill(self, slots: int, prompt_tokens: int) -> float:
        """Seconds to compute the prompts and one token each."""
        self._start(slots, prompt_tokens, 1)
        seconds, ended = 0.0, 0
        while ended < slots:
            seconds += self._turn()
            ended += sum(event.kind == abi.EventKind.TOKEN for event in self._events())
        return seconds

    def _decode(self, slots: int, prompt_tokens: int, steps: int) -> tuple[abi.Stats, float, abi.Stats]:
        """Counters before, seconds of the median of `steps` decode steps over all slots, counters after."""
        slack = -(-slots * prompt_tokens // self._spec.prefill_tokens) + 4  # steps of the slots that start first
        self._start(slots, prompt_tokens, steps + slack)
        started = set[int]()
        while len(started) < slots:
            self._turn()
            started |= {event.slot for event in self._events() if event.kind == abi.EventKind.TOKEN}
        before = self._stats()
        turns = []
        for _ in range(steps):
            turns.append(self._turn())
            self._events()
        after = self._stats()
        done = after.steps_decode - before.steps_decode
        if done != steps:
            raise EngineError(f"{steps} turns made {done} decode steps; report this as a bug")
        self._push([Command(abi.CommandKind.CLOSE, slot, self._generation) for slot in range(slots)])
        while self._stats().slots_open:
            self._turn()
            self._events()
        return before, statistics.median(turns), after

    def _start(self, slots: int, prompt_tokens: int, max_tokens: int) -> None:
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
        if status != abi.Status.OK:
            raise EngineError(f"the engine stopped by itself ({self._library.status_name(status)})")
        return seconds

    def _events(self) -> list[Event]:
        events = self._channel.pop()
        for event in events:
            if event.kind == abi.EventKind.FAILED:
                raise EngineError(f"slot {event.slot} failed ({self._library.status_name(event.status)})")
            if event.kind == abi.EventKind.TOKEN:
                self._channel.advance(event.slot, event.record, event.record + 1)
        return events

    def _stats(self) -> abi.Stats:
        stats = abi.Stats()
        self._library.c.clb_engine_stats(self._engine, ctypes.byref(stats))
        return stats


def read_bandwidth(size: int) -> float:
    """Bytes a second that one core reads from a buffer of `size` bytes (kept within bounds): best of several rounds."""
    low, high = _BANDWIDTH_BYTES
    buffer = np.ones(min(max(size, low), high) // 4, dtype=np.int32)
    best = float("inf")
    for _ in range(_BANDWIDTH_ROUNDS):
        started = time.perf_counter()
        buffer.max()
        best = min(best, time.perf_counter() - started)
    return buffer.nbytes / best


def _open_folder(path: Path, stack: ExitStack) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    return descriptor
