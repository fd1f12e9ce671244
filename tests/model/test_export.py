"""Packs written back as checkpoints: the bytes that they were made from."""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING

import numpy as np
import pytest
from int4_checkpoints import CASES as INT4_CASES
from int4_checkpoints import KINDS, Int4, read_tensors, write_int4
from random_cases import CASES, Case
from random_checkpoints import write_checkpoint

from colibrid.errors import ModelError
from colibrid.model import safetensors_writer
from colibrid.model.checkpoint import Checkpoint
from colibrid.model.convert import convert
from colibrid.model.export import export
from colibrid.model.pack import open_pack
from colibrid.model.pack_model import PackModel
from colibrid.model.precision import parse_plan
from colibrid.model.source import CheckpointModel

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
@pytest.mark.parametrize("case", INT4_CASES, ids=lambda case: case.name)
def test_int4_comes_back_bit_by_bit(case: Case, kind: Int4, tmp_path: Path) -> None:
    """Checkpoint, pack and checkpoint again: every tensor has the same type, shape and bytes."""
    write_int4(case, kind, tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "pack", crc32c=zlib.crc32)
    export(open_pack(tmp_path / "pack"), tmp_path / "dst", kind.method)  # type: ignore[arg-type]
    before, after = read_tensors(tmp_path / "src"), read_tensors(tmp_path / "dst")
    assert {name: after[name] for name in before} == before
    assert all(name.endswith(".g_idx") for name in set(after) - set(before))
    old, new = (json.loads((tmp_path / side / "config.json").read_text()) for side in ("src", "dst"))
    for field in ("quant_method", "bits", "group_size", "checkpoint_format", "version"):
        assert new["quantization_config"].get(field) == old["quantization_config"].get(field)
    convert(tmp_path / "dst", tmp_path / "again", crc32c=zlib.crc32)
    files = [
        [(file.name, file.sha256) for file in open_pack(tmp_path / name).manifest.files] for name in ("pack", "again")
    ]
    assert files[0] == files[1]


@pytest.mark.parametrize("case", [case for case in CASES if not case.fused], ids=lambda case: case.name)
def test_plain_checkpoints_come_back(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tensors, in several shards with an index, and the same configuration."""
    monkeypatch.setattr(safetensors_writer, "SHARD_BYTES", 40_000)
    write_checkpoint(case, tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "pack", crc32c=zlib.crc32)
    steps: list[tuple[int, int]] = []
    export(
        open_pack(tmp_path / "pack"), tmp_path / "dst", progress=lambda done, total, _what: steps.append((done, total))
    )
    assert read_tensors(tmp_path / "dst") == read_tensors(tmp_path / "src")
    assert steps[-1][0] == steps[-1][1]
    assert len(list((tmp_path / "dst").glob("*.safetensors"))) > 1
    with Checkpoint(tmp_path / "dst") as checkpoint:
        CheckpointModel(checkpoint).check()
    old, new = (json.loads((tmp_path / side / "config.json").read_text()) for side in ("src", "dst"))
    assert {field: new[field] for field in old} == old


def test_quantised_matrices_as_what_they_stand_for(tmp_path: Path) -> None:
    """int8, int4 and fp8 become float32 numbers, exactly those that the pack has; the configuration says no int4."""
    write_int4(INT4_CASES[0], Int4("awq", attention=False), tmp_path / "src")
    plan = parse_plan("layer 0 attention=int8, layer 1 attention=fp8-b128")
    convert(tmp_path / "src", tmp_path / "pack", crc32c=zlib.crc32, plan=plan)
    pack = PackModel(open_pack(tmp_path / "pack"))
    export(pack.pack, tmp_path / "dst", precision="fp32")
    assert "quantization_config" not in json.loads((tmp_path / "dst" / "config.json").read_text())
    with Checkpoint(tmp_path / "dst") as checkpoint:
        model = CheckpointModel(checkpoint)
        model.check()
        assert all(np.array_equal(model.matrix(tensor), pack.matrix(tensor)) for tensor in pack.tensors())


def test_int4_that_was_rounded_here_goes_out_as_gptq_and_awq(tmp_path: Path) -> None:
    """A pack of our own rounding is read back from either form with the same numbers."""
    write_checkpoint(INT4_CASES[0], tmp_path / "src")
    for plan in ("int4-g32", "int4-g64-z"):
        convert(tmp_path / "src", tmp_path / plan, crc32c=zlib.crc32, plan=parse_plan(plan))
        pack = PackModel(open_pack(tmp_path / plan))
        for kind in ("awq", "gptq"):
            export(pack.pack, tmp_path / f"{plan}.{kind}", kind)  # type: ignore[arg-type]
            with Checkpoint(tmp_path / f"{plan}.{kind}") as checkpoint:
                model = CheckpointModel(checkpoint)
                model.check()
                assert all(np.array_equal(model.matrix(tensor), pack.matrix(tensor)) for tensor in pack.tensors())


def test_what_has_no_int4_form_is_refused(tmp_path: Path) -> None:
    """A pack without int4, with int8, or with two sizes of groups; a place that is taken; a pack without config.json."""
    write_checkpoint(INT4_CASES[0], tmp_path / "src")
    for plan, words in (
        ("fp16", "no int4 matrices"),
        ("experts=int4-g32, dense=int8", "layer 0 qkv is int8"),
        ("experts=int4-g32, dense=int4-g64", "of one group size"),
    ):
        convert(tmp_path / "src", tmp_path / plan, crc32c=zlib.crc32, plan=parse_plan(plan))
        with pytest.raises(ModelError, match=words):
            export(open_pack(tmp_path / plan), tmp_path / "dst", "gptq")
        assert not (tmp_path / "dst").exists()
    with pytest.raises(ModelError, match="exists already"):
        export(open_pack(tmp_path / "fp16"), tmp_path / "src")
    (tmp_path / "fp16" / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config.json: missing"):
        export(open_pack(tmp_path / "fp16"), tmp_path / "dst")
