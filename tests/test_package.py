"""What an installed colibrid must carry, wherever it is installed."""

from __future__ import annotations

import hashlib
import json
import platform
import tomllib
from pathlib import Path

import pytest

import colibrid
from colibrid.engine.library import Library

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(colibrid.__file__).parent
NATIVE = PACKAGE / "engine" / "lib"
FLOATS, INTEGERS = ("fp32", "fp16", "bf16", "fp8"), ("int8", "int4")


def test_modules_json_has_the_hashes_of_the_installed_modules() -> None:
    """Every kernel module is listed once with the SHA-256 of the file that lies beside it."""
    listed = {entry["file"]: entry["sha256"] for entry in json.loads((NATIVE / "modules.json").read_text())["modules"]}
    x86 = platform.machine() == "x86_64"
    wanted = {f"clb_cpu_{name}_{each}.so" for name in ("generic", *(("avx2", "avx512") * x86)) for each in FLOATS}
    wanted |= {f"clb_cpu_{name}_{each}.so" for name in ("generic", *(("avx2", "vnni") * x86)) for each in INTEGERS}
    assert set(listed) == wanted
    assert listed == {name: hashlib.sha256((NATIVE / name).read_bytes()).hexdigest() for name in listed}


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model-00002-of-00002.safetensors"])
def test_bundled_model_is_there(name: str) -> None:
    """`colibrid serve` works without a model argument, so the model is part of the package."""
    assert (PACKAGE / "models" / "hummingbird-13m" / name).stat().st_size > 0


def test_package_is_typed() -> None:
    """Type checkers of users read our annotations."""
    assert (PACKAGE / "py.typed").is_file()


def test_versions_agree() -> None:
    """pyproject.toml, meson.build and the package name the same version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == colibrid.__version__
    assert f"version: '{colibrid.__version__}'" in (ROOT / "meson.build").read_text()


def test_crc32c_through_ctypes() -> None:
    """The C checksum gives the catalogue's check value, whole and in pieces."""
    crc32c = Library().c.clb_crc32c
    assert crc32c(0, b"123456789", 9) == 0xE3069283
    assert crc32c(crc32c(0, b"12345", 5), b"6789", 4) == 0xE3069283
