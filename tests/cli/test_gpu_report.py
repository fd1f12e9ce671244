"""bench/gpu_report.py: one file and one table of whatever the steps of bench/gpu_check.sh left behind."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import gpu_report
import pytest

from colibrid.engine.cubins import DeviceError

if TYPE_CHECKING:
    from pathlib import Path

JUNIT = """<testsuites><testsuite name="pytest" errors="0" failures="1" skipped="2" tests="9"><testcase name="a">
<properties><property name="figure" value="golden cuda: all" /><property name="other" value="x" /></properties>
</testcase></testsuite></testsuites>"""
ROW = {"slots": 8, "context": 496, "step_ms": 4.5, "decode_tokens_per_s": 1777.0, "read_bandwidth": 4.5e12,
       "floor_share": 0.65, "layer_us_above_floor": 65.0, "expert_runs_per_step": 528.0,
       "prefill_tokens_per_s": 11000.0}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a check leaves behind in which one sanitizer was stopped by its limit."""
    monkeypatch.setattr(gpu_report, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(gpu_report, "ROOT", tmp_path)
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "device.json").write_text(json.dumps({"device": "NVIDIA H200", "commit": "abc", "date": "2026-11-30"}))
    (logs / "steps.txt").write_text("kernels 0 50\ntests-engine 0 60\nmemcheck 0 30\nracecheck 124 75\nengine-x 0 12\n")
    (logs / "tests-engine.xml").write_text(JUNIT)
    (logs / "memcheck.txt").write_text("...\n========= ERROR SUMMARY: 0 errors\n")
    (logs / "racecheck.txt").write_text("....")
    (logs / "engine-x.txt").write_text(json.dumps({"model": "x", "rows": [ROW]}))
    return logs


def result_of(folder: Path) -> dict[str, Any]:
    (path,) = (folder.parent / "results").iterdir()
    assert path.name == "gpu-2026-11-30-nvidia-h200.json"
    found = json.loads(path.read_text())
    assert isinstance(found, dict)
    return found


def test_everything_is_in_the_file_and_in_the_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps, test counts and figures, sanitizer summaries and measurements; what is missing is left out."""
    assert gpu_report.main(["report", str(folder)]) == 0
    result = result_of(folder)
    assert result["tests"] == {"tests": 9, "failures": 1, "errors": 0, "skipped": 2, "figures": ["golden cuda: all"]}
    assert result["sanitizer"]["memcheck"] == "ERROR SUMMARY: 0 errors"
    assert result["sanitizer"]["racecheck"].startswith("not finished; 0 findings")
    assert result["engine"][0]["rows"] == [ROW]
    assert result["soak"] is None
    out = capsys.readouterr().out
    for part in ("racecheck", "stopped by its limit", "golden cuda: all", "x, 496", "4.500", "65 %", "all passed"):
        assert part in out


def test_a_failed_step_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 1 and the last line says which; a test run that was stopped has failed, a sanitizer has not."""
    with (folder / "steps.txt").open("a") as steps:
        steps.write("soak 1 40\nserve 124 75\n")
    assert gpu_report.main(["report", str(folder)]) == 1
    assert capsys.readouterr().out.rstrip().endswith("FAILED: soak, serve")


def test_without_a_gpu_the_reason_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 3, which ends the check before it has begun."""

    def refuse(_index: int) -> None:
        raise DeviceError("no GPU: the driver sees none")

    monkeypatch.setattr(gpu_report, "probe", refuse)
    assert gpu_report.main(["device"]) == 3
    assert "no GPU" in capsys.readouterr().err
