"""Experts that replace others in the C engine, on every backend: after the switch the text is that of a pack with the new
expert, and across it that of a replay which switches at the same position."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import msgspec
import pytest
from in_process import EngineRefusalError, InProcessEngine, ask, crc32c
from random_cases import CUDA_CASES, prompts_of
from random_checkpoints import write_checkpoint

from colibrid.engine import abi
from colibrid.model.convert import convert
from colibrid.model.pack import open_pack
from colibrid.model.precision import parse_plan

if TYPE_CHECKING:
    from pathlib import Path

    from engine_backends import Backend

    from colibrid.engine.channel import Event, SlotRecord

CASE = CUDA_CASES[0]
LAYER, EXPERT = 0, 1
SMALL = {"max_seq_len": 64, "prefill_chunk": 16, "prefill_tokens": 64}
PROMPT = prompts_of(CASE)[1][:21]
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def old(backend: Backend, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack. Not to be changed."""
    return backend.pack(CASE, tmp_path_factory.mktemp(f"swap-{backend.name}"))


@pytest.fixture(scope="module")
def new(old: Path) -> Path:
    """The same with another expert in one place: the file of its neighbour."""
    target = old.with_suffix(".new")
    shutil.copytree(old, target)
    manifest = open_pack(old).manifest
    names = manifest.layers[LAYER].expert_files
    own, other = (next(file for file in manifest.files if file.name == names[EXPERT + index]) for index in (0, 1))
    shutil.copy(old / other.name, target / own.name)
    changed = msgspec.structs.replace(own, sha256=other.sha256, crc32c=other.crc32c)
    files = tuple(changed if file is own else file for file in manifest.files)
    (target / "colibri.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, files=files)))
    return target


def expert_of(pack: Path) -> Path:
    return pack / open_pack(pack).manifest.layers[LAYER].expert_files[EXPERT]


def records_of(engine: InProcessEngine) -> list[SlotRecord]:
    (answer,) = engine.run([ask(PROMPT, NEW_TOKENS)])
    return answer.records


def test_after_the_switch_it_is_the_other_pack(backend: Backend, old: Path, new: Path) -> None:
    """Swapped in and out again, bit for bit as packs on disk, with one swap slot and without taking memory."""
    with backend.open(old, slots=1, **SMALL) as engine:
        plain = records_of(engine)
    with backend.open(new, slots=1, **SMALL) as engine:
        other = records_of(engine)
    assert plain != other
    with backend.open(old, slots=1, swap_slots=1, **SMALL) as engine:
        assert records_of(engine) == plain
        for pack, expected in ((new, other), (old, plain), (new, other)):
            engine.replace(LAYER, EXPERT, expert_of(pack))
            assert records_of(engine) == expected
        stats = engine.stats()
        assert (stats.weights_generation, stats.allocations_after_open) == (3, 0)


class Across:
    """A request during which the expert is replaced, `turns` turns after it was opened."""

    def __init__(self, engine: InProcessEngine, old: Path, new: Path, turns: int, company: int = 0) -> None:
        engine.replace(LAYER, EXPERT, expert_of(old))
        engine.start(0, ask(PROMPT, NEW_TOKENS))
        for slot in range(1, 1 + company):
            engine.start(slot, ask(PROMPT[: 9 + slot], 2 * NEW_TOKENS))
        self.records: list[SlotRecord] = []
        self.position: int | None = None
        self._engine = engine
        for _ in range(turns):
            engine.turn()
            self._take(engine.channel.pop())
        self._take(engine.replace(LAYER, EXPERT, expert_of(new)))
        self._take(engine.settle())
        engine.check()

    def _take(self, events: list[Event]) -> None:
        for event in events:
            if event.kind == abi.EventKind.TOKEN:
                if event.slot == 0:
                    self.records.append(self._engine.channel.record(event.slot, event.record))
                self._engine.channel.advance(event.slot, event.record, event.record + 1)
            if event.kind == abi.EventKind.SWITCHED and event.slot == 0:
                self.position = event.position


def test_a_replay_at_the_position_is_the_same(backend: Backend, old: Path, new: Path) -> None:
    """In company and alone: equal positions, equal records."""
    turns = 3 if backend.slow else 5
    with backend.open(old, slots=4, swap_slots=1, **SMALL) as engine:
        live = Across(engine, old, new, turns, company=3)
        assert live.position is not None
        assert len(PROMPT) <= live.position < len(PROMPT) + NEW_TOKENS
        replays = [Across(engine, old, new, count) for count in range(1, turns + 3)]
    at_the_same = [one for one in replays if one.position == live.position]
    assert at_the_same
    assert all(one.records == live.records for one in at_the_same)


def test_a_damaged_expert_is_refused(backend: Backend, old: Path, tmp_path: Path) -> None:
    """A value that is no number leaves the engine as it was, and the next swap finds its slot."""
    manifest = open_pack(old).manifest
    name = manifest.layers[LAYER].expert_files[EXPERT]
    described = next(file for file in manifest.files if file.name == name)
    data = bytearray((old / name).read_bytes())
    data[2:4] = b"\xff\xff"  # a NaN in bf16 and fp16
    (tmp_path / "bad.bin").write_bytes(data)
    described = msgspec.structs.replace(described, sha256=None, crc32c=(crc32c(bytes(data)),))
    (tmp_path / "bad.bin.json").write_bytes(msgspec.json.encode(described))
    with backend.open(old, slots=1, swap_slots=1, **SMALL) as engine:
        plain = records_of(engine)
        with pytest.raises(EngineRefusalError, match="NaN") as refused:
            engine.replace(LAYER, EXPERT, tmp_path / "bad.bin")
        assert refused.value.status == abi.Status.NOT_FINITE
        assert records_of(engine) == plain
        engine.replace(LAYER, EXPERT, expert_of(old))
        assert records_of(engine) == plain


def test_a_16_bit_expert_among_quantised_ones(backend: Backend, tmp_path: Path) -> None:
    """It becomes what the pack that holds it from the start computes, also where an engine changes its numbers on the way
    in, and again when it is swapped out and in."""
    source = write_checkpoint(CASE, tmp_path / "hf")
    packs = {}
    for name, plan in (("plain", "experts=int8, expert 0:0=bf16"), ("mixed", "experts=int8, expert 0:*=bf16")):
        packs[name] = tmp_path / name
        convert(source, packs[name], crc32c=crc32c, backend=backend.layout, plan=parse_plan(plan))
    others = open_pack(packs["plain"]).manifest.layers[0].expert_files[1:]
    expected = {}
    for name, pack in packs.items():
        with backend.open(pack, slots=1, **SMALL) as engine:
            expected[name] = records_of(engine)
    assert expected["plain"] != expected["mixed"]
    with backend.open(packs["plain"], slots=1, swap_slots=len(others), **SMALL) as engine:
        for name in ("mixed", "plain", "mixed"):
            for expert, file in enumerate(others, 1):
                engine.replace(0, expert, packs[name] / file)
            assert records_of(engine) == expected[name]


@pytest.mark.parametrize("name", ["int8", "int4-g32"])
def test_a_format_that_the_pack_does_not_have(backend: Backend, name: str, tmp_path: Path) -> None:
    """On a GPU it is refused with the setting that allows it, and taken where that names it; the CPU takes any."""
    source, packs = write_checkpoint(CASE, tmp_path / "hf"), {}
    for pack, form in (("plain", "bf16"), ("mixed", name)):
        packs[pack] = tmp_path / pack
        plan = parse_plan(f"expert {LAYER}:{EXPERT}={form}")
        convert(source, packs[pack], crc32c=crc32c, backend=backend.layout, plan=plan)
    with backend.open(packs["mixed"], slots=1, **SMALL) as engine:
        expected = records_of(engine)
    if backend.layout == "cuda":
        with (
            backend.open(packs["plain"], slots=1, swap_slots=1, **SMALL) as engine,
            pytest.raises(EngineRefusalError, match=r"experts\.swap_formats"),
        ):
            engine.replace(LAYER, EXPERT, expert_of(packs["mixed"]))
    with backend.open(packs["plain"], slots=1, swap_slots=1, swap_formats=(name,), **SMALL) as engine:
        assert records_of(engine) != expected
        engine.replace(LAYER, EXPERT, expert_of(packs["mixed"]))
        assert records_of(engine) == expected
        engine.replace(LAYER, EXPERT, expert_of(packs["plain"]))
        assert records_of(engine) != expected
        assert engine.stats().allocations_after_open == 0
