"""`colibrid export` on the command line; what it writes is tested in tests/model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from int4_checkpoints import CASES, KINDS, read_tensors, write_int4

from colibrid.cli.main import run

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An AWQ checkpoint as a pack, and out again in its own form and as plain numbers."""
    write_int4(CASES[0], KINDS[0], tmp_path / "src")
    assert run(["convert", "-q", str(tmp_path / "src"), str(tmp_path / "pack")]) == 0
    assert run(["export", str(tmp_path / "pack"), str(tmp_path / "awq"), "--format", "awq"]) == 0
    assert "exporting: 100%" in capsys.readouterr().err
    assert read_tensors(tmp_path / "awq") == read_tensors(tmp_path / "src")
    assert run(["export", "-q", str(tmp_path / "pack"), str(tmp_path / "plain"), "--dtype", "bf16"]) == 0
    assert {dtype for dtype, _, _ in read_tensors(tmp_path / "plain").values()} <= {"BF16", "F32"}
    assert run(["export", "-q", str(tmp_path / "pack"), str(tmp_path / "awq")]) == 78
    assert "exists already" in capsys.readouterr().err
