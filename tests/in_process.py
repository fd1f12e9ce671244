"""The C engine in the test's own process, turned by hand: both ends of a channel, no thread, no worker."""

from __future__ import annotations

import ctypes
import math
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol, Self

import msgspec

from colibrid.config.settings import BatchSettings, KvSettings, ModelSettings, Settings
from colibrid.engine import abi
from colibrid.engine.channel import Command, DaemonChannel, EngineChannel, Event, SlotRecord, SlotRequest, SlotUsage
from colibrid.engine.configure import EngineSetup
from colibrid.engine.library import KernelModules, Library
from colibrid.engine.spec import channel_shape, make_spec
from colibrid.engine.tables import ExpertTables
from colibrid.model.expert_file import open_expert
from colibrid.model.pack import open_pack

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

TURNS = 100_000  # no test needs more; a hang is a failure


def crc32c(data: bytes | memoryview) -> int:
    """The engine's own checksum, as convert takes it."""
    return int(Library().c.clb_crc32c(0, bytes(data), len(data)))


class EngineRefusalError(Exception):
    """What C said to a swap."""

    def __init__(self, status: abi.Status, message: str) -> None:
        super().__init__(f"{status.name}: {message}")
        self.status = status


class Answer(msgspec.Struct):
    """What one request got."""

    records: list[SlotRecord] = []
    prompt: list[SlotRecord] = []
    usage: SlotUsage | None = None
    experts: list[int] = []  # assignments by layer and expert, layers x the most experts of a layer
    finish: int = 0  # CLB_FINISH_*
    status: int | None = None  # clb_status of a failed request
    pooled: bytes = b""

    @property
    def tokens(self) -> list[int]:
        return [record.token for record in self.records]


class Accelerator(Protocol):
    """Something that an engine may be opened on instead of the CPU."""

    def attach(self, setup: EngineSetup, channel: EngineChannel, stack: ExitStack) -> object:
        """As colibrid.engine.gpu.attach_gpu: a device that is there until `stack` unwinds."""
        ...


class InProcessEngine:
    """An open engine over a pack. Use as a context manager."""

    def __init__(
        self,
        pack: Path,
        *,
        slots: int = 4,
        kv: str = "fp32",
        max_seq_len: int | None = None,
        chunk: int = 64,
        device: Accelerator | None = None,
        **changes: Any,
    ) -> None:
        """`changes` replace fields of the EngineSpec. The exceptions are those of EngineSetup. device: not the CPU."""
        self._stack = ExitStack()
        self._accelerator = device
        if device is not None:
            changes["device"] = "cuda"
        try:
            self._open(pack, slots, kv, max_seq_len, chunk, changes)
        except BaseException:
            self._stack.close()
            raise

    def _open(
        self, pack: Path, slots: int, kv: str, max_seq_len: int | None, chunk: int, changes: dict[str, Any]
    ) -> None:
        dummy = changes.get("weights") == "dummy"
        self.manifest = open_pack(pack, check_files=not dummy).manifest
        settings = Settings(
            batch=BatchSettings(slots=slots, prefill_chunk=chunk, prefill_tokens=max(512, chunk)),
            model=ModelSettings(max_seq_len=max_seq_len),
            kv=KvSettings(precision=kv),  # type: ignore[arg-type]
        )
        self.spec = msgspec.structs.replace(make_spec(settings, str(pack), self.manifest), **changes)
        self.slots = slots
        self._generation = 0
        library = self._library = Library()
        shape = channel_shape(self.spec, self.manifest)
        self.channel = DaemonChannel(library, shape)
        self._stack.callback(self.channel.close)
        mapping = EngineChannel(library, self.channel.fd, shape)
        self._stack.callback(mapping.close)
        setup = EngineSetup(library, self.spec, self.manifest)
        if self._accelerator is not None:
            self._accelerator.attach(setup, mapping, self._stack)
        self._engine, error = ctypes.c_void_p(), abi.Error()
        with ExitStack() as opening:
            modules = opening.enter_context(KernelModules(custom=self.spec.modules))
            setup.use_modules(modules)
            setup.config.channel_base = mapping.base
            setup.config.channel_bytes = mapping.size
            if not dummy:
                setup.config.dir_fd = os.open(pack, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                opening.callback(os.close, setup.config.dir_fd)
            status = library.c.clb_engine_open(
                ctypes.byref(setup.config), ctypes.byref(self._engine), ctypes.byref(error)
            )
        if status != abi.Status.OK:
            raise setup.error(status, error)
        self._stack.callback(library.c.clb_engine_close, self._engine)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def stats(self) -> abi.Stats:
        """A fresh copy of the counters."""
        stats = abi.Stats()
        self._require(self._library.c.clb_engine_stats(self._engine, ctypes.byref(stats)))
        return stats

    def check(self) -> None:
        """Asserts the engine's conservation of pools, runs and slots."""
        error = abi.Error()
        status = self._library.c.clb_engine_check(self._engine, ctypes.byref(error))
        self._require(status, error.message.decode())

    def turn(self) -> None:
        worked = ctypes.c_uint32()
        self._require(self._library.c.clb_engine_turn(self._engine, ctypes.byref(worked)))

    def run(self, requests: Sequence[SlotRequest], cancel: Mapping[int, int] | None = None) -> list[Answer]:
        """Serves all requests, as many at once as there are slots, in order of arrival. Generations are set here.

        `cancel`: requests, by index, that are closed when they have so many tokens.
        """
        answers = [Answer(records=[]) for _ in requests]
        waiting = list(range(len(requests)))
        owner: dict[int, int] = {}
        generations: dict[int, int] = {}
        cancel = dict(cancel or {})
        for _ in range(TURNS):
            while waiting and len(owner) < self.slots:
                slot = next(slot for slot in range(self.slots) if slot not in owner)
                owner[slot] = waiting.pop(0)
                generations[slot] = self.start(slot, requests[owner[slot]])
            if not owner:
                self.check()
                return answers
            for slot, index in owner.items():
                if len(answers[index].records) >= cancel.get(index, TURNS):
                    del cancel[index]
                    self.channel.push([Command(abi.CommandKind.CLOSE, slot, generations[slot])])
            self.turn()
            for event in self.channel.pop():
                self._take(event, requests[owner[event.slot]], answers[owner[event.slot]])
                if _released(event):
                    answers[owner[event.slot]].usage = self.channel.usage(event.slot)
                    answers[owner[event.slot]].experts = list(self.channel.expert_counts(event.slot))
                    del owner[event.slot]
        raise AssertionError(f"requests {sorted(owner.values())} did not end within {TURNS} turns")

    def replace(self, layer: int, expert: int, file: Path | None, module: int = 0, turns: int = 4) -> list[Event]:
        """Put the expert of a file in the place of another, before the next of `turns` turns. Returns what happened in them.

        module: 1 + index of the kernel module. On a device the old expert stays until the next step is seen, which takes
        several turns; the CPU needs one. EngineRefusalError if C refuses.
        """
        desc = abi.SwapDesc(
            abi_version=abi.ABI_VERSION,
            struct_bytes=ctypes.sizeof(abi.SwapDesc),
            layer=layer,
            expert=expert,
            fd=-1,
            module=module,
        )
        error, report = abi.Error(), abi.SwapReport()
        with ExitStack() as stack:
            if file is not None:
                opened = open_expert(str(file), [str(file.parent)], crc32c, 1 << 30)
                stack.callback(os.close, opened.fd)
                tables = ExpertTables(opened.file, layer, expert)
                desc.fd, desc.file, desc.sections = opened.fd, ctypes.pointer(tables.file), tables.sections
            status = self._library.c.clb_engine_swap_stage(self._engine, ctypes.byref(desc), ctypes.byref(error))
        if status != abi.Status.OK:
            raise EngineRefusalError(abi.Status(status), error.message.decode())
        self._require(self._library.c.clb_engine_swap_post(self._engine, self.stats().weights_generation + 1))
        events: list[Event] = []
        for _ in range(turns):
            self.turn()
            events += self.channel.pop()
        self._require(
            self._library.c.clb_engine_swap_wait(self._engine, 0, ctypes.byref(report), ctypes.byref(error)),
            error.message.decode(),
        )
        return events

    def start(self, slot: int, request: SlotRequest, asked: int | None = None) -> int:
        """Open a free slot for one request. Returns the generation that it got. asked: compute only so much for now."""
        self._generation += 1
        self.channel.write_request(slot, msgspec.structs.replace(request, generation=self._generation))
        count = len(request.prompt_ids) if asked is None else asked
        pushed = self.channel.push(
            [
                Command(abi.CommandKind.OPEN, slot, self._generation),
                Command(abi.CommandKind.PREFILL, slot, self._generation, 0, count),
            ]
        )
        if not pushed:
            raise AssertionError("the command ring is full")
        return self._generation

    def allow(self, slot: int, generation: int, position: int, tokens: Sequence[int]) -> None:
        """The mask of one output position: these tokens."""
        mask = sum(1 << token for token in tokens).to_bytes(self.channel.mask_bytes, "little")
        self.channel.write_mask(slot, position, mask)
        self.channel.push([Command(abi.CommandKind.SET, slot, generation, position)])

    def release_run(self, run: int) -> None:
        """Let go of a shared run."""
        self.channel.push([Command(abi.CommandKind.RELEASE_RUN, 0, 0, run)])

    def settle(self) -> list[Event]:
        """Turn until there is nothing to do for now. Returns what happened."""
        events: list[Event] = []
        worked = ctypes.c_uint32(1)
        while worked.value:
            self._require(self._library.c.clb_engine_turn(self._engine, ctypes.byref(worked)))
            events += self.channel.pop()
        return events

    def _require(self, status: int, message: str = "") -> None:
        # Not `assert`: this is no test module, so `python -O` would leave it out.
        if status != abi.Status.OK:
            raise AssertionError(f"{self._library.status_name(status)} {message}")

    def _take(self, event: Any, request: SlotRequest, answer: Answer) -> None:
        if event.kind == abi.EventKind.TOKEN:
            answer.records.append(self.channel.record(event.slot, event.record))
            self.channel.advance(event.slot, event.record, event.record + 1)
        if event.kind == abi.EventKind.FAILED:
            answer.status = event.status
        if _released(event):
            answer.finish = event.flags
            if request.flags & (abi.RequestFlag.POOL_MEAN | abi.RequestFlag.POOL_LAST):
                answer.pooled = self.channel.pooled(event.slot)
            if request.flags & abi.RequestFlag.PROMPT_LOGPROBS:
                answer.prompt = self.channel.prompt_records(event.slot, len(request.prompt_ids))


def _released(event: Any) -> bool:
    if event.kind in (abi.EventKind.OPENED, abi.EventKind.WAITING, abi.EventKind.SWITCHED):
        return False
    return event.kind != abi.EventKind.TOKEN or event.flags != 0


def ask(prompt: Sequence[int], max_tokens: int, *, top: int = 8, prompt_top: int = 0, **more: Any) -> SlotRequest:
    """A greedy request for all log-probabilities."""
    return SlotRequest(
        generation=0,
        prompt_ids=list(prompt),
        max_tokens=max_tokens,
        flags=abi.RequestFlag.LOGPROBS | abi.RequestFlag.PROMPT_LOGPROBS,
        top_logprobs=top,
        prompt_top_logprobs=prompt_top,
        **{"seed": 0, "temperature": 0.0, **more},
    )


def is_first(record: SlotRecord) -> bool:
    """Prompt position 0 has no prediction."""
    return math.isnan(record.logprob) and not record.top


def pool(prompt: Sequence[int], flag: abi.RequestFlag, **more: Any) -> SlotRequest:
    """A request for the prompt's pooled hidden state."""
    return SlotRequest(generation=0, seed=0, prompt_ids=list(prompt), max_tokens=0, flags=flag, **more)
