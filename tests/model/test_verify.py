"""Damage to a pack's bytes is found and named; sound packs have none."""

from __future__ import annotations

import hashlib
import json
import zlib
from typing import TYPE_CHECKING

import numpy as np
import pytest
from int4_checkpoints import CASES
from random_checkpoints import write_checkpoint

from colibrid.model.convert import convert
from colibrid.model.formats import FORMATS
from colibrid.model.pack import open_pack
from colibrid.model.precision import parse_plan
from colibrid.model.verify import damages

if TYPE_CHECKING:
    from pathlib import Path


def made(folder: Path, plan: str) -> Path:
    write_checkpoint(CASES[0], folder / "src")
    convert(folder / "src", folder / "pack", crc32c=zlib.crc32, plan=parse_plan(plan))
    return folder / "pack"


@pytest.mark.parametrize("name", [name for name in FORMATS if "g128" not in name])
def test_sound_packs(name: str, tmp_path: Path) -> None:
    """Of every format; progress ends at all bytes."""
    pack = open_pack(made(tmp_path, name))
    steps: list[tuple[int, int, str]] = []
    assert list(damages(pack, lambda *step: steps.append(step))) == []
    assert steps[-1][0] == steps[-1][1] == sum(file.bytes for file in pack.manifest.files)


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    """In one file of many, by its sha256; a file without one is named, too."""
    path = made(tmp_path, "int8")
    data = bytearray((path / "expert_0_2.bin").read_bytes())
    data[100] ^= 1
    (path / "expert_0_2.bin").write_bytes(data)
    found = list(damages(open_pack(path)))
    assert [finding.file for finding in found] == ["expert_0_2.bin"]
    assert "sha256" in found[0].problem
    manifest = json.loads((path / "colibri.json").read_text())
    manifest["files"][0]["sha256"] = None
    (path / "colibri.json").write_text(json.dumps(manifest))
    assert "no sha256" in next(damages(open_pack(path))).problem


@pytest.mark.parametrize(
    ("plan", "where", "dtype", "value", "problem"),
    [
        ("fp16", "offset", "<u2", 0x7C00, "not finite"),
        ("fp8", "offset", "<u1", 0x7F, "not finite"),
        ("int8", "scales_offset", "<u2", 0x7E00, "scales are not finite"),
        ("int4-g32-z", "zeros_offset", "<u1", 16, "zero points are above 15"),
    ],
)
def test_numbers_that_are_none(plan: str, where: str, dtype: str, value: int, problem: str, tmp_path: Path) -> None:
    """Also where the checksum agrees with them."""
    path = made(tmp_path, plan)
    manifest = json.loads((path / "colibri.json").read_text())
    file = next(file for file in manifest["files"] if file["name"] == "expert_1_3.bin")
    data = bytearray((path / file["name"]).read_bytes())
    section = file["sections"][1]
    data[section[where] : section[where] + np.dtype(dtype).itemsize] = np.array([value], dtype).tobytes()
    (path / file["name"]).write_bytes(data)
    file["sha256"] = hashlib.sha256(data).hexdigest()
    (path / "colibri.json").write_text(json.dumps(manifest))
    found = list(damages(open_pack(path)))
    assert [finding.file for finding in found] == ["expert_1_3.bin"]
    assert found[0].problem.startswith("up: ")
    assert problem in found[0].problem
