"""`colibrid export` on the command line; what it writes is tested in tests/model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from int4_checkpoints import CASES, KINDS, read_tensors, write_int4

from colibrid.cli.main import run
from colibrid.model.cache import BUNDLED_MODEL

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


def test_an_exported_checkpoint_is_served_as_its_pack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bundled model rounded here, out as GPTQ, answers from that checkpoint what it answers from the pack."""
    pack, gptq = str(tmp_path / "pack"), str(tmp_path / "gptq")
    assert run(["quantize", "-q", str(BUNDLED_MODEL), pack, "--precision", "experts=int4-g32-z"]) == 0
    assert run(["export", "-q", pack, gptq, "--format", "gptq"]) == 0
    said = []
    for model in (pack, gptq):
        capsys.readouterr()
        options = ["--chat", "--temperature", "0", "--device", "cpu", "--set", f"model.cache_dir={tmp_path / 'cache'}"]
        assert run(["complete", model, "How many letters are in presentation?", *options]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert "letters in presentation" in said[0]
