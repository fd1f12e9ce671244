"""`colibrid convert` on the command line; the conversion itself is tested in tests/model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from colibrid.cli.main import run
from colibrid.model.cache import BUNDLED_MODEL
from colibrid.model.pack import open_pack

if TYPE_CHECKING:
    from pathlib import Path


def test_makes_a_pack_with_a_progress_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The pack is there, its precision is the one asked for, progress is on stderr and one line on stdout."""
    target = tmp_path / "x.colibri"
    assert run(["convert", str(BUNDLED_MODEL), str(target), "--dtype", "fp16", "--name", "little"]) == 0
    manifest = open_pack(target).manifest
    assert (manifest.precision, manifest.name) == ("fp16", "little")
    output = capsys.readouterr()
    assert output.out == f"{target}: Qwen2MoeForCausalLM, fp16, 24.6 MiB in 49 files\n"
    assert output.err.endswith("converting: 100% of 24.6 MiB\n")


def test_quiet_has_no_progress_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--quiet writes nothing to stderr."""
    assert run(["convert", "-q", str(BUNDLED_MODEL), str(tmp_path / "x.colibri")]) == 0
    assert capsys.readouterr().err == ""


def test_backend_any_makes_a_flat_pack(tmp_path: Path) -> None:
    """--backend any writes the form to exchange, without it the pack is for the CPU."""
    for arguments, backend, layout in (([], "cpu", "rows16"), (["--backend", "any"], "any", "flat")):
        target = tmp_path / f"{backend}.colibri"
        assert run(["convert", "-q", *arguments, str(BUNDLED_MODEL), str(target)]) == 0
        manifest = open_pack(target).manifest
        assert manifest.backend == backend
        assert manifest.files[1].sections[0].layout == layout


@pytest.mark.parametrize(
    ("make", "text"),
    [(None, "no such folder"), ("note.txt", "no config.json in it")],
)
def test_a_source_that_is_no_checkpoint(
    make: str | None, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong SRC is told what it is, and what SRC should be."""
    source = tmp_path / "model"
    if make is not None:
        source.mkdir()
        (source / make).write_text("{}")
    assert run(["convert", str(source), str(tmp_path / "x.colibri")]) == 78
    assert capsys.readouterr().err == (
        f"colibrid: {source}: {text}; SRC is a Hugging Face checkpoint's folder with config.json and safetensors\n"
    )


def test_problems_exit_with_78(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A source that is not a checkpoint and a target that is there already are one line each."""
    assert run(["convert", str(tmp_path), str(tmp_path / "x.colibri")]) == 78
    assert run(["convert", "-q", str(BUNDLED_MODEL), str(tmp_path / "y.colibri")]) == 0
    assert run(["convert", "-q", str(BUNDLED_MODEL), str(tmp_path / "y.colibri")]) == 78
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("colibrid: ") for line in lines)


def test_random_weights_of_a_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--dummy takes a folder with a config.json, or the name of a shape, and needs no SRC."""
    source = tmp_path / "shape"
    source.mkdir()
    (source / "config.json").write_bytes((BUNDLED_MODEL / "config.json").read_bytes())
    target = tmp_path / "x.colibri"
    assert run(["convert", "-q", "--dummy", str(source), "--seed", "3", str(target)]) == 0
    assert open_pack(target).manifest.created_by.endswith("random (seed 3) weights")
    assert capsys.readouterr().out.startswith(f"{target}: Qwen2MoeForCausalLM, bf16")
    assert run(["convert", "--dummy", "no-such-shape", str(tmp_path / "y.colibri")]) == 78
    assert "qwen3-30b-a3b" in capsys.readouterr().err
    assert run(["convert", "--dummy", str(source)]) == 2
    assert run(["convert", str(source)]) == 2


def test_a_flat_pack_is_laid_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SRC may be a flat pack; the result is what a conversion of the checkpoint gives. Another pack is refused."""
    flat, relaid, direct = (tmp_path / name for name in ("flat", "relaid", "direct"))
    assert run(["convert", "-q", "--backend", "any", str(BUNDLED_MODEL), str(flat)]) == 0
    assert run(["convert", "-q", "--backend", "cuda", str(flat), str(relaid)]) == 0
    assert run(["convert", "-q", "--backend", "cuda", str(BUNDLED_MODEL), str(direct)]) == 0
    assert open_pack(relaid).manifest.files == open_pack(direct).manifest.files
    for arguments, text in (
        ([str(relaid)], "a pack for the cuda backend"),
        (["--backend", "any", str(flat)], "keeps its precision"),
        (["--dtype", "fp32", str(flat)], "keeps its precision"),
    ):
        assert run(["convert", "-q", *arguments, str(tmp_path / "x")]) == 78
        assert text in capsys.readouterr().err
