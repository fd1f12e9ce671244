"""Packs with random weights: real files of any shape, read and checked like others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from in_process import InProcessEngine, ask, crc32c
from random_cases import CASES, CUDA_CASES, prompts_of
from random_checkpoints import write_checkpoint
from reference import Reference

from colibrid.errors import ModelError
from colibrid.model.dummy import dummy_manifest
from colibrid.model.pack import open_pack
from colibrid.model.random_pack import write_random_pack

if TYPE_CHECKING:
    from pathlib import Path

    from colibrid.model.manifest import Backend

BY_NAME = {case.name: case for case in (*CASES, *CUDA_CASES)}


@pytest.mark.parametrize("name", ["qwen-odd-sizes", "qwen-fp16", "mixtral-gqa-sharded"])
def test_the_pack_is_whole_and_its_logits_have_size_one(name: str, tmp_path: Path) -> None:
    """It is what the description says, its checksums are right, the engine serves it, and activations stay near 1."""
    case = BY_NAME[name]
    source = write_checkpoint(case, tmp_path / "src")
    manifest = write_random_pack(source, tmp_path / "pack", crc32c=crc32c)
    planned = dummy_manifest(source)
    assert open_pack(tmp_path / "pack").manifest == manifest
    assert [msgspec.structs.replace(file, sha256=None, crc32c=None) for file in manifest.files] == list(planned.files)
    prompt = prompts_of(case)[0]
    with InProcessEngine(tmp_path / "pack", slots=1, max_seq_len=64) as engine:
        (answer,) = engine.run([ask(prompt, 3)])
    assert len(answer.tokens) == 3
    logits = Reference(tmp_path / "pack").forward(prompt)["logits"]
    assert 0.1 < logits.std() < 10


@pytest.mark.parametrize("backend", ["cpu", "cuda", "any"])
def test_seeds_decide(backend: Backend, tmp_path: Path) -> None:
    """The same seed gives the same bytes, another other ones; two experts of a model differ."""
    source = write_checkpoint(CUDA_CASES[0], tmp_path / "src")
    packs = [
        write_random_pack(source, tmp_path / str(i), crc32c=crc32c, backend=backend, seed=seed)
        for i, seed in enumerate((7, 7, 8))
    ]
    sums = [[file.sha256 for file in pack.files] for pack in packs]
    assert sums[0] == sums[1]
    assert not set(sums[0]) & set(sums[2])
    assert len(set(sums[0])) == len(sums[0])


def test_a_target_that_is_there_is_kept(tmp_path: Path) -> None:
    """Nothing is overwritten."""
    source = write_checkpoint(CASES[0], tmp_path / "src")
    write_random_pack(source, tmp_path / "pack", crc32c=crc32c)
    with pytest.raises(ModelError, match="exists already"):
        write_random_pack(source, tmp_path / "pack", crc32c=crc32c, seed=1)
