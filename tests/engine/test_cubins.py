"""A folder of compiled kernels: manifest, integrity, and which image suits which GPU."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import pytest

from colibrid.engine import cubins

if TYPE_CHECKING:
    from pathlib import Path


def image(arch: str, kind: str = "cubin", source: str = "router") -> cubins.ModuleImage:
    return cubins.ModuleImage(f"{source}.{arch}.{kind}", source, arch, kind, "", frozenset({"clb_router_fp32"}))


IMAGES = [image("sm_80"), image("sm_86"), image("sm_90a"), image("sm_80", "ptx")]


@pytest.mark.parametrize(
    ("capability", "chosen", "fallback"),
    [
        ((8, 0), "router.sm_80.cubin", False),
        ((8, 6), "router.sm_86.cubin", False),
        ((8, 9), "router.sm_86.cubin", False),
        ((9, 0), "router.sm_90a.cubin", False),
        ((9, 1), "router.sm_80.ptx", True),
        ((10, 0), "router.sm_80.ptx", True),
        ((12, 0), "router.sm_80.ptx", True),
    ],
)
def test_the_best_image_for_a_capability(capability: tuple[int, int], chosen: str, fallback: bool) -> None:
    """The newest cubin of the same major version is taken, an "a" cubin only on its own GPU, else PTX."""
    images, fell_back = cubins.choose_images(IMAGES, capability)
    assert ([entry.file for entry in images], fell_back) == ([chosen], fallback)


def test_every_source_gets_an_image() -> None:
    """One image of each source is chosen."""
    images, _ = cubins.choose_images([*IMAGES, image("sm_80", source="sampler")], (8, 6))
    assert [entry.file for entry in images] == ["router.sm_86.cubin", "sampler.sm_80.cubin"]


def test_no_image_names_the_capability_and_the_remedy() -> None:
    """Without a fitting cubin and without PTX the error says what to rebuild."""
    with pytest.raises(cubins.DeviceError, match=r"no image of router for compute capability 9\.0.*make cubins"):
        cubins.choose_images([image("sm_80")], (9, 0))


def write_folder(folder: Path, data: bytes = b"code") -> None:
    (folder / "router.sm_80.cubin").write_bytes(data)
    entry = {
        "file": "router.sm_80.cubin", "source": "router", "arch": "sm_80", "kind": "cubin",
        "sha256": hashlib.sha256(b"code").hexdigest(), "kernels": {"clb_bucket": {"registers": 3}},
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps({"abi_version": 7, "images": [entry]}))


def test_manifest_is_read(tmp_path: Path) -> None:
    """The ABI, the images with their kernels and their bytes come back."""
    write_folder(tmp_path)
    abi, images = cubins.read_manifest(tmp_path)
    assert (abi, [entry.kernels for entry in images]) == (7, [{"clb_bucket"}])
    assert cubins.read_image(tmp_path, images[0]) == b"code"


def test_another_file_under_the_name_is_refused(tmp_path: Path) -> None:
    """A file whose sha256 differs is named."""
    write_folder(tmp_path, b"other")
    _, images = cubins.read_manifest(tmp_path)
    with pytest.raises(cubins.DeviceError, match=r"router\.sm_80\.cubin is not the file"):
        cubins.read_image(tmp_path, images[0])
    (tmp_path / "router.sm_80.cubin").unlink()
    with pytest.raises(cubins.DeviceError, match=r"router\.sm_80\.cubin cannot be read"):
        cubins.read_image(tmp_path, images[0])


@pytest.mark.parametrize("text", [None, "{", "[]", '{"abi_version": 1}', '{"abi_version": 1, "images": [{}]}'])
def test_a_broken_manifest_says_how_to_rebuild(tmp_path: Path, text: str | None) -> None:
    """Missing, malformed and incomplete manifests are one-line errors."""
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(cubins.DeviceError, match=r"manifest\.json is missing or broken.*make cubins"):
        cubins.read_manifest(tmp_path)
