"""The process that tries grammars out."""

from __future__ import annotations

import asyncio
import io
import os
import resource
import signal
import struct
from typing import TYPE_CHECKING

import pytest

from colibrid.errors import OverloadedError
from colibrid.text import structured_check
from colibrid.text.structured_check import GrammarChecker
from colibrid.text.structured_child import make_check, serve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

GOOD, BAD = 'start: "a"', "start: ("
SLOW = "start: A\nA: " + " & ".join(f"/(.|\\n)*x.{{{n}}}/" for n in range(60)) + "\n"


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(wall_s=600.0)  # processor time decides, however long a busy machine takes to give it
    yield checker
    await checker.close()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_one_process_answers_many(checker: GrammarChecker) -> None:
    """Good grammars have no error, bad ones have their place; special tokens by id may be of any vocabulary."""
    assert checker.pid is None
    assert await checker.check(GOOD) == ""
    pid = checker.pid
    assert "Expected token" in await checker.check(BAD)
    assert await checker.check('start: <[4094]> "é"') == ""
    assert checker.pid == pid


async def test_slow_grammars_end_the_process_only(checker: GrammarChecker) -> None:
    """The kernel ends what computes too long; the next grammar gets a fresh process."""
    waiting = asyncio.ensure_future(checker.check(GOOD))
    assert "too complex" in await checker.check(SLOW)
    assert await waiting == ""
    assert await checker.check(GOOD) == ""


async def test_a_process_that_hangs_or_dies_is_replaced() -> None:
    """The clock ends one that does not compute; one that was killed from outside is replaced, and asked again."""
    checker = GrammarChecker(wall_s=120.0)
    assert await checker.check(GOOD) == ""
    assert checker.pid is not None
    os.kill(checker.pid, signal.SIGSTOP)
    checker._wall_s = 0.5
    with pytest.raises(OverloadedError, match="too busy"):
        await checker.check(GOOD)
    checker._wall_s = 120.0
    assert await checker.check(GOOD) == ""
    for _ in range(3):
        os.kill(checker.pid, signal.SIGKILL)
        assert await checker.check(GOOD) == ""
    os.kill(checker.pid, signal.SIGSEGV)
    assert await checker.check(GOOD) in {"", structured_check._TOO_COMPLEX}
    await checker.close()


async def test_a_process_that_is_killed_twice_says_nothing_of_the_grammar(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When whoever kills does so again, the grammar is not to blame: the client is told to try again."""
    start = checker._started

    async def started_and_killed() -> asyncio.subprocess.Process:
        process = await start()
        process.send_signal(signal.SIGKILL)
        return process

    monkeypatch.setattr(checker, "_started", started_and_killed)
    with pytest.raises(OverloadedError, match="try again"):
        await checker.check(GOOD)
    monkeypatch.undo()
    assert await checker.check(GOOD) == ""


async def test_a_client_that_leaves_does_not_shift_answers(checker: GrammarChecker) -> None:
    """A check that is cancelled ends the process, so that its answer is nobody else's."""
    task = asyncio.ensure_future(checker.check(SLOW))
    await asyncio.sleep(0.5)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert "Expected token" in await checker.check(BAD)


async def test_it_ends_when_idle() -> None:
    """Without work the process ends; the next grammar starts another."""
    checker = GrammarChecker(idle_s=0.05)
    await checker.check(GOOD)
    pid = checker.pid
    assert pid is not None
    async with asyncio.timeout(60):
        while alive(pid):  # noqa: ASYNC110 - the process has no event to wait for
            await asyncio.sleep(0.02)
    assert await checker.check(GOOD) == ""
    await checker.close()


async def test_waiting_is_bounded(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond so many that wait, the next is refused at once."""
    monkeypatch.setattr(structured_check, "MAX_WAITING", 2)
    first = [asyncio.ensure_future(checker.check(GOOD)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await checker.check(GOOD)
    assert await asyncio.gather(*first) == ["", ""]


def test_frames() -> None:
    """A frame in, a frame out, until the input ends, also in the middle of a frame."""
    limits = resource.getrlimit(resource.RLIMIT_CPU)
    source = io.BytesIO(b"".join(struct.pack("<I", len(text)) + text for text in (b"one", b"two")) + b"\x01")
    sink = io.BytesIO()
    try:
        serve(source, sink, lambda grammar: grammar.upper())
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, limits)
    assert sink.getvalue() == b"\x03\0\0\0ONE\x03\0\0\0TWO"


def test_check_in_process() -> None:
    """What the process answers with."""
    check = make_check()
    assert check(GOOD) == ""
    assert check(BAD) != ""
