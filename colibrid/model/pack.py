"""Opens a model folder ("pack"): colibri.json becomes a Manifest that has been checked against itself and the files.

A pack may be written by hand. Then these may be left out, and are filled in before the check:
    version, backend, family, name              1, "any", "custom", the folder's name
    hyperparameters.rope_theta                  instead of rope_inv_freq (10,000 if both are absent)
    hyperparameters.attention_scale, max_positions, rms_norm_eps, kv_heads, tied_head, qkv_bias
    layers[].expert_files                       expert_{layer}_{expert}.bin
    files                                       dense.bin in the order of layout.py and the expert files, matrices in the
                                                layout of the backend; every section 256-aligned, or packed without gaps
                                                where the file's size says so
    files[].bytes, sha256, crc32c               the size on disk; no checksums (a warning)
The tensors, their order and their shapes are in layout.py.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import msgspec

from colibrid.errors import ModelError
from colibrid.model import layout
from colibrid.model.checkpoint import read_bounded
from colibrid.model.families.rope import inverse_frequencies
from colibrid.model.manifest import PACK_VERSION, Backend, FloatPrecision, Hyperparameters, Layer, Manifest, PackFile
from colibrid.model.pack_check import check_manifest
from colibrid.model.pack_writer import MANIFEST_FILE

MAX_MANIFEST_BYTES = 256 << 20
MAX_TEXT_BYTES = 256 << 20  # of a tokenizer or template; the largest known are below 40 MB


class Pack(msgspec.Struct, frozen=True):
    """A folder whose description is sound and whose files have the sizes that it says."""

    path: Path
    manifest: Manifest
    warnings: tuple[str, ...] = ()


def is_pack(path: Path) -> bool:
    return (path / MANIFEST_FILE).is_file()


def open_pack(path: Path, *, backend: str | None = None, check_files: bool = True) -> Pack:
    """Reads and checks a pack; the bytes of weights are checked by whoever loads them.

    backend: refuse a pack made for another ("cpu", "cuda"). check_files=False: trust the sizes that colibri.json says
    (dummy weights). ModelError: what is wrong, with file, expected and found.
    """
    where = path / MANIFEST_FILE
    raw = _decode(where)
    sizes = _sizes_on_disk(path, raw) if check_files else {}
    try:
        manifest = msgspec.convert(_filled_in(raw, path, sizes), Manifest)
    except msgspec.ValidationError as error:
        raise ModelError(f"{where}: {error}; correct it, or convert the checkpoint again") from None
    if backend is not None and manifest.backend not in ("any", backend):
        raise ModelError(
            f"{where}: the pack is for the {manifest.backend} backend, not for {backend}; make another with "
            f"`colibrid convert --backend {backend} HF_DIR {path.name}`"
        )
    try:
        check_manifest(manifest)
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from None
    if check_files:
        _check_sizes(path, manifest, sizes)
    return Pack(path, manifest, _warnings(manifest) if check_files else ())


def _decode(where: Path) -> dict[str, Any]:
    if not where.exists():
        raise ModelError(f"{where}: missing, so this is not a pack; make one with `colibrid convert HF_DIR DST`")
    try:
        raw = msgspec.json.decode(read_bounded(where, MAX_MANIFEST_BYTES))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{where}: expected a JSON object, found {type(raw).__name__}")
    version = raw.get("version", PACK_VERSION)
    if version != PACK_VERSION:
        raise ModelError(f"{where}: version {version!r} found, {PACK_VERSION} expected; convert the checkpoint again")
    return raw


def _sizes_on_disk(path: Path, raw: dict[str, Any]) -> dict[str, int]:
    """Sizes of the folder's regular .bin files and of those that `files` names; links are not followed."""
    named = _names(raw.get("files"))
    sizes = {}
    try:
        for entry in path.iterdir():
            if entry.suffix == ".bin" or entry.name in named:
                status = entry.lstat()
                if stat.S_ISREG(status.st_mode):
                    sizes[entry.name] = status.st_size
    except OSError as error:
        raise ModelError(f"{path}: cannot be listed: {error.strerror}") from None
    return sizes


def _names(files: Any) -> set[str]:
    """The file names of a description that has not been checked yet."""
    entries = files if isinstance(files, list) else []
    names = [entry.get("name") for entry in entries if isinstance(entry, dict)]
    return {name for name in names if isinstance(name, str)}


def _check_sizes(path: Path, manifest: Manifest, sizes: dict[str, int]) -> None:
    for file in manifest.files:
        found = sizes.get(file.name)
        if found is None:
            raise ModelError(f"{path / file.name}: missing, or not a regular file; {file.bytes} bytes expected")
        if found != file.bytes:
            raise ModelError(
                f"{path / file.name}: {file.bytes} bytes expected, {found} found; copy or convert it again"
            )
    text = manifest.text
    for name in (text.tokenizer, text.tokenizer_config, text.chat_template, text.generation_config):
        if name is None:
            continue
        if not (path / name).is_file():  # neither a folder nor a pipe nor a device, also behind a link
            raise ModelError(f"{path / name}: missing, though {MANIFEST_FILE} names it")
        if (path / name).stat().st_size > MAX_TEXT_BYTES:
            raise ModelError(f"{path / name}: larger than {MAX_TEXT_BYTES} bytes; this is not a file of that kind")


def _warnings(manifest: Manifest) -> tuple[str, ...]:
    unchecked = [file.name for file in manifest.files if file.crc32c is None]
    if not unchecked:
        return ()
    return (
        (
            f"{len(unchecked)} of {len(manifest.files)} files have no crc32c in {MANIFEST_FILE} "
            f"({unchecked[0]} …): damage to them would not be noticed"
        ),
    )


# ------------------------------------------------------------------ hand-written packs


def _filled_in(raw: dict[str, Any], path: Path, sizes: dict[str, int]) -> dict[str, Any]:
    """The description with what may be left out. Values of wrong types pass through to the check that names them."""
    filled = {"version": PACK_VERSION, "backend": "any", "family": "custom", "name": path.resolve().name, **raw}
    if isinstance(raw.get("hyperparameters"), dict):
        filled["hyperparameters"] = _fill_hyperparameters(raw["hyperparameters"])
    if isinstance(raw.get("layers"), list):
        filled["layers"] = [_fill_layer(index, layer) for index, layer in enumerate(raw["layers"])]
    return _fill_files(filled, sizes)


def _fill_hyperparameters(raw: dict[str, Any]) -> dict[str, Any]:
    filled = {"max_positions": 2048, "rms_norm_eps": 1e-6, "tied_head": False, "qkv_bias": False, **raw}
    theta = filled.pop("rope_theta", 10_000.0)
    head_dim = filled.get("head_dim")
    if isinstance(head_dim, int) and 0 < head_dim <= 4096:
        filled.setdefault("attention_scale", head_dim**-0.5)
        if isinstance(theta, int | float) and theta >= 1 and "rope_inv_freq" not in filled:
            filled["rope_inv_freq"] = inverse_frequencies(theta, head_dim)
    if "heads" in filled:
        filled.setdefault("kv_heads", filled["heads"])
    return filled


def _fill_layer(index: int, raw: Any) -> Any:
    if not isinstance(raw, dict) or raw.get("ffn") != "moe" or "expert_files" in raw:
        return raw
    experts = raw.get("experts")
    if not isinstance(experts, int) or not 0 < experts <= 1 << 16:
        return raw
    return {**raw, "expert_files": [layout.expert_file_name(index, expert) for expert in range(experts)]}


def _fill_files(filled: dict[str, Any], sizes: dict[str, int]) -> dict[str, Any]:
    """Plans the files that are not described. Needs sound hyperparameters, layers and precision; else leaves all."""
    try:
        hyper = msgspec.convert(filled.get("hyperparameters"), Hyperparameters)
        layers = msgspec.convert(filled.get("layers"), tuple[Layer, ...])
        precision = msgspec.convert(filled.get("precision"), FloatPrecision)
        matrices = layout.LAYOUT_OF.get(msgspec.convert(filled.get("backend"), Backend), "flat")
    except msgspec.ValidationError:
        return filled
    given = filled.get("files", [])
    if not isinstance(given, list) or not all(isinstance(file, dict) for file in given):
        return filled
    plan = {file.name: file for file in layout.planned_files(hyper, layers, precision, matrices)}
    for name, planned in plan.items():
        tight = layout.packed(planned)
        plan[name] = tight if sizes.get(name) == tight.bytes else planned
    named = _names(given)
    files = [_with_defaults(file, plan) for file in given]
    files += [msgspec.to_builtins(planned) for name, planned in plan.items() if name not in named]
    return {**filled, "files": files}


def _with_defaults(file: dict[str, Any], plan: dict[str, PackFile]) -> dict[str, Any]:
    name = file.get("name")
    planned = plan.get(name) if isinstance(name, str) else None
    if planned is None:
        return file
    return {"bytes": planned.bytes, "sections": msgspec.to_builtins(planned.sections), **file}
