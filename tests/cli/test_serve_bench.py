"""bench/serve_bench.py: a run with a tiny shape, and its table."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import serve_bench
from served import Served, ServedError

if TYPE_CHECKING:
    from pathlib import Path


def test_a_run_of_the_tiny_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each number of clients gives a row with all times, the daemon's processor time, and a line of the table."""
    arguments = ["--device", "cpu", "--shape", "tiny", "--seconds", "0.5", "--clients", "1", "3"]
    assert serve_bench.main([*arguments, "--json", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["clients"] for row in rows] == [1, 3]
    for row in rows:
        report = row["report"]
        assert report["ok"] > 0
        assert report["failed"] == report["refused"] == 0
        assert report["tokens_per_request"] == serve_bench.MAX_TOKENS
        assert report["ttft_ms"]["p50"] > 0
        assert row["device_bytes"] == 0
    *_, one, three, start = capsys.readouterr().out.splitlines()
    assert (one.split()[:3], three.split()[:3]) == (["tiny", "1", "colibrid"], ["tiny", "3", "colibrid"])
    assert start.startswith("tiny: ready in ")


def test_a_daemon_that_does_not_start_is_told() -> None:
    """Its own words are in the error."""
    with pytest.raises(ServedError, match="no such folder"):
        Served(["/no/such/model"])
