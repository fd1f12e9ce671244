"""Ctrl-C and SIGTERM during `colibrid bench http`: a real process, and a server that knows what it has answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import msgspec
import pytest
from bench_runs import run_of
from daemon_process import DEADLINE_S
from fake_openai import FakeServer, answer

from colibrid.cli.bench_interrupt import Interruption
from colibrid.cli.bench_intervals import compare
from colibrid.cli.bench_page import report_page
from colibrid.cli.bench_result import CutShort, read_report

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    from aiohttp import web


class Hanging:
    """Answers `first` requests; `reached` is set when `waiting` others have come, which are never answered.

    A client of a closed loop sends a request only after it has read the whole answer to the one before.
    """

    def __init__(self, first: int, waiting: int = 1) -> None:
        self.reached = threading.Event()
        self._first, self._waiting = first, waiting
        self._seen = 0

    async def __call__(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self._seen += 1
        if self._seen <= self._first:
            return await answer(request, body)
        if self._seen == self._first + self._waiting:
            self.reached.set()
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")


@contextlib.contextmanager
def started(url: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A load without warm-up, unless the arguments say so; what is left at the end is killed."""
    command = [sys.executable, "-m", "colibrid.cli", "bench", "http", "--url", url, "--warmup", "0", *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_finished_is_reported(number: signal.Signals, tmp_path: Path) -> None:
    """Table, file and page have the requests that were answered, and say that the run was cut short; the code is 130."""
    hanging, out, page = Hanging(7, 2), tmp_path / "a.json", tmp_path / "a.html"
    with FakeServer(hanging).running() as server:
        size = ("--clients", "2", "--seconds", "600", "--out", str(out), "--html", str(page))
        with started(server.url, *size) as process:
            assert hanging.reached.wait(DEADLINE_S)
            process.send_signal(number)
            shown, errors = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, errors) == (130, "")
    report = read_report(out)
    assert (report.ok, report.failed, report.refused, len(report.samples)) == (7, 0, 0, 7)
    assert report.cut_short is not None
    assert report.cut_short.under_way == 2
    assert report.cut_short.after_s >= report.elapsed_s > 0
    assert report.requests_per_s == pytest.approx(7 / report.elapsed_s)
    words = f"interrupted after {report.cut_short.after_s:.1f} s of 600 s"
    assert f"\ncut short  {words}; 2 requests under way not counted\n" in shown
    assert "7 answered, 0 refused, 0 failed" in shown
    assert f'<p class="bad">{words.capitalize()}.</p>' in page.read_text()


def test_an_open_loop_is_cut_short(tmp_path: Path) -> None:
    """Arrivals end, and those under way are dropped; without --seconds the report says of how many requests."""
    hanging, out = Hanging(3), tmp_path / "a.json"
    with FakeServer(hanging).running() as server:
        size = ("--rate", "1000", "--requests", "500", "--max-in-flight", "1", "--json", "--out", str(out))
        with started(server.url, *size) as process:
            assert hanging.reached.wait(DEADLINE_S)
            process.send_signal(signal.SIGINT)
            shown, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    report = read_report(out)
    assert json.loads(shown)["cut_short"]["under_way"] == 1
    assert (report.ok, report.failed) == (3, 0)
    assert ", at 3 of 500 requests" in report_page(report)


def test_nothing_was_measured_yet() -> None:
    """During the warm-up there is nothing to report, which is one line, and 130."""
    hanging = Hanging(1)
    with FakeServer(hanging).running() as server, started(server.url, "--warmup", "4", "--clients", "1") as process:
        assert hanging.reached.wait(DEADLINE_S)
        process.send_signal(signal.SIGINT)
        shown, errors = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, shown) == (130, "")
    assert errors == "colibrid: interrupted before the load began: nothing was measured\n"


def test_the_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    """Also where the report goes to somebody who does not read it."""
    hanging, pipe = Hanging(1), tmp_path / "pipe"
    os.mkfifo(pipe)
    large = json.dumps("x" * 100_000)  # with two of these a report is longer than a pipe
    fields = ("--field", f"a={large}", "--field", f"b={large}")
    arguments = ("--clients", "1", "--out", str(pipe), *fields)
    with FakeServer(hanging).running() as server, started(server.url, *arguments) as process:
        assert hanging.reached.wait(DEADLINE_S)
        process.send_signal(signal.SIGINT)
        with pipe.open("rb", buffering=0) as reader:
            assert reader.read(1) == b"{"  # it writes now
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=DEADLINE_S)
    assert process.returncode == -signal.SIGINT  # shells show 130


def test_a_comparison_mentions_it() -> None:
    """A run that was cut short has lost its slowest requests."""
    whole = run_of(random.Random(1), 40, requests=64)
    cut = msgspec.structs.replace(whole, cut_short=CutShort(after_s=12.34, under_way=3))
    assert not any("cut short" in warning for warning in compare([whole], [whole]).warnings)
    assert (
        "1 of the runs was cut short (interrupted after 12.3 s, at 40 of 64 requests): slow requests that were under way "
        "then are missing"
    ) in compare([whole], [cut, whole]).warnings


async def test_work_is_not_begun_after_the_signal() -> None:
    """Between warm-up and load, too."""
    begun, before = False, signal.getsignal(signal.SIGTERM)

    async def work() -> None:
        nonlocal begun
        begun = True

    with Interruption() as interruption:
        assert await interruption.run(work())
        assert begun
        begun = False
        signal.raise_signal(signal.SIGTERM)
        assert not await interruption.run(work())
    assert not begun
    assert signal.getsignal(signal.SIGTERM) == before


async def test_errors_of_the_work_are_its_own() -> None:
    """They come out, and are no interruption."""

    async def work() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await Interruption().run(work())
