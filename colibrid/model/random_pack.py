"""Packs with seeded random weights on disk, of any shape: to measure loading, serving and conversion without a download.

Every file's bytes depend on seed, name and layout only; they say nothing about a model. Unlike `model.weights: dummy`,
which has no files, such a pack is read and checked like any other.
"""

from __future__ import annotations

import math
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from colibrid.model import floats
from colibrid.model.checkpoint import TEXT_FILES
from colibrid.model.dummy import dummy_manifest
from colibrid.model.fingerprint import Dtype, fingerprint
from colibrid.model.formats import float_of
from colibrid.model.layout import MATRIX_ROLES
from colibrid.model.pack_writer import open_writer
from colibrid.model.precision import AS_IT_IS, Plan
from colibrid.model.quantised import quantised_section
from colibrid.model.tiles import file_bytes, tiled

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from colibrid.model.manifest import Backend, FloatPrecision, Manifest, PackFile, Section
    from colibrid.model.pack_writer import Crc32c, Progress

BLOCK_VALUES = 16 << 20  # made at once
MOST_THREADS = 8
_NORMS = frozenset({"final_norm", "attn_norm", "ffn_norm", "q_norm", "k_norm"})
# Of a value: bits that stay random (sign and mantissa), and where the exponent lies.
_BITS: dict[FloatPrecision, tuple[int, int, int]] = {
    "fp32": (0x807F_FFFF, 23, 127),
    "fp16": (0x83FF, 10, 15),
    "bf16": (0x807F, 7, 127),
}


def write_random_pack(
    src: Path,
    dst: Path,
    dtype: Dtype = "auto",
    progress: Progress = lambda *_: None,
    *,
    crc32c: Crc32c,
    backend: Backend = "cpu",
    name: str | None = None,
    seed: int = 0,
    plan: Plan = AS_IT_IS,
) -> Manifest:
    """Writes the pack DST of the model that config.json in the folder SRC describes. Errors as in convert.

    plan: as in dummy_manifest.
    """
    manifest = dummy_manifest(src, dtype, name, backend, plan)
    formats = zlib.crc32(msgspec.json.encode(manifest.files))
    key = f"{fingerprint(src, dtype, manifest.name, backend, weights=False)}-random-{seed}-{formats}"
    with open_writer(dst, key, crc32c, wait=False) as writer:
        with ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0)))) as pool:
            files = writer.write_all(manifest.files, lambda planned: _file_bytes(planned, seed), progress, pool)
        writer.copy_texts(src, TEXT_FILES)
        manifest = msgspec.structs.replace(
            manifest, files=files, created_by=manifest.created_by.replace("without", f"random (seed {seed})")
        )
        writer.publish(manifest)
    return manifest


def _file_bytes(planned: PackFile, seed: int) -> Iterator[memoryview | bytes]:
    name = zlib.crc32(planned.name.encode())
    return file_bytes(
        (section, _section(section, np.random.Generator(np.random.SFC64([seed, name, number]))))
        for number, section in enumerate(planned.sections)
    )


def _section(section: Section, draw: np.random.Generator) -> Iterator[floats.Array]:
    """Norms are 1. Other values are spread so that a row times an input of size 1 has about size 1."""
    if section.group_rows:
        yield from _quantised(section, draw)
        return
    rows, cols = section.shape
    precision = float_of(section)
    if section.role in _NORMS:
        yield floats.narrow(np.ones(rows * cols, np.float32), precision)
        return
    exponent = _exponent(section)
    if section.padded_shape is not None:
        matrix = _values(draw, rows * cols, precision, exponent).reshape(rows, cols)
        yield from tiled([matrix], section.layout)
        return
    for begin in range(0, rows * cols, BLOCK_VALUES):
        yield _values(draw, min(BLOCK_VALUES, rows * cols - begin), precision, exponent)


def _exponent(section: Section) -> int:
    rows, cols = section.shape
    inputs = rows if section.role == "down" and section.layout == "flat" else cols
    return round(-math.log2(1.5 * math.sqrt(inputs))) if section.role in MATRIX_ROLES else -6


def _quantised(section: Section, draw: np.random.Generator) -> Iterator[floats.Array]:
    rows, cols = section.shape
    step = max(1, BLOCK_VALUES // (cols * 128)) * 128
    blocks = (
        _values(draw, min(step, rows - begin) * cols, "fp32", _exponent(section)).reshape(-1, cols)
        for begin in range(0, rows, step)
    )
    yield from quantised_section(section, blocks)


def _values(draw: np.random.Generator, count: int, precision: FloatPrecision, exponent: int) -> floats.Array:
    """Finite values of either sign between 2^exponent and 2^(exponent + 1)."""
    mask, shift, bias = _BITS[precision]
    storage = floats.STORAGE[precision]
    bits = np.frombuffer(draw.bytes(count * storage.itemsize), f"<u{storage.itemsize}") & mask
    bits |= max(1, exponent + bias) << shift
    return bits.view(storage)
