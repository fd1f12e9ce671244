"""bench/wrk: what counts as a failure, and a short run where wrk is installed."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
from wrk import run

WRK = shutil.which("wrk")


def counts(**changes: Any) -> dict[str, Any]:
    return {"ok": 5, "failed": 0, "memory_first_kib": 100_000, "memory_last_kib": 100_100} | changes


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"memory_last_kib": 90_000}, None),
        ({"failed": 2}, "2 requests failed"),
        ({"ok": 0}, "no request was answered"),
        ({"memory_last_kib": 103_000}, "memory grew from 100000 to 103000 KiB"),
    ],
)
def test_what_is_wrong_is_said(changes: dict[str, Any], problem: str | None) -> None:
    """Failures, silence and growing memory are problems; less memory is none."""
    assert run.verdict(counts(**changes)) == ([] if problem is None else [problem])


def test_memory_is_compared_after_the_warm_up() -> None:
    """Growth in the first fifth of the samples is that of opening connections."""
    assert run.halves([0, 50, 100, 100, 101, 100, 200, 200, 201, 200]) == (100, 200)


def test_memory_is_that_of_the_process_and_its_children() -> None:
    """This process has some, one that ended has none."""
    assert run.resident_kib(os.getpid()) > 1000
    assert run.resident_kib(2**22 + 1) == 0


def test_counts_are_found_in_what_wrk_prints() -> None:
    """They are the last line of JSON."""
    assert run.read_wrk('Running 1s test\n  {"odd": 1}\n{"ok": 3, "failed": 1}\n') == {"ok": 3, "failed": 1}
    with pytest.raises(SystemExit, match="said nothing"):
        run.read_wrk("wrk: command line mistake\n")


@pytest.mark.skipif(WRK is None, reason="wrk is not installed")
def test_wrk_sees_answers_and_refusals(tmp_path: Any) -> None:
    """With one slot and no queue, some of 8 connections are refused, others answered, and none fails."""
    assert WRK is not None
    sets = ["--set", "limits.queue=0", "--max-batch-size", "1", "--set", f"model.cache_dir={tmp_path}"]
    seen = run.press(WRK, connections=8, seconds=2, arguments=sets)
    assert seen["failed"] == 0
    assert seen["ok"] > 0
    assert seen["refused"] > 0
    assert seen["memory_first_kib"] > 10_000
    assert seen["ok_per_s"] == pytest.approx(seen["ok"] / seen["seconds"])
