"""Tensors read back from packs of every layout and format."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np
import pytest
from int4_checkpoints import CASES as WIDE
from random_cases import CASES, Case
from random_checkpoints import write_checkpoint

from colibrid.errors import ConfigError, ModelError
from colibrid.model.checkpoint import Checkpoint
from colibrid.model.convert import convert
from colibrid.model.formats import FORMATS
from colibrid.model.layout import FP32_ROLES
from colibrid.model.pack import open_pack
from colibrid.model.pack_model import PackModel
from colibrid.model.precision import parse_plan
from colibrid.model.source import CheckpointModel
from colibrid.model.verify import damages

if TYPE_CHECKING:
    from pathlib import Path

    from colibrid.model.manifest import Backend

INT4_G32 = "int4-g32"


@pytest.mark.parametrize("backend", ["any", "cpu", "cuda"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_was_written_is_read(case: Case, backend: Backend, tmp_path: Path) -> None:
    """Every tensor of every family, from row-major, rows16 and mma files."""
    write_checkpoint(case, tmp_path / "src")
    dtype = "fp16" if backend == "cuda" else "fp32"
    convert(tmp_path / "src", tmp_path / "pack", dtype=dtype, crc32c=zlib.crc32, backend=backend)
    pack = PackModel(open_pack(tmp_path / "pack"))
    with Checkpoint(tmp_path / "src") as checkpoint:
        model = CheckpointModel(checkpoint)
        assert list(pack.tensors()) == [tensor for tensors in model.tensors.values() for tensor in tensors]
        for tensor in pack.tensors():
            wanted = model.matrix(tensor)
            if dtype == "fp16" and tensor.role not in FP32_ROLES:
                wanted = wanted.astype(np.float16).astype(np.float32)
            assert np.array_equal(pack.matrix(tensor), wanted), tensor


def test_one_layer_mixes_all_formats(tmp_path: Path) -> None:
    """Each expert file has the format that its rule says, and its numbers are near the exact ones."""
    case = WIDE[0]
    write_checkpoint(case, tmp_path / "src")
    plan = parse_plan(
        "expert 0:0=int8, expert 0:1=int4-g32, expert 0:2=fp8, expert 0:3=fp16, layer 1=int4-g64-z, embedding=bf16"
    )
    convert(tmp_path / "src", tmp_path / "pack", crc32c=zlib.crc32, plan=plan)
    pack = PackModel(open_pack(tmp_path / "pack"))
    found = {
        tensor.expert: pack.format_of(tensor).name
        for tensor in pack.tensors()
        if (tensor.layer, tensor.role) == (0, "gate")
    }
    assert found == {0: "int8", 1: INT4_G32, 2: "fp8", 3: "fp16", None: "fp16"}
    with Checkpoint(tmp_path / "src") as checkpoint:
        model = CheckpointModel(checkpoint)
        for tensor in pack.tensors():
            form = pack.format_of(tensor)
            exact = model.matrix(tensor)
            if tensor.role in FP32_ROLES:
                assert form.name == "fp32"
            elif tensor.layer == 1:
                assert form.name == "int4-g64-z"
            elif tensor.role == "embedding":
                assert form.name == "bf16"
            bound = {"int4": 0.2, "int8": 0.02, "fp8": 0.1, "bf16": 0.01}.get(form.precision, 1e-3)
            assert np.abs(pack.matrix(tensor) - exact).max() <= bound * np.abs(exact).max(), tensor
    with pytest.raises(ConfigError, match=r"layer 9 given, the model has layers 0 to 1"):
        convert(tmp_path / "src", tmp_path / "other", crc32c=zlib.crc32, plan=parse_plan("layer 9=int8"))


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.quantised])
def test_stored_numbers_are_those_that_were_rounded(name: str, tmp_path: Path) -> None:
    """Rows in blocks or at once, in every quantised format whose groups fit; those that do not are refused by name."""
    case = WIDE[0]
    write_checkpoint(case, tmp_path / "src")
    plan = parse_plan(f"attention={name}")
    convert(tmp_path / "src", tmp_path / "pack", crc32c=zlib.crc32, plan=plan)
    pack = PackModel(open_pack(tmp_path / "pack"))
    qkv = next(tensor for tensor in pack.tensors() if tensor.role == "qkv")
    matrix = pack.quantised(qkv)
    assert matrix.format.name == ("int8" if name == "int8-g128" else name)  # a row has 128 columns
    assert matrix.shape == qkv.shape
    with Checkpoint(tmp_path / "src") as checkpoint:
        exact = CheckpointModel(checkpoint).matrix(qkv)
    scales = np.abs(matrix.scales.astype(np.float32)).max() * (16 if "fp8" in name else 1)
    assert np.abs(pack.matrix(qkv) - exact).max() <= scales * 2.5


def test_groups_that_do_not_fit(tmp_path: Path) -> None:
    """The message names the matrix, its columns and the groups that would do."""
    write_checkpoint(WIDE[2], tmp_path / "src")
    with pytest.raises(ModelError, match=r"layer 0 expert 0 down: .*64 does not fit 96 columns; groups of 32 would"):
        convert(
            tmp_path / "src",
            tmp_path / "pack",
            crc32c=zlib.crc32,
            plan=parse_plan("experts=int4"),
        )


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.quantised and "g128" not in name])
def test_both_backends_hold_the_same_numbers(name: str, tmp_path: Path) -> None:
    """Rounded for the CPU and for CUDA: every tensor reads back the same, and nothing is damaged."""
    write_checkpoint(WIDE[0], tmp_path / "src")
    packs = []
    for backend in ("cpu", "cuda"):
        target = tmp_path / backend
        convert(tmp_path / "src", target, crc32c=zlib.crc32, backend=backend, plan=parse_plan(name))  # type: ignore[arg-type]
        packs.append(PackModel(open_pack(target)))
        assert list(damages(packs[-1].pack)) == []
    one, two = packs
    assert all(np.array_equal(one.matrix(tensor), two.matrix(tensor)) for tensor in one.tensors())
