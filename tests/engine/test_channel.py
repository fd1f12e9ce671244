"""The channel carries requests down and results up; the engine on its other end runs in this process, turn by turn."""

from __future__ import annotations

import ctypes
import math
import os
from typing import TYPE_CHECKING

import pytest
from descriptors import open_descriptors

from colibrid.config.settings import BatchSettings, ModelSettings, Settings
from colibrid.engine import abi
from colibrid.engine.channel import ChannelShape, Command, DaemonChannel, EngineChannel, Event, SlotRequest
from colibrid.engine.configure import EngineSetup
from colibrid.engine.library import KernelModules, Library
from colibrid.engine.spec import channel_shape, make_spec
from colibrid.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from colibrid.model.pack import Pack

PROMPT = (5, 6, 7, 8, 9)


class Pair:
    """Both ends in one process."""

    def __init__(self, library: Library, pack: Pack) -> None:
        settings = Settings(batch=BatchSettings(slots=2), model=ModelSettings(max_seq_len=1024))
        spec = make_spec(settings, str(pack.path), pack.manifest)
        self.library = library
        self.daemon = DaemonChannel(library, channel_shape(spec, pack.manifest))
        self.engine_end = EngineChannel(library, self.daemon.fd, self.daemon.shape)
        self.engine = ctypes.c_void_p()
        setup = EngineSetup(library, spec, pack.manifest)
        setup.config.channel_base = self.engine_end.base
        setup.config.channel_bytes = self.engine_end.size
        setup.config.dir_fd = os.open(pack.path, os.O_RDONLY | os.O_DIRECTORY)
        error = abi.Error()
        with KernelModules() as modules:
            setup.use_modules(modules)
            status = library.c.clb_engine_open(
                ctypes.byref(setup.config), ctypes.byref(self.engine), ctypes.byref(error)
            )
        os.close(setup.config.dir_fd)
        assert status == 0, error.message

    def turn(self) -> bool:
        worked = ctypes.c_uint32()
        assert self.library.c.clb_engine_turn(self.engine, ctypes.byref(worked)) == 0
        return bool(worked.value)

    def start(self, slot: int, request: SlotRequest) -> None:
        self.daemon.write_request(slot, request)
        count = len(request.prompt_ids)
        assert self.daemon.push(
            [
                Command(abi.CommandKind.OPEN, slot, request.generation),
                Command(abi.CommandKind.PREFILL, slot, request.generation, 0, count),
            ]
        )

    def run(self) -> list[Event]:
        """All events until there is no more work."""
        events: list[Event] = []
        while self.turn():
            events += self.daemon.pop()
        return events + self.daemon.pop()

    def close(self) -> None:
        self.library.c.clb_engine_close(self.engine)
        self.engine_end.close()
        self.daemon.close()


@pytest.fixture
def pair(library: Library, bundled_pack: Pack) -> Iterator[Pair]:
    pair = Pair(library, bundled_pack)
    yield pair
    pair.close()


def shape(**changes: int) -> ChannelShape:
    values = {"slots": 2, "layers": 1, "vocab_size": 100, "hidden": 8, "max_experts": 2, "max_seq_len": 64, **changes}
    return ChannelShape(**values)


def test_a_request_runs_from_open_to_its_last_token(pair: Pair) -> None:
    """OPENED, then one TOKEN event for each output, the last with a finish flag."""
    pair.start(1, SlotRequest(generation=1, seed=0, prompt_ids=PROMPT, max_tokens=4, temperature=0.0))
    events = pair.run()
    assert [event.kind for event in events] == [abi.EventKind.OPENED, *[abi.EventKind.TOKEN] * 4]
    tokens = events[1:]
    assert [event.position for event in tokens] == [0, 1, 2, 3]
    assert [event.record for event in tokens] == [0, 1, 2, 3]
    assert [event.flags for event in tokens] == [0, 0, 0, abi.Finish.LENGTH]
    assert {(event.slot, event.generation) for event in events} == {(1, 1)}


def test_records_hold_logprobs_and_the_likeliest_tokens(pair: Pair) -> None:
    """Greedy: the token is the likeliest one, its logprob the first of the list, which descends."""
    flags = abi.RequestFlag.LOGPROBS | abi.RequestFlag.PROMPT_LOGPROBS
    pair.start(
        0,
        SlotRequest(
            generation=1,
            seed=0,
            prompt_ids=PROMPT,
            max_tokens=2,
            temperature=0.0,
            flags=flags,
            top_logprobs=5,
            prompt_top_logprobs=2,
        ),
    )
    tokens = [event for event in pair.run() if event.kind == abi.EventKind.TOKEN]
    for event in tokens:
        record = pair.daemon.record(0, event.record)
        assert record.token == event.token
        assert record.top[0] == (record.token, record.logprob)
        assert len(record.top) == 5
        assert [value for _, value in record.top] == sorted((value for _, value in record.top), reverse=True)
    prompt = pair.daemon.prompt_records(0, len(PROMPT))
    assert math.isnan(prompt[0].logprob)
    assert prompt[0].top == ()
    assert all(record.logprob <= record.top[0][1] <= 0 and len(record.top) == 2 for record in prompt[1:])


def test_usage_counts_every_token_and_expert(pair: Pair, bundled_pack: Pack) -> None:
    """Assignments are k per token and MoE layer, over the prompt and all outputs but the last."""
    per_token = sum(layer.experts_per_token for layer in bundled_pack.manifest.layers)
    pair.start(0, SlotRequest(generation=1, seed=0, prompt_ids=PROMPT, max_tokens=3, temperature=0.0))
    pair.run()
    usage = pair.daemon.usage(0)
    assert usage.assignments == per_token * (len(PROMPT) + 2)
    assert (usage.trimmed, usage.dropped, usage.cached_tokens) == (0, 0, 0)


def test_every_value_of_a_request_reaches_the_engine(pair: Pair) -> None:
    """Bias, stop ids and expert policy of the block change what comes out."""
    plain = SlotRequest(generation=1, seed=0, prompt_ids=PROMPT, max_tokens=3, temperature=0.0)
    pair.start(0, plain)
    first = next(event.token for event in pair.run() if event.kind == abi.EventKind.TOKEN)
    banned = SlotRequest(
        generation=2, seed=0, prompt_ids=PROMPT, max_tokens=3, temperature=0.0, bias=[(first, -100.0), (77, 100.0)]
    )
    pair.start(0, banned)
    assert next(event.token for event in pair.run() if event.kind == abi.EventKind.TOKEN) == 77
    stopped = SlotRequest(generation=3, seed=0, prompt_ids=PROMPT, max_tokens=3, temperature=0.0, stop_ids=[first])
    pair.start(0, stopped)
    tokens = [event for event in pair.run() if event.kind == abi.EventKind.TOKEN]
    assert [(event.token, event.flags) for event in tokens] == [(first, abi.Finish.STOP)]
    layers = pair.daemon.shape.layers
    narrow = SlotRequest(
        generation=4, seed=0, prompt_ids=PROMPT, max_tokens=1, temperature=0.0, policy=[(1, 0.0)] * layers
    )
    pair.start(0, narrow)
    pair.run()
    assert pair.daemon.usage(0).assignments == layers * len(PROMPT)
    assert pair.daemon.usage(0).trimmed > 0


def test_a_full_ring_pauses_its_slot_only(pair: Pair) -> None:
    """Nothing unread is overwritten: the slot waits for its reader, says so through advance, and then goes on."""
    ring = pair.daemon.shape.result_records
    pair.start(0, SlotRequest(generation=1, seed=0, prompt_ids=PROMPT, max_tokens=ring + 5, temperature=0.0))
    tokens = [event for event in pair.run() if event.kind == abi.EventKind.TOKEN]
    assert len(tokens) == ring
    pair.start(1, SlotRequest(generation=1, seed=0, prompt_ids=PROMPT, max_tokens=2, temperature=0.0))
    assert {event.slot for event in pair.run()} == {1}
    assert pair.daemon.advance(0, 0, ring) is True
    rest = [event for event in pair.run() if event.kind == abi.EventKind.TOKEN]
    assert [event.position for event in rest] == list(range(ring, ring + 5))
    assert pair.daemon.advance(0, ring, ring + 5) is False


def test_a_masked_slot_waits_for_its_masks_alone(pair: Pair) -> None:
    """Each position takes its own mask; a neighbour runs to its end meanwhile."""
    flags = abi.RequestFlag.MASKED
    pair.start(0, SlotRequest(generation=1, seed=0, prompt_ids=PROMPT, max_tokens=4, flags=flags))
    pair.start(1, SlotRequest(generation=1, seed=0, prompt_ids=PROMPT, max_tokens=9))
    assert sum(event.slot == 1 and event.kind == abi.EventKind.TOKEN for event in pair.run()) == 9
    for position, token in enumerate((0, 31, 32, 777)):
        mask = bytearray(pair.daemon.mask_bytes)
        mask[token // 8] |= 1 << token % 8
        pair.daemon.write_mask(0, position, bytes(mask))
        assert pair.daemon.push([Command(abi.CommandKind.SET, 0, 1, position)])
        assert [event.token for event in pair.run()] == [token]


def test_a_mask_fills_its_place_and_no_more(library: Library) -> None:
    """Masks of both halves lie side by side; another size is refused and writes nothing."""
    channel = DaemonChannel(library, shape(vocab_size=65))
    start, end = channel.layout.requests, channel.layout.results
    before = channel._map.bytes[start:end]
    for size in (0, 8, 16):
        with pytest.raises(ValueError, match="65 token ids take 12"):
            channel.write_mask(0, 0, bytes(size))
    assert channel._map.bytes[start:end] == before
    channel.write_mask(0, 6, b"\x01" * 12)
    channel.write_mask(0, 7, b"\x02" * 12)
    place = start + channel.layout.request_mask
    assert channel._map.bytes[place : place + 24] == b"\x01" * 12 + b"\x02" * 12
    assert sum(channel._map.bytes[start:end]) == sum(before) + 12 + 24
    channel.close()


def test_stats_and_phase_are_the_engines(pair: Pair) -> None:
    """Counters in the header move with the work, and nothing was allocated after open."""
    phase, stats = pair.daemon.stats()
    assert phase == abi.Phase.READY
    before = stats.progress
    pair.start(0, SlotRequest(generation=1, seed=0, prompt_ids=PROMPT, max_tokens=2))
    pair.run()
    _, stats = pair.daemon.stats()
    assert stats.progress > before
    assert (stats.tokens_prefill, stats.requests_done, stats.allocations_after_open) == (len(PROMPT), 1, 0)


def test_commands_are_pushed_all_or_none(library: Library) -> None:
    """A push that does not fit leaves the ring as it was."""
    channel = DaemonChannel(library, shape())
    capacity = channel.layout.command_capacity
    close = Command(abi.CommandKind.CLOSE, 0, 1)
    assert channel.push([close] * (capacity - 1))
    assert not channel.push([close, close])
    assert channel.push([close])
    assert not channel.push([close])
    channel.close()


@pytest.mark.parametrize(
    "request_",
    [
        SlotRequest(generation=1, seed=0, prompt_ids=[1] * 65, max_tokens=1),
        SlotRequest(generation=1, seed=0, prompt_ids=[1], max_tokens=1, bias=[(1, 0.0)] * (abi.MAX_BIAS + 1)),
        SlotRequest(generation=1, seed=0, prompt_ids=[1], max_tokens=1, stop_ids=[1] * (abi.MAX_STOP_IDS + 1)),
        SlotRequest(generation=1, seed=0, prompt_ids=[1], max_tokens=1, policy=[(1, 0.0)] * 2),
    ],
)
def test_lists_longer_than_the_block_are_refused(request_: SlotRequest, library: Library) -> None:
    """No list can write beyond its block; the neighbour's block is untouched."""
    channel = DaemonChannel(library, shape())
    start, end = channel.layout.requests, channel.layout.results
    before = channel._map.bytes[start:end]
    with pytest.raises(ValueError, match="do not fit"):
        channel.write_request(0, request_)
    assert channel._map.bytes[start:end] == before
    channel.close()


def test_shapes_over_a_limit_are_refused(library: Library) -> None:
    """Slots beyond the engine's limit give an error that names the settings."""
    with pytest.raises(EngineError, match=r"lower batch\.slots"):
        DaemonChannel(library, shape(slots=65))


def test_the_engine_refuses_memory_of_another_shape(library: Library) -> None:
    """Size and header are verified before the engine uses them."""
    channel = DaemonChannel(library, shape())
    with pytest.raises(EngineError, match="expected"):
        EngineChannel(library, channel.fd, shape(slots=3))
    with pytest.raises(EngineError, match="not valid"):
        EngineChannel(library, channel.fd, shape(vocab_size=101))
    channel.close()


def test_close_leaves_no_descriptor(library: Library) -> None:
    """Opening and closing channels changes neither descriptors nor mappings."""
    before = open_descriptors()
    for _ in range(20):
        DaemonChannel(library, shape()).close()
    assert open_descriptors() == before
