"""The shared memory between daemon and engine: request blocks and commands down, events and result blocks up.

Layout (engine_c/include/colibri.h): header, command ring, event ring, request blocks, result blocks. Offsets come
from clb_channel_plan. Rings are touched by the C library only, so that memory order is right on every machine;
blocks are plain bytes whose owner is fixed at every moment, and Python reads and writes these itself.

DaemonChannel belongs to the event loop's thread. EngineChannel belongs to the worker's main thread.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from colibrid.engine import abi
from colibrid.errors import EngineError

if TYPE_CHECKING:
    from colibrid.engine.library import Library

RESULT_RECORDS = 128  # unread records of one slot before it sits out; 176 bytes each
_POP_EVENTS = 512
_EVENT = struct.Struct("<IIQQIiIi")
_RECORD = struct.Struct(f"<IifI{abi.MAX_TOP_LOGPROBS}i{abi.MAX_TOP_LOGPROBS}f")
_PROMPT_RECORD = struct.Struct(f"<fI{abi.MAX_TOP_LOGPROBS}i{abi.MAX_TOP_LOGPROBS}f")
_U64 = struct.Struct("<Q")
_BIAS = struct.Struct("<if")
_POLICY = struct.Struct("<If")


class Command(NamedTuple):
    """One clb_command."""

    kind: abi.CommandKind
    slot: int
    generation: int
    start: int = 0
    tokens: int = 0


class Event(NamedTuple):
    """One clb_event."""

    kind: int
    slot: int
    generation: int
    record: int
    position: int
    token: int
    flags: int
    status: int


Fields = tuple[int, int, int, int, int, int, int, int]  # of an Event: to make one with names takes longer than its use


class SlotRecord(NamedTuple):
    """One clb_record or clb_prompt_record without its padding. `token` is -1 in a prompt record."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob)


class SlotUsage(NamedTuple):
    """Totals of one request from its result block."""

    assignments: int
    trimmed: int
    dropped: int
    prompt_records: int
    cached_tokens: int
    weights_generation: int = 0  # that the first position was computed with


class SlotRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What one request block holds (clb_request). The writer has checked ranges; C checks them again."""

    generation: int
    seed: int
    prompt_ids: Sequence[int]
    max_tokens: int
    min_tokens: int = 0
    choice: int = 0
    flags: abi.RequestFlag = abi.RequestFlag(0)
    top_logprobs: int = 0
    prompt_top_logprobs: int = 0
    bias: Sequence[tuple[int, float]] = ()
    stop_ids: Sequence[int] = ()
    policy: Sequence[tuple[int, float]] = ()  # (k, threshold) of each layer
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    prefix_run: int = 0  # 0: none
    prefix_tokens: int = 0
    publish_run: int = 0  # 0: none


class ChannelShape(msgspec.Struct, frozen=True, kw_only=True):
    """What sizes a channel (clb_channel_config)."""

    slots: int
    layers: int
    vocab_size: int
    hidden: int
    max_experts: int
    max_seq_len: int
    result_records: int = RESULT_RECORDS

    def to_c(self) -> abi.ChannelConfig:
        """As C reads it."""
        return abi.ChannelConfig(
            abi_version=abi.ABI_VERSION,
            struct_bytes=ctypes.sizeof(abi.ChannelConfig),
            slots=self.slots,
            layers=self.layers,
            vocab_size=self.vocab_size,
            hidden=self.hidden,
            max_experts=self.max_experts,
            max_seq_len=self.max_seq_len,
            result_records=self.result_records,
        )


def plan_channel(library: Library, shape: ChannelShape) -> abi.ChannelLayout:
    """Sizes and offsets for `shape`. EngineError if a limit of the engine is exceeded."""
    layout = abi.ChannelLayout()
    status = library.c.clb_channel_plan(ctypes.byref(shape.to_c()), ctypes.byref(layout))
    if status != abi.Status.OK:
        raise EngineError(
            f"the engine refuses {shape.slots} slots of {shape.max_seq_len} tokens ({library.status_name(status)}); "
            "lower batch.slots or model.max_seq_len"
        )
    return layout


class _Mapping:
    """One shared mapping of a memfd. `base` is its address; no pointer may outlive close()."""

    def __init__(self, fd: int, size: int) -> None:
        self.bytes = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        anchor = ctypes.c_char.from_buffer(self.bytes)
        self.base = ctypes.addressof(anchor)
        del anchor  # the mapping can be closed again; its address stays until then

    def close(self) -> None:
        self.base = 0
        self.bytes.close()


class DaemonChannel:
    """The daemon's end. Owns the memfd and its mapping until close(); calls after close() are errors of the caller."""

    def __init__(self, library: Library, shape: ChannelShape) -> None:
        """Create and format the memory. EngineError if the shape exceeds a limit or memory is short."""
        self.shape = shape
        self.advance_step = max(1, shape.result_records // 8)  # records read before `advance` is worth a call
        self.layout = plan_channel(library, shape)
        self._library = library
        size = int(self.layout.total_bytes)
        self.fd = os.memfd_create("colibrid-channel", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self.fd, 0, size)  # its pages, too: none is asked for once requests come
            self._map = _Mapping(self.fd, size)
        except OSError as error:
            os.close(self.fd)
            raise EngineError(
                f"no memory for a channel of {size} bytes ({error.strerror}); lower batch.slots or model.max_seq_len"
            ) from error
        status = library.c.clb_channel_init(self._map.base, size, ctypes.byref(shape.to_c()))
        if status != abi.Status.OK:
            self.close()
            raise EngineError(f"the channel cannot be formatted ({library.status_name(status)}); report this as a bug")
        self._events = (abi.Event * _POP_EVENTS)()
        self._event_view = memoryview(self._events).cast("B")
        self._stats = abi.Stats()

    def close(self) -> None:
        """Give the memory back. The engine's own mapping is not affected."""
        self._map.close()
        os.close(self.fd)

    def write_request(self, slot: int, request: SlotRequest) -> None:
        """Fill the slot's request block. The slot must be released and not yet opened again.

        ValueError if a list is longer than the block has room for; the block is then unchanged.
        """
        limits = (
            (len(request.prompt_ids), self.shape.max_seq_len, "prompt tokens"),
            (len(request.bias), abi.MAX_BIAS, "biases"),
            (len(request.stop_ids), abi.MAX_STOP_IDS, "stop ids"),
            (len(request.policy), self.shape.layers, "layer policies"),
        )
        for count, limit, name in limits:
            if count > limit:
                raise ValueError(f"{count} {name} do not fit the block's {limit}")
        layout = self.layout
        start = self._request_offset(slot)
        self._write(start + layout.request_tokens, array("i", request.prompt_ids).tobytes())
        self._write(start + layout.request_bias, b"".join(_BIAS.pack(*entry) for entry in request.bias))
        self._write(start + layout.request_stops, array("i", request.stop_ids).tobytes())
        policy = [*request.policy, *[(0, 0.0)] * (self.shape.layers - len(request.policy))]
        self._write(start + layout.request_policy, b"".join(_POLICY.pack(*entry) for entry in policy))
        self._write(start, bytes(_request_head(request)))

    @property
    def mask_bytes(self) -> int:
        """Bytes of a mask: a bit for each token id, in whole words of 32."""
        return (self.shape.vocab_size + 31) // 32 * 4

    def write_mask(self, slot: int, position: int, mask: bytes) -> None:
        """Put the mask for output position `position` into the slot's block, before a SET command tells of it.

        Token id i is allowed iff bit i % 8 of byte i // 8 is set. The block holds the masks of two neighbouring
        positions: the token two positions before must have arrived. ValueError if the mask has not mask_bytes.
        """
        size = self.mask_bytes
        if len(mask) != size:
            raise ValueError(f"a mask of {len(mask)} bytes; {self.shape.vocab_size} token ids take {size}")
        self._write(self._request_offset(slot) + self.layout.request_mask + position % 2 * size, mask)

    def push(self, commands: Sequence[Command]) -> bool:
        """Publish all commands or none; False if the ring has no room. The caller then wakes the engine."""
        array_type = abi.Command * len(commands)
        entries = array_type(*(abi.Command(*command) for command in commands))
        status = self._library.c.clb_command_push(self._map.base, entries, len(commands))
        if status == abi.Status.FULL:
            return False
        if status != abi.Status.OK:
            raise EngineError(
                f"the engine refuses commands ({self._library.status_name(status)}); report this as a bug"
            )
        return True

    def pop(self) -> list[Event]:
        """All events that have arrived."""
        return list(map(Event._make, self.pop_fields()))

    def pop_fields(self) -> list[Fields]:
        """As pop, for whoever takes one event a token."""
        found: list[Fields] = []
        while True:
            count = self._library.c.clb_event_pop(self._map.base, self._events, _POP_EVENTS)
            found.extend(_EVENT.iter_unpack(self._event_view[: count * _EVENT.size]))
            if count < _POP_EVENTS:
                return found

    def record(self, slot: int, index: int) -> SlotRecord:
        """Record `index` (counted from the slot's open) of the slot's ring; announced by an event and not advanced over."""
        return read_records(self.raw_record(slot, index))[0]

    def raw_record(self, slot: int, index: int) -> bytes:
        """As record, but a copy for `read_records`: it takes a tenth of the memory of its values."""
        place = index % self.shape.result_records
        offset = self._result_offset(slot) + self.layout.result_records + place * _RECORD.size
        return self._map.bytes[offset : offset + _RECORD.size]

    def prompt_records(self, slot: int, count: int) -> list[SlotRecord]:
        """The first `count` prompt records, complete once the first token or the end was announced."""
        return self.prompt_reader(slot, count)()

    def prompt_reader(self, slot: int, count: int) -> Callable[[], list[SlotRecord]]:
        """As prompt_records: fixed now, and unpacked, which takes long, when the result is called, by any thread."""
        offset = self._result_offset(slot) + self.layout.result_prompt
        block = self._map.bytes[offset : offset + count * _PROMPT_RECORD.size]
        return lambda: [
            SlotRecord(-1, values[0], _top_list(values[1], values[2:])) for values in _PROMPT_RECORD.iter_unpack(block)
        ]

    def pooled(self, slot: int) -> bytes:
        """The pooled vector, float32 of this machine: complete once the end of a request that pools was announced."""
        offset = self._result_offset(slot) + self.layout.result_pooled
        return self._map.bytes[offset : offset + 4 * self.shape.hidden]

    def usage(self, slot: int) -> SlotUsage:
        """Totals of the slot's request up to now. Final once its release was announced, until it is opened again."""
        offset = self._result_offset(slot)
        result = abi.Result.from_buffer_copy(self._map.bytes[offset : offset + ctypes.sizeof(abi.Result)])
        return SlotUsage(
            result.assignments,
            result.trimmed,
            result.dropped,
            result.prompt_records,
            result.cached_tokens,
            result.weights_generation,
        )

    def expert_counts(self, slot: int) -> memoryview[int]:
        """Assignments of the slot's request by layer and expert, layers x max_experts: a copy."""
        offset = self._result_offset(slot) + self.layout.result_counts
        count = self.shape.layers * self.shape.max_experts
        return memoryview(self._map.bytes[offset : offset + 4 * count]).cast("I")

    def advance(self, slot: int, old_tail: int, tail: int) -> bool:
        """Records from `old_tail` to below `tail` have been read and may be overwritten.

        True if the ring was full, so that the engine may be asleep for want of room and must be woken.
        """
        self._library.c.clb_result_advance(self._map.base, slot, tail)
        (head,) = _U64.unpack_from(self._map.bytes, self._result_offset(slot) + abi.Result.head.offset)
        return bool(head - old_tail >= self.shape.result_records)

    def stats(self) -> tuple[abi.Phase, abi.Stats]:
        """The engine's phase and counters. The returned counters are overwritten by the next call."""
        phase = self._library.c.clb_channel_stats(self._map.base, ctypes.byref(self._stats))
        return abi.Phase(phase), self._stats

    def _write(self, offset: int, data: bytes) -> None:
        self._map.bytes[offset : offset + len(data)] = data

    def _request_offset(self, slot: int) -> int:
        return int(self.layout.requests + slot * self.layout.request_stride)

    def _result_offset(self, slot: int) -> int:
        return int(self.layout.results + slot * self.layout.result_stride)


class EngineChannel:
    """The engine's end of memory that the daemon has formatted."""

    def __init__(self, library: Library, fd: int, shape: ChannelShape) -> None:
        """Map and verify. EngineError if size or contents are not what `shape` says."""
        size = int(plan_channel(library, shape).total_bytes)
        found = os.fstat(fd).st_size
        if found != size:
            raise EngineError(f"the channel has {found} bytes, expected {size}; daemon and engine differ: reinstall")
        self._map = _Mapping(fd, size)
        self.size = size
        status = library.c.clb_channel_check(self._map.base, size, ctypes.byref(shape.to_c()))
        if status != abi.Status.OK:
            self.close()
            raise EngineError(
                f"the channel is not valid ({library.status_name(status)}); daemon and engine differ: reinstall"
            )

    @property
    def base(self) -> int:
        """Address of the mapping, for clb_engine_config."""
        return self._map.base

    def close(self) -> None:
        """Unmap; the engine must be closed before."""
        self._map.close()


def _request_head(request: SlotRequest) -> abi.Request:
    return abi.Request(
        generation=request.generation,
        seed=request.seed,
        flags=request.flags,
        choice=request.choice,
        prompt_tokens=len(request.prompt_ids),
        max_tokens=request.max_tokens,
        min_tokens=request.min_tokens,
        top_logprobs=request.top_logprobs,
        prompt_top_logprobs=request.prompt_top_logprobs,
        bias_count=len(request.bias),
        stop_count=len(request.stop_ids),
        temperature=request.temperature,
        top_p=request.top_p,
        min_p=request.min_p,
        top_k=request.top_k,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        prefix_run=request.prefix_run,
        prefix_tokens=request.prefix_tokens,
        publish_run=request.publish_run,
    )


def read_records(raw: bytes | bytearray) -> list[SlotRecord]:
    """The values of DaemonChannel.raw_record, of several one after another."""
    return [SlotRecord(one[1], one[2], _top_list(one[3], one[4:])) for one in _RECORD.iter_unpack(raw)]


def _top_list(count: int, values: Sequence[float]) -> tuple[tuple[int, float], ...]:
    """(ids..., logprobs...) of MAX_TOP_LOGPROBS each, cut to `count` pairs."""
    size = abi.MAX_TOP_LOGPROBS
    return tuple(zip(map(int, values[:count]), values[size : size + count], strict=True))
