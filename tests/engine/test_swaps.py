"""colibrid.engine.swaps: all engines or none, and what an engine gets that comes later."""

from __future__ import annotations

import asyncio
import os
import shutil
from typing import TYPE_CHECKING

import pytest

from colibrid.config.settings import ExpertsSettings
from colibrid.engine import abi, control
from colibrid.engine.state import Readiness
from colibrid.engine.swaps import ExpertSwaps
from colibrid.errors import EngineError, EngineFaultError, OverloadedError, RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from colibrid.engine.library import Library
    from colibrid.model.pack import Pack


class ScriptedEngine:
    """Answers as it is told; keeps what it was asked."""

    def __init__(self) -> None:
        self.readiness = Readiness(phase="ready")
        self.asked: list[control.Question] = []
        self.refuses: type[control.Question] | None = None  # questions of this kind
        self.dies: type[control.Question] | None = None
        self.status = abi.Status.FULL
        self.ended: str | None = None
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def ask(self, message: control.Question, fds: Sequence[int] = ()) -> control.Answer:
        self.asked.append(message)
        await self.may_answer.wait()
        if isinstance(message, control.Stage):
            assert len(fds) == (message.file is not None)
            assert all(os.fstat(fd) for fd in fds)
        if self.dies is not None and isinstance(message, self.dies):
            raise EngineError("it died")
        if self.refuses is not None and isinstance(message, self.refuses):
            return control.NotSwapped(id=message.id, status=self.status, message="not now")
        if isinstance(message, control.Commit):
            generation = message.weights_generation
            return control.Swapped(id=message.id, weights_generation=generation, streams=2, free_slots=1)
        return control.Staged(id=message.id)

    def end(self, reason: str) -> None:
        self.ended = reason

    @property
    def kinds(self) -> list[str]:
        return [type(one).__name__ for one in self.asked]


@pytest.fixture
def engines() -> list[ScriptedEngine]:
    return [ScriptedEngine(), ScriptedEngine()]


@pytest.fixture
def file(bundled_pack: Pack) -> str:
    return str(bundled_pack.path / bundled_pack.manifest.layers[0].expert_files[1])


@pytest.fixture
def swaps(library: Library, bundled_pack: Pack, engines: list[ScriptedEngine]) -> ExpertSwaps:
    settings = ExpertsSettings(swap_folders=(str(bundled_pack.path),))
    return ExpertSwaps(engines, library, bundled_pack.manifest, settings)


async def test_all_engines_switch(swaps: ExpertSwaps, engines: list[ScriptedEngine], file: str) -> None:
    """Staged in all, then committed in all, as one generation; versions count, the digest tells contents apart."""
    digests: list[str] = []
    swaps.when_changed(digests.append)
    outcome = await swaps.replace(0, 0, file, None)
    assert (outcome.streams, outcome.free_slots) == (4, 1)
    assert [engine.kinds for engine in engines] == [["Stage", "Commit"]] * 2
    again = await swaps.replace(0, 0, None, "gelu")
    assert (again.version.version, again.version.weights_generation, again.version.module) == (2, 2, "gelu")
    assert again.version.sha256 == outcome.version.sha256
    assert [version.version for version in swaps.versions] == [2]
    assert swaps.weights_generation == 2
    assert len(set(digests)) == 2
    assert all(digests)


async def test_the_packs_own_bytes_are_no_other_weights(swaps: ExpertSwaps, bundled_pack: Pack, file: str) -> None:
    """An expert that was put back leaves an empty digest."""
    digests: list[str] = []
    swaps.when_changed(digests.append)
    await swaps.replace(0, 0, file, None)
    await swaps.replace(0, 0, str(bundled_pack.path / bundled_pack.manifest.layers[0].expert_files[0]), None)
    assert digests[0]
    assert digests[1] == ""


async def test_one_refusal_cancels_all(swaps: ExpertSwaps, engines: list[ScriptedEngine], file: str) -> None:
    """Nothing is committed anywhere, nothing is recorded, and the reason comes out with its status."""
    engines[1].refuses = control.Stage
    with pytest.raises(RequestError, match="not now") as refused:
        await swaps.replace(0, 0, file, None)
    assert (refused.value.status, refused.value.code) == (409, "full")
    assert [engine.kinds for engine in engines] == [["Stage", "Cancel"]] * 2
    assert (swaps.versions, swaps.weights_generation) == ((), 0)
    engines[1].status = abi.Status.CHECKSUM
    with pytest.raises(RequestError) as refused:
        await swaps.replace(0, 0, file, None)
    assert refused.value.status == 400
    engines[1].status = abi.Status.DEVICE
    with pytest.raises(EngineFaultError):
        await swaps.replace(0, 0, file, None)


async def test_an_engine_that_fails_to_commit_is_ended(
    swaps: ExpertSwaps, engines: list[ScriptedEngine], file: str
) -> None:
    """The others have switched: it must not serve other weights than they."""
    engines[0].dies = control.Commit
    outcome = await swaps.replace(0, 0, file, None)
    assert outcome.streams == 2
    assert engines[0].ended is not None
    assert engines[1].ended is None
    engines[1].dies = control.Commit
    with pytest.raises(EngineFaultError):
        await swaps.replace(0, 1, file, None)
    assert swaps.weights_generation == 1


async def test_without_a_ready_engine(swaps: ExpertSwaps, engines: list[ScriptedEngine], file: str) -> None:
    """Nobody to ask is 503; one of two is enough."""
    engines[0].readiness = engines[1].readiness = Readiness(phase="loading")
    with pytest.raises(OverloadedError):
        await swaps.replace(0, 0, file, None)
    engines[1].readiness = Readiness(phase="ready")
    await swaps.replace(0, 0, file, None)
    assert engines[0].asked == []


async def test_an_engine_that_comes_later(
    swaps: ExpertSwaps, engines: list[ScriptedEngine], bundled_pack: Pack, file: str, tmp_path: Path
) -> None:
    """It gets the last version of each expert, in their order and generations, or an error that says which is missing."""
    other = tmp_path / "e.bin"
    shutil.copy(file, other)
    swaps.follow(ExpertsSettings(swap_folders=(str(bundled_pack.path), str(tmp_path))))
    shutil.copy(bundled_pack.path / "colibri.json", tmp_path)
    named = tmp_path / bundled_pack.manifest.layers[0].expert_files[1]
    other.rename(named)
    await swaps.replace(0, 1, str(named), None)
    await swaps.replace(0, 0, file, None)
    await swaps.replace(0, 1, None, "gelu")
    late = ScriptedEngine()
    await swaps.bring_up(late)
    stages = [one for one in late.asked if isinstance(one, control.Stage)]
    commits = [one for one in late.asked if isinstance(one, control.Commit)]
    assert [(one.layer, one.expert, one.module) for one in stages] == [(0, 0, None), (0, 1, "gelu")]
    assert all(one.file is not None for one in stages)
    assert [one.weights_generation for one in commits] == [2, 3]
    named.unlink()
    with pytest.raises(EngineError, match="layer 0 expert 1, which was replaced, cannot be replaced again"):
        await swaps.bring_up(ScriptedEngine())


async def test_a_caller_that_leaves_stops_nothing(swaps: ExpertSwaps, engines: list[ScriptedEngine], file: str) -> None:
    """What has begun is completed in all engines, and the next swap finds them free."""
    for engine in engines:
        engine.may_answer.clear()
    leaving = asyncio.create_task(swaps.replace(0, 0, file, None))
    while not all(engine.asked for engine in engines):  # noqa: ASYNC110 - the file is read in a thread
        await asyncio.sleep(0.001)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    for engine in engines:
        engine.may_answer.set()
    await swaps.replace(0, 0, file, None)
    assert [engine.kinds for engine in engines] == [["Stage", "Commit"] * 2] * 2
    assert [version.version for version in swaps.versions] == [2]
