"""Flat packs, the form to exchange, laid out anew for one backend.

The CPU repacks a flat pack whenever it loads it. A GPU's tiles are too fine for that, so `serve` keeps the result in the
cache folder, as it does with checkpoints, and `convert` writes it wherever it is told. The bytes of every value stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from colibrid.errors import ModelError
from colibrid.model import floats
from colibrid.model.checkpoint import TEXT_FILES
from colibrid.model.fingerprint import pack_fingerprint
from colibrid.model.formats import float_of
from colibrid.model.pack_writer import CRC_BLOCK, Crc32c, Progress, open_writer
from colibrid.model.relaid import Places, relaid
from colibrid.model.tiles import file_bytes, tiled

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from colibrid.model.manifest import Backend, Manifest, PackFile, Section
    from colibrid.model.pack import Pack

BLOCK_ROWS = 4096  # of a matrix, laid out at once


def relay(
    pack: Pack,
    dst: Path,
    progress: Progress = lambda *_: None,
    *,
    crc32c: Crc32c,
    backend: Backend,
    name: str | None = None,
    wait: bool = False,
) -> Manifest:
    """Writes the pack DST. PackExistsError: it is there. ModelError: as relaid, or a file of the flat pack is damaged."""
    manifest = relaid(pack.manifest, backend)
    manifest = msgspec.structs.replace(manifest, name=name or manifest.name)
    with open_writer(dst, pack_fingerprint(pack.path, manifest.name, backend), crc32c, wait=wait) as writer:
        files = writer.write_all(manifest.files, _Source(pack, crc32c).bytes_of, progress)
        writer.copy_texts(pack.path, (*TEXT_FILES, "config.json"))
        manifest = msgspec.structs.replace(manifest, files=files)
        writer.publish(manifest)
    return manifest


class _Source:
    """The tensors of a flat pack, each file checked when it is first used."""

    def __init__(self, pack: Pack, crc32c: Crc32c) -> None:
        self._pack = pack
        self._crc32c = crc32c
        self._places = Places(pack.manifest)
        self._checked: set[str] = set()

    def bytes_of(self, planned: PackFile) -> Iterator[memoryview | bytes]:
        """A file of the new pack."""
        return file_bytes((section, self._section(planned, section)) for section in planned.sections)

    def _section(self, planned: PackFile, section: Section) -> Iterator[floats.Array]:
        file, flat = self._places.find(planned, section)
        self._check(file)
        storage = floats.STORAGE[float_of(flat)]
        values = np.memmap(self._pack.path / file.name, storage, "r", flat.offset, flat.shape)
        if section.layout == "flat":
            yield values
            return
        matrix = values.T if section.role == "down" else values
        blocks = (matrix[begin : begin + BLOCK_ROWS] for begin in range(0, len(matrix), BLOCK_ROWS))
        yield from tiled(blocks, section.layout)

    def _check(self, file: PackFile) -> None:
        """ModelError iff a block of the file has another checksum than colibri.json says."""
        if file.name in self._checked:
            return
        data = np.memmap(self._pack.path / file.name, np.uint8, "r")
        for index, expected in enumerate(file.crc32c or ()):
            block = data[index * CRC_BLOCK : (index + 1) * CRC_BLOCK]
            if self._crc32c(block.data) != expected:
                raise ModelError(f"{self._pack.path / file.name}: MiB {index} is damaged (crc32c); copy it again")
        self._checked.add(file.name)
