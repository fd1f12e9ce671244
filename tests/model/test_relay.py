"""Flat packs laid out for a backend: the same bytes as a conversion of the checkpoint gives."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
from in_process import crc32c
from random_cases import CASES, CUDA_CASES, Case
from random_checkpoints import write_checkpoint

from colibrid.errors import ModelError
from colibrid.model.cache import CacheOptions, resolve
from colibrid.model.convert import convert
from colibrid.model.pack import open_pack
from colibrid.model.relay import relay

if TYPE_CHECKING:
    from pathlib import Path

    from colibrid.model.manifest import Backend

BY_NAME = {case.name: case for case in (*CASES, *CUDA_CASES)}


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """A flat pack with a dense layer and a shared expert."""
    convert(write_checkpoint(CUDA_CASES[0], tmp_path / "hf"), tmp_path / "flat", crc32c=crc32c, backend="any")
    return tmp_path / "flat"


@pytest.mark.parametrize(
    ("case", "backend"),
    [(BY_NAME["qwen-odd-sizes"], "cpu"), (BY_NAME["qwen-odd-sizes"], "cuda"), (CUDA_CASES[1], "cuda"),
     (CUDA_CASES[2], "cpu")],
    ids=lambda value: value if isinstance(value, str) else value.name,
)  # fmt: skip
def test_the_bytes_are_those_of_a_conversion(case: Case, backend: Backend, tmp_path: Path) -> None:
    """Every file has the checksum that it has when the checkpoint itself is converted, padding included."""
    source = write_checkpoint(case, tmp_path / "hf")
    convert(source, tmp_path / "flat", crc32c=crc32c, backend="any")
    direct = convert(source, tmp_path / "direct", crc32c=crc32c, backend=backend)
    made = relay(open_pack(tmp_path / "flat"), tmp_path / "made", crc32c=crc32c, backend=backend)
    assert made.files == direct.files
    assert open_pack(tmp_path / "made", backend=backend).manifest == made
    assert (made.hyperparameters, made.layers) == (direct.hyperparameters, direct.layers)


def test_a_pack_written_by_hand_is_laid_out(flat: Path, tmp_path: Path) -> None:
    """Without a list of files, with sections side by side, and with one expert's file for two layers."""
    described = json.loads((flat / "colibri.json").read_text())
    for name in ("files", "name", "version", "backend"):
        described.pop(name, None)
    described["layers"][2]["expert_files"][1] = "expert_0_1.bin"
    (flat / "colibri.json").write_text(json.dumps(described))
    (flat / "expert_2_1.bin").unlink()
    made = relay(open_pack(flat), tmp_path / "made", crc32c=crc32c, backend="cuda")
    assert len(made.files) == 8
    assert all(file.crc32c is not None for file in made.files)


def test_a_damaged_file_is_not_laid_out(flat: Path, tmp_path: Path) -> None:
    """The checksum of the flat pack is checked on the way, and the file is named."""
    data = bytearray((flat / "expert_0_1.bin").read_bytes())
    data[77] ^= 4
    (flat / "expert_0_1.bin").write_bytes(data)
    with pytest.raises(ModelError, match=r"expert_0_1.bin: MiB 0 is damaged"):
        relay(open_pack(flat), tmp_path / "made", crc32c=crc32c, backend="cuda")
    assert not (tmp_path / "made").exists()


def test_the_cache_keeps_what_a_gpu_needs(flat: Path, tmp_path: Path) -> None:
    """For a GPU a flat pack is laid out once into the cache; the CPU takes it as it is; a changed pack is made anew."""

    def ask(backend: Backend) -> tuple[Path, bool]:
        options = CacheOptions(cache_dir=tmp_path / "cache", hub_cache=tmp_path, backend=backend)  # type: ignore[arg-type]
        found = resolve(str(flat), options, crc32c=crc32c)
        return found.path, found.converted

    assert ask("cpu") == (flat, False)
    path, converted = ask("cuda")
    assert converted
    assert path.parent == tmp_path / "cache"
    assert open_pack(path).manifest.backend == "cuda"
    assert ask("cuda") == (path, False)
    other = shutil.copytree(flat, tmp_path / "other")
    assert (
        resolve(
            str(other), CacheOptions(cache_dir=tmp_path / "cache", hub_cache=tmp_path, backend="cuda"), crc32c=crc32c
        ).path
        != path
    )


def test_several_precisions_are_refused(flat: Path, tmp_path: Path) -> None:
    """A pack whose experts have a precision of their own is for the checkpoint's conversion to make."""
    described = json.loads((flat / "colibri.json").read_text())
    described["precision"] = "fp16"
    (flat / "colibri.json").write_text(json.dumps(described))
    with pytest.raises(ModelError, match="several precisions"):
        relay(open_pack(flat), tmp_path / "made", crc32c=crc32c, backend="cuda")
