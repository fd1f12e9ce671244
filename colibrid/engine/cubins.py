"""A folder of compiled CUDA kernels as kernels_cu/build.py writes it: its manifest, and which image suits which GPU.

Pure but for reading the folder; knows no CUDA. The image names are cubins "router.sm_90a.cubin" and PTX text.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from colibrid.errors import EngineError

if TYPE_CHECKING:
    from pathlib import Path

CPU_HINT = "or run with --device cpu"


class DeviceError(EngineError):
    """No GPU, one that cannot serve, or a failing driver call. The message is one line with its remedy."""


@dataclass(frozen=True, slots=True)
class ModuleImage:
    """One file of a cubin folder."""

    file: str
    source: str
    arch: str
    kind: str
    sha256: str
    kernels: frozenset[str]


def read_manifest(folder: Path) -> tuple[int, list[ModuleImage]]:
    """CLB_KERNELS_ABI of the kernels, and every image. DeviceError iff manifest.json is missing or broken."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        return int(manifest["abi_version"]), [_parse_image(entry) for entry in manifest["images"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DeviceError(
            f"kernels: manifest.json is missing or broken ({error}); rebuild them with `make cubins`"
        ) from error


def choose_images(images: list[ModuleImage], capability: tuple[int, int]) -> tuple[list[ModuleImage], bool]:
    """One image per source for this capability, and whether PTX had to be taken.

    A cubin for X.Y runs on X.Z with Z >= Y; an "a" cubin on X.Y alone. DeviceError iff a source has no image at all.
    """
    chosen: list[ModuleImage] = []
    fallback = False
    for source in sorted({image.source for image in images}):
        mine = [image for image in images if image.source == source]
        fitting = [image for image in mine if image.kind == "cubin" and _fits(image.arch, capability)]
        if fitting:
            chosen.append(max(fitting, key=lambda image: _arch(image.arch)))
            continue
        ptx = [image for image in mine if image.kind == "ptx"]
        if not ptx:
            raise DeviceError(
                f"kernels: no image of {source} for compute capability {capability[0]}.{capability[1]}; "
                f"rebuild them with `make cubins`, {CPU_HINT}"
            )
        chosen.append(ptx[0])
        fallback = True
    return chosen, fallback


def read_image(folder: Path, image: ModuleImage) -> bytes:
    """The file's bytes. DeviceError iff it cannot be read or is not the one that the manifest names."""
    try:
        data = (folder / image.file).read_bytes()
    except OSError as error:
        raise DeviceError(
            f"kernels: {image.file} cannot be read ({error.strerror}); rebuild them with `make cubins`"
        ) from error
    if hashlib.sha256(data).hexdigest() != image.sha256:
        raise DeviceError(
            f"kernels: {image.file} is not the file that manifest.json names; rebuild them with `make cubins`"
        )
    return data


def _parse_image(entry: dict[str, Any]) -> ModuleImage:
    return ModuleImage(
        file=str(entry["file"]),
        source=str(entry["source"]),
        arch=str(entry["arch"]),
        kind=str(entry["kind"]),
        sha256=str(entry["sha256"]),
        kernels=frozenset(entry["kernels"]),
    )


def _arch(name: str) -> tuple[int, int, bool]:
    """("sm_90a") -> (9, 0, True); the minor is the last digit."""
    digits = name.removeprefix("sm_").rstrip("abcdefghijklmnopqrstuvwxyz")
    return int(digits[:-1]), int(digits[-1]), not name[-1].isdigit()


def _fits(name: str, capability: tuple[int, int]) -> bool:
    major, minor, exact = _arch(name)
    return (major, minor) == capability if exact else major == capability[0] and minor <= capability[1]
