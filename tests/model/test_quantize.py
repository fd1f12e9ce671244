"""Packs rounded by the user's own texts: whole or not there, resumed, and nearer to the source than plain ones."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from int4_checkpoints import CASES as WIDE
from int4_checkpoints import KINDS, write_int4, write_loud
from random_checkpoints import write_checkpoint

from colibrid.errors import ConfigError, ModelError
from colibrid.model.checkpoint import Checkpoint
from colibrid.model.compare import Reference
from colibrid.model.convert import PackExistsError, convert
from colibrid.model.pack import open_pack
from colibrid.model.pack_model import PackModel
from colibrid.model.precision import parse_plan
from colibrid.model.quantize import quantize
from colibrid.model.source import CheckpointModel

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = np.random.default_rng(7).integers(0, 20, (8, 40)).tolist()
PLAN = parse_plan("int4-g32")


def run(folder: Path, name: str, **options: Any) -> PackModel:
    quantize(folder / "src", folder / name, PLAN, TEXTS, crc32c=zlib.crc32, **options)
    return PackModel(open_pack(folder / name))


def test_a_scaled_pack_is_nearer_than_a_plain_one(tmp_path: Path) -> None:
    """The pack holds the formats of the plan, and predicts more like its source; no calibration is left behind."""
    write_loud(tmp_path / "src")
    steps: list[tuple[int, int]] = []
    scaled = run(tmp_path, "scaled", on_layer=lambda done, total: steps.append((done, total)))
    convert(tmp_path / "src", tmp_path / "plain", crc32c=zlib.crc32, plan=PLAN)
    plain = PackModel(open_pack(tmp_path / "plain"))
    assert [scaled.format_of(t) for t in scaled.tensors()] == [plain.format_of(t) for t in plain.tensors()]
    fresh = np.random.default_rng(8).integers(0, 20, (4, 40)).tolist()
    with Checkpoint(tmp_path / "src") as checkpoint:
        far = [Reference(CheckpointModel(checkpoint), fresh).distance(pack).kl for pack in (scaled, plain)]
    assert far[0] < 0.7 * far[1]
    assert steps == [(0, 2), (1, 2), (2, 2)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain", "scaled", "src"]
    with pytest.raises(PackExistsError):
        run(tmp_path, "scaled")


def test_an_interrupted_run_is_resumed(tmp_path: Path) -> None:
    """Stopped while calibrating, then while writing: the third run gives the bytes of an undisturbed one."""
    write_checkpoint(WIDE[0], tmp_path / "src")
    whole = run(tmp_path, "whole").pack.manifest

    def stop_layers(done: int, _total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    def stop_files(_done: int, _total: int, what: str) -> None:
        if what == "expert_0_1.bin":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "dst", on_layer=stop_layers)
    layers: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "dst", on_layer=lambda done, _total: layers.append(done), progress=stop_files)
    assert layers == [1, 2]
    files: list[str] = []
    last = run(tmp_path, "dst", progress=lambda _done, _total, what: files.append(what)).pack.manifest
    assert "dense.bin" not in files
    assert [file.sha256 for file in last.files] == [file.sha256 for file in whole.files]


def test_what_cannot_be_quantized(tmp_path: Path) -> None:
    """A checkpoint that is int4 already, a plan that rounds nothing, a rule for a layer that is not there."""
    write_int4(WIDE[0], KINDS[0], tmp_path / "src")
    with pytest.raises(ModelError, match="is int4 already"):
        run(tmp_path, "dst")
    write_checkpoint(WIDE[0], tmp_path / "plain")
    for plan, words in (("fp16", "rounds no matrix"), ("layer 7=int8", "layer 7 given")):
        with pytest.raises((ModelError, ConfigError), match=words):
            quantize(tmp_path / "plain", tmp_path / "dst", parse_plan(plan), TEXTS, crc32c=zlib.crc32)
    assert not (tmp_path / "dst").exists()
