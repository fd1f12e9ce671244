"""A converted checkpoint to look at or to damage."""

from __future__ import annotations

import shutil
import zlib
from typing import TYPE_CHECKING

import pytest
from random_cases import CASES, Case
from random_checkpoints import write_checkpoint

from colibrid.model.convert import convert

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `src` (a checkpoint) and two packs made from it: `pack`, `flat`. Not to be changed."""
    folder = tmp_path_factory.mktemp("converted")
    convert(write_checkpoint(CASES[0], folder / "src"), folder / "pack", crc32c=zlib.crc32)
    convert(folder / "src", folder / "flat", crc32c=zlib.crc32, backend="any")
    return folder


@pytest.fixture
def pack(converted: Path, tmp_path: Path) -> Path:
    """A copy of the flat pack that the test may change."""
    return shutil.copytree(converted / "flat", tmp_path / "pack")


@pytest.fixture
def source(converted: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint that the test may change."""
    return shutil.copytree(converted / "src", tmp_path / "src")


def case_named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)
