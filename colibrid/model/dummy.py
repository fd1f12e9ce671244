"""Packs without weights, for `model.weights: dummy`: any config.json becomes a description that C fills with noise.

The folder holds colibri.json and the texts, but none of the files of weights that colibri.json lists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from colibrid import __version__
from colibrid.model import layout
from colibrid.model.checkpoint import TEXT_FILES, read_json, text_files
from colibrid.model.families import Family, family_of
from colibrid.model.families.base import Description, recipe
from colibrid.model.families.config import Config
from colibrid.model.fingerprint import Dtype, fingerprint
from colibrid.model.formats import FORMATS, Format
from colibrid.model.int4_scheme import read_scheme
from colibrid.model.manifest import PACK_VERSION, Backend, FloatPrecision, Manifest
from colibrid.model.pack_writer import open_writer
from colibrid.model.precision import AS_IT_IS, Plan, check_plan

if TYPE_CHECKING:
    from pathlib import Path

    from colibrid.model.layout import FormatOf, Tensor

_PRECISION_OF: dict[str, FloatPrecision] = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def dummy_manifest(
    folder: Path,
    dtype: Dtype = "auto",
    name: str | None = None,
    backend: Backend = "cpu",
    plan: Plan = AS_IT_IS,
) -> Manifest:
    """The description of the model that the folder's config.json asks for. auto: bf16 unless config.json says another.

    plan: rules for what is not in that precision. ConfigError: rules for what is not there.
    Its files are never read, but the description is checked like any other.

    ModelError: config.json is unreadable, or asks for something that is not supported.
    """
    config = read_json(folder, "config.json")
    family = family_of(config)
    description = family.read(Config(config))
    said = config.get("dtype") or config.get("torch_dtype")
    precision = _PRECISION_OF.get(str(said), "bf16") if dtype == "auto" else dtype
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
            description.hyperparameters,
            description.layers,
            precision,
            layout.LAYOUT_OF[backend],
            _formats(config, family, description, precision, plan),
        ),
        text=text_files(folder, config),
    )


def _formats(
    config: dict[str, Any],
    family: Family,
    description: Description,
    precision: FloatPrecision,
    plan: Plan,
) -> FormatOf:
    """Of every tensor; of an AWQ or GPTQ checkpoint as far as its configuration tells."""
    hyper, layers = description.hyperparameters, description.layers
    check_plan(plan, layers, tied_head=hyper.tied_head)
    scheme = read_scheme(config)

    def format_of_tensor(tensor: Tensor) -> Format:
        if tensor.role in layout.FP32_ROLES:
            return FORMATS["fp32"]
        packed = None
        if scheme is not None and tensor.layer is not None:
            names = [source.name for source in recipe(family.names, hyper, layers, tensor, ())]
            packed = scheme.format_of(names)
        return FORMATS[plan.format_of(tensor, packed or precision)]

    return format_of_tensor


def write_dummy_pack(
    src: Path,
    dst: Path,
    dtype: Dtype = "auto",
    name: str | None = None,
    backend: Backend = "cpu",
    plan: Plan = AS_IT_IS,
) -> Manifest:
    """Writes colibri.json and the texts to DST. PackExistsError, ModelError: as in convert."""
    manifest = dummy_manifest(src, dtype, name, backend, plan)
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
