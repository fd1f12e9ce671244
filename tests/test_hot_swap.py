"""Experts that are replaced while requests are served: nothing fails, and every answer is that of the experts that the
positions were computed with."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from in_process import InProcessEngine, crc32c
from live_server import serving
from replay import replay

import colibrid
from colibrid.batch.request import ExpertUsage, GenerateRequest, Sampling
from colibrid.errors import RequestError
from colibrid.model.convert import convert
from colibrid.model.pack import open_pack
from colibrid.model.precision import parse_plan

if TYPE_CHECKING:
    from colibrid.batch.pool import EnginePool
    from colibrid.engine.channel import Event
    from colibrid.engine.library import Library
    from colibrid.model.pack import Pack

LAYER, EXPERT = 1, 2
STREAMS, SWAPS = 32, 100
MAX_SEQ_LEN = 256


@pytest.fixture(scope="module")
def folder(bundled_pack: Pack, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two experts with descriptions: `old.bin` is the pack's own, `new.bin` another one of the same layer."""
    target = tmp_path_factory.mktemp("experts")
    files = {file.name: file for file in bundled_pack.manifest.files}
    names = bundled_pack.manifest.layers[LAYER].expert_files
    for name, source in (("old.bin", names[EXPERT]), ("new.bin", names[EXPERT + 1])):
        shutil.copy(bundled_pack.path / source, target / name)
        (target / f"{name}.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(files[source], name=name)))
    return target


@pytest.fixture(scope="module")
def new_pack(bundled_pack: Pack, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Pack:
    """The bundled pack with the other expert in its folder."""
    target = tmp_path_factory.mktemp("packs") / "new.colibri"
    shutil.copytree(bundled_pack.path, target)
    names = bundled_pack.manifest.layers[LAYER].expert_files
    shutil.copy(folder / "new.bin", target / names[EXPERT])
    manifest = msgspec.json.decode((target / "colibri.json").read_bytes())
    files = {file["name"]: file for file in manifest["files"]}
    files[names[EXPERT]].update({key: files[names[EXPERT + 1]][key] for key in ("sha256", "crc32c")})
    (target / "colibri.json").write_bytes(msgspec.json.encode(manifest))
    return open_pack(target)


def request_of(number: int) -> GenerateRequest:
    numbers = random.Random(number)
    return GenerateRequest(
        request_id=str(number),
        prompt_ids=tuple(numbers.randrange(4000) for _ in range(numbers.choice((3, 20, 100)))),
        max_tokens=numbers.randrange(8, 80),
        sampling=Sampling(seed=number, temperature=1.0),
    )


class Served(msgspec.Struct):
    """One request, and what it got."""

    request: GenerateRequest
    tokens: list[int]
    usage: ExpertUsage


async def load(pool: EnginePool, over: asyncio.Event, first: int) -> list[Served]:
    """One stream after another, until it is over."""
    served = []
    number = first
    while not over.is_set():
        request = request_of(number)
        tokens = []
        async with pool.submit(request) as generation:
            async for records in generation:
                tokens += [record.token for record in records]
        assert generation.result is not None
        assert generation.result.completion_tokens == len(tokens)
        served.append(Served(request, tokens, generation.result.experts))
        number += STREAMS
    return served


def solo(engine: InProcessEngine, request: GenerateRequest, usage: ExpertUsage) -> list[int]:
    return replay(engine, request, msgspec.structs.replace(usage, weights_generation=0, switches=()), lambda *_: [])


def descriptors(engine_pid: int | None) -> tuple[int, int]:
    """Open ones of this process and of the engine's."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{engine_pid}/fd"))


async def test_a_hundred_swaps_under_32_streams(
    library: Library, bundled_pack: Pack, new_pack: Pack, folder: Path
) -> None:
    """No request fails; streams that saw one set of experts are as that pack's alone, those across a switch as a replay
    that switches at the reported positions; nothing is allocated, and the swap slots come back."""
    settings = {
        "batch": {"slots": STREAMS, "prefix_reuse": "off"},
        "model": {"max_seq_len": MAX_SEQ_LEN},
        "experts": {"swap_slots": 1, "swap_folders": [str(folder)]},
        "memory": {"kv_tokens": STREAMS * MAX_SEQ_LEN},
    }
    over = asyncio.Event()
    async with serving(library, bundled_pack, **settings) as live:
        pool = live.scheduler
        assert pool.swaps is not None
        fingerprint = pool.info.fingerprint
        await pool.swaps.replace(LAYER, EXPERT, str(folder / "old.bin"), None)  # threads and files of the first time
        held = descriptors(live.fleet.supervisors[0].engine_pid)
        loads = [asyncio.create_task(load(pool, over, 1000 + stream)) for stream in range(STREAMS)]
        streams = 0
        for swap in range(SWAPS):
            outcome = await pool.swaps.replace(
                LAYER, EXPERT, str(folder / ("old.bin" if swap % 2 else "new.bin")), None
            )
            assert outcome.version.weights_generation == swap + 2
            assert outcome.free_slots == 1
            assert (pool.info.fingerprint == fingerprint) == (swap % 2 == 1)
            streams += outcome.streams
            await asyncio.sleep(0.01)
        over.set()
        served = [one for each in await asyncio.gather(*loads) for one in each]
        (stats,) = [one.memory for one in pool.engines]
        assert stats is not None
        session = pool.lanes[0].scheduler._session
        assert session is not None
        counters = session.channel.stats()[1]
        assert (counters.allocations_after_open, counters.requests_failed) == (0, 0)
        assert counters.weights_generation == SWAPS + 1
        async with asyncio.timeout(60):  # a thread may be about to close one
            while descriptors(live.fleet.supervisors[0].engine_pid) != held:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert pool.counts.failed == 0
        live.fleet.check()
    across = [one for one in served if one.usage.switches]
    before = [one for one in served if not one.usage.switches and one.usage.weights_generation % 2 == 1]
    after = [one for one in served if not one.usage.switches and one.usage.weights_generation % 2 == 0]
    assert streams >= len(across) > STREAMS
    verify(bundled_pack, new_pack, folder, across, before, after)


def verify(old: Pack, new: Pack, folder: Path, across: list[Served], before: list[Served], after: list[Served]) -> None:
    options = {"slots": 1, "max_seq_len": MAX_SEQ_LEN}
    with InProcessEngine(old.path, **options) as engine:
        for one in before[:40]:
            assert solo(engine, one.request, one.usage) == one.tokens
    with InProcessEngine(new.path, **options) as engine:
        for one in after[:40]:
            assert solo(engine, one.request, one.usage) == one.tokens
    is_new = False

    def bring(engine: InProcessEngine, generation: int) -> list[Event]:
        nonlocal is_new
        if (generation % 2 == 0) == is_new:
            return []
        is_new = not is_new
        return engine.replace(LAYER, EXPERT, folder / ("new.bin" if is_new else "old.bin"), turns=1)

    with InProcessEngine(old.path, swap_slots=1, **options) as engine:
        for one in sorted(across, key=lambda one: -len(one.usage.switches))[:60]:
            assert replay(engine, one.request, one.usage, bring) == one.tokens
        assert engine.stats().allocations_after_open == 0


async def test_computed_beginnings_from_before_are_not_used(library: Library, bundled_pack: Pack, folder: Path) -> None:
    """A prompt that was held is computed anew after a swap, and from then on held again."""
    settings = {
        "batch": {"slots": 4},
        "model": {"max_seq_len": MAX_SEQ_LEN},
        "experts": {"swap_slots": 1, "swap_folders": [str(folder)]},
    }
    request = msgspec.structs.replace(request_of(1), prompt_ids=tuple(range(100)), max_tokens=60)

    async def ask(pool: EnginePool) -> tuple[int, list[int]]:
        async with pool.submit(request) as generation:
            tokens = [record.token async for records in generation for record in records]
        assert generation.result is not None
        return generation.result.cached_tokens, tokens

    async with serving(library, bundled_pack, **settings) as live:
        pool = live.scheduler
        assert pool.swaps is not None
        first = await ask(pool)
        assert first[0] == 0
        assert await ask(pool) == (99, first[1])
        await pool.swaps.replace(LAYER, EXPERT, str(folder / "new.bin"), None)
        changed = await ask(pool)
        assert changed[0] == 0
        assert changed[1] != first[1]
        assert await ask(pool) == (99, changed[1])
        await pool.swaps.replace(LAYER, EXPERT, str(folder / "old.bin"), None)
        assert await ask(pool) == first


async def test_a_restarted_engine_gets_the_experts_again(library: Library, bundled_pack: Pack, folder: Path) -> None:
    """An engine that died comes back with what has replaced the pack's experts, and refuses to without it."""
    settings = {
        "batch": {"slots": 4},
        "model": {"max_seq_len": MAX_SEQ_LEN},
        "experts": {"swap_slots": 1, "swap_folders": [str(folder)]},
    }
    request = request_of(5)

    async def ask(pool: EnginePool) -> list[int]:
        async with pool.submit(request) as generation:
            return [record.token async for records in generation for record in records]

    async with serving(library, bundled_pack, **settings) as live:
        pool, supervisor = live.scheduler, live.fleet.supervisors[0]
        assert pool.swaps is not None
        first = await ask(pool)
        for expert in range(4):  # each next one waits until the events of the one before have been read
            await pool.swaps.replace(LAYER, (EXPERT + expert) % 8, str(folder / "new.bin"), None)
        changed = await ask(pool)
        assert changed != first
        supervisor.end("a test")
        await asyncio.sleep(0)
        async with asyncio.timeout(120):
            await live.fleet.wait_ready()
        assert await ask(pool) == changed
        assert supervisor.readiness.restarts == 1


@pytest.mark.parametrize(
    ("layer", "expert", "file", "param", "text"),
    [
        (9, 0, "new.bin", "layer", "the model has 0 to"),
        (LAYER, 99, "new.bin", "expert", "has 0 to"),
        (LAYER, EXPERT, "broken.bin", "file", "crc32c"),
        (LAYER, EXPERT, "../new.bin", "file", "absolute path"),
        (LAYER, EXPERT, None, "file", "Neither"),
    ],
)
async def test_what_is_wrong_is_refused(
    library: Library, bundled_pack: Pack, folder: Path, layer: int, expert: int, file: str | None, param: str, text: str
) -> None:
    """A damaged file, a place that is not there and a path from elsewhere leave the daemon as it was."""
    damaged = bytearray((folder / "new.bin").read_bytes())
    damaged[1000] ^= 1
    (folder / "broken.bin").write_bytes(damaged)
    described = msgspec.json.decode((folder / "new.bin.json").read_bytes())
    del described["sha256"]
    (folder / "broken.bin.json").write_bytes(msgspec.json.encode(described))
    settings = {
        "batch": {"slots": 2},
        "model": {"max_seq_len": MAX_SEQ_LEN},
        "experts": {"swap_slots": 1, "swap_folders": [str(folder)]},
    }
    async with serving(library, bundled_pack, **settings) as live:
        pool = live.scheduler
        assert pool.swaps is not None
        with pytest.raises(RequestError, match=text) as refused:
            await pool.swaps.replace(layer, expert, None if file is None else f"{folder}/{file}", None)
        assert refused.value.param == param
        assert pool.swaps.versions == ()
        assert (await pool.swaps.replace(LAYER, EXPERT, str(folder / "new.bin"), None)).free_slots == 1


async def test_two_engines_switch_together(library: Library, bundled_pack: Pack, folder: Path) -> None:
    """Whichever engine serves a request, its text is that of the experts that all have; one that died comes back so."""
    settings = {
        "engine": {"replicas": 2},
        "batch": {"slots": 2},
        "model": {"max_seq_len": MAX_SEQ_LEN},
        "experts": {"swap_slots": 1, "swap_folders": [str(folder)]},
        "memory": {"gpu_fraction": 0.5},
    }
    request = request_of(5)

    async def of_each(pool: EnginePool) -> list[tuple[list[int], int]]:
        found = []
        for lane in pool.lanes:
            async with lane.scheduler.submit(request) as generation:
                tokens = [record.token async for records in generation for record in records]
            assert generation.result is not None
            found.append((tokens, generation.result.experts.weights_generation))
        return found

    async with serving(library, bundled_pack, **settings) as live:
        pool, supervisors = live.scheduler, live.fleet.supervisors
        assert pool.swaps is not None
        async with asyncio.timeout(120):
            await asyncio.gather(*(one.wait_ready() for one in supervisors))
        old = await of_each(pool)
        assert old[0] == old[1]
        await pool.swaps.replace(LAYER, EXPERT, str(folder / "new.bin"), None)
        new = await of_each(pool)
        assert new[0] == new[1] == (new[0][0], 1)
        assert new[0][0] != old[0][0]
        supervisors[1].end("a test")
        async with asyncio.timeout(120):
            await supervisors[1].wait_ready()
        assert await of_each(pool) == new
        await pool.swaps.replace(LAYER, EXPERT, str(folder / "old.bin"), None)
        assert [tokens for tokens, _ in await of_each(pool)] == [tokens for tokens, _ in old]


@pytest.mark.parametrize("form", ["int8", "int4-g32", "int4-g32-z", "fp8", "fp16"])
def test_any_format_takes_the_place_on_the_cpu(form: str, bundled_pack: Pack, tmp_path: Path) -> None:
    """An expert of another format, in a pack whose others stay as they are, computes as in a pack that holds it from the
    start; the large swap slot comes back when a large expert is put in place of a small one."""
    source = Path(colibrid.__file__).parent / "models" / "hummingbird-13m"
    mixed = tmp_path / "mixed.colibri"
    convert(source, mixed, crc32c=crc32c, plan=parse_plan(f"expert {LAYER}:{EXPERT}={form}"))
    name = bundled_pack.manifest.layers[LAYER].expert_files[EXPERT]
    request = request_of(3)
    options = {"slots": 1, "max_seq_len": MAX_SEQ_LEN}
    usage = ExpertUsage(2, 0, 0, 0)
    with InProcessEngine(mixed, **options) as engine:
        expected = solo(engine, request, usage)
    with InProcessEngine(bundled_pack.path, swap_slots=1, **options) as engine:
        plain = solo(engine, request, usage)
        for _ in range(2):
            engine.replace(LAYER, EXPERT, mixed / name)
            assert solo(engine, request, usage) == expected
            engine.replace(LAYER, EXPERT, bundled_pack.path / name)
            assert solo(engine, request, usage) == plain
        assert engine.stats().allocations_after_open == 0
