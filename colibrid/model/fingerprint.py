"""What a conversion depends on, as one hash: it names cached packs and tells whether a partial one can be resumed."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from colibrid.errors import ModelError
from colibrid.model.checkpoint import INDEX_FILE, MAX_JSON_BYTES, TEXT_FILES, header_bytes, read_bounded, shard_names
from colibrid.model.layout import LAYOUT_OF

if TYPE_CHECKING:
    from pathlib import Path

    from colibrid.model.manifest import Backend

CONVERTER_VERSION = 3  # moves with every change of the bytes that convert writes
Dtype = Literal["auto", "fp32", "fp16", "bf16"]


def fingerprint(
    folder: Path, dtype: Dtype, name: str, backend: Backend = "cpu", *, plan: str = "", weights: bool = True
) -> str:
    """Hex SHA-256 over configuration, texts, shard headers, sizes, times, converter version, backend, layout, precision.

    plan: the rules of precision, and whatever else decides about formats; weights=False leaves the shards out. Weights themselves are not read: a file that changed without its size or time
    changing goes unnoticed.
    """
    parts: dict[str, Any] = {
        "converter": CONVERTER_VERSION,
        "backend": backend,
        "layout": LAYOUT_OF[backend],
        "dtype": dtype,
        "plan": plan,
        "name": name,
        "files": {
            name: hashlib.sha256(read_bounded(folder / name, MAX_JSON_BYTES)).hexdigest()
            for name in ("config.json", INDEX_FILE, *TEXT_FILES)
            if (folder / name).exists()
        },
        "shards": {name: _shard(folder / name) for name in shard_names(folder)} if weights else None,
    }
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()


def pack_fingerprint(folder: Path, name: str, backend: Backend) -> str:
    """The same of a flat pack that is laid out anew: over its description, sizes and times."""
    entries = sorted((entry.name, entry.stat()) for entry in folder.iterdir() if entry.is_file())
    parts = {
        "converter": CONVERTER_VERSION,
        "backend": backend,
        "layout": LAYOUT_OF[backend],
        "name": name,
        "files": {name: (status.st_size, status.st_mtime_ns) for name, status in entries},
    }
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()


def _shard(path: Path) -> tuple[str, int, int]:
    header = hashlib.sha256(header_bytes(path)).hexdigest()
    try:
        status = path.stat()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    return header, status.st_size, status.st_mtime_ns
