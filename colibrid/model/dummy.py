"""Packs without weights, for `model.weights: dummy`: any config.json becomes a description that C fills with noise.

The folder holds colibri.json and the texts, but none of the files of weights that colibri.json lists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from colibrid import __version__
from colibrid.model import layout
from colibrid.model.checkpoint import TEXT_FILES, read_json, text_files
from colibrid.model.families import family_of
from colibrid.model.families.config import Config
from colibrid.model.fingerprint import Dtype, fingerprint
from colibrid.model.manifest import PACK_VERSION, Backend, FloatPrecision, Manifest
from colibrid.model.pack_writer import open_writer
from colibrid.model.precision import Plan, check_plan

if TYPE_CHECKING:
    from pathlib import Path

    from colibrid.model.layout import FormatOf

_PRECISION_OF: dict[str, FloatPrecision] = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def dummy_manifest(
    folder: Path,
    dtype: Dtype = "auto",
    name: str | None = None,
    backend: Backend = "cpu",
    format_of: FormatOf | Plan | None = None,
) -> Manifest:
    """The description of the model that the folder's config.json asks for. auto: bf16 unless config.json says another.

    format_of: of each tensor, or rules for those that are not in that precision. ConfigError: rules for what is not there.
    Its files are never read, but the description is checked like any other.

    ModelError: config.json is unreadable, or asks for something that is not supported.
    """
    config = read_json(folder, "config.json")
    family = family_of(config)
    description = family.read(Config(config))
    said = config.get("dtype") or config.get("torch_dtype")
    precision = _PRECISION_OF.get(str(said), "bf16") if dtype == "auto" else dtype
    formats = format_of
    if isinstance(formats, Plan):
        check_plan(formats, description.layers, tied_head=description.hyperparameters.tied_head)
        formats = formats.formats(precision)
    return Manifest(
        version=PACK_VERSION,
        backend=backend,
        family=family.architecture,
        name=name or folder.resolve().name,
        precision=precision,
        created_by=f"colibrid {__version__}, without weights",
        hyperparameters=description.hyperparameters,
        layers=description.layers,
        files=layout.planned_files(
            description.hyperparameters, description.layers, precision, layout.LAYOUT_OF[backend], formats
        ),
        text=text_files(folder, config),
    )


def write_dummy_pack(
    src: Path,
    dst: Path,
    dtype: Dtype = "auto",
    name: str | None = None,
    backend: Backend = "cpu",
    format_of: FormatOf | Plan | None = None,
) -> Manifest:
    """Writes colibri.json and the texts to DST. PackExistsError, ModelError: as in convert."""
    manifest = dummy_manifest(src, dtype, name, backend, format_of)
    key = fingerprint(src, dtype, manifest.name, backend, weights=False)
    with open_writer(dst, key, _no_checksum, wait=True) as writer:
        writer.resume(())
        for text in TEXT_FILES:
            if (src / text).is_file():
                writer.copy_text(src / text)
        writer.publish(manifest)
    return manifest


def _no_checksum(_data: bytes | memoryview) -> int:
    raise AssertionError("a pack without weights has no checksums")
