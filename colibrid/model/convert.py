"""Hugging Face checkpoint -> pack: checks that the tensors are those of the configuration, then writes file by file.

Nothing is written before names, shapes and types have been checked. Rounding is to nearest even. At most one matrix
of an expert, or a block of rows of a larger matrix, is in memory at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from colibrid import __version__
from colibrid.errors import ModelError
from colibrid.model import layout
from colibrid.model.checkpoint import TEXT_FILES, Checkpoint, text_files
from colibrid.model.fingerprint import Dtype, fingerprint
from colibrid.model.formats import float_of
from colibrid.model.manifest import PACK_VERSION, Backend, FloatPrecision, Manifest, PackFile, Section
from colibrid.model.pack_writer import Crc32c, PackExistsError, PackWriter, Progress, open_writer
from colibrid.model.quantised import quantised_section
from colibrid.model.source import CheckpointModel
from colibrid.model.tiles import file_bytes, tiled

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from colibrid.model import floats
    from colibrid.model.layout import Tensor


def convert(
    src: Path,
    dst: Path,
    dtype: Dtype = "auto",
    progress: Progress | None = None,
    *,
    crc32c: Crc32c,
    backend: Backend = "cpu",
    name: str | None = None,
    wait: bool = False,
) -> Manifest:
    """Writes the pack DST from the checkpoint folder SRC and returns its description.

    crc32c takes the bytes of one block. backend: whose kernels read the pack; "any" is the form to exchange, repacked
    whenever it is loaded. `name` is the model's default id, else the folder's. `wait`: stand in line
    behind another conversion to the same place. PackExistsError: DST is there. ModelError: all else that is wrong
    with the checkpoint or the destination; a partial result is kept and resumed by the same call.
    """
    shown = name or src.resolve().name
    with Checkpoint(src) as checkpoint:
        model = CheckpointModel(checkpoint)
        model.check()
        job = _Job(model, dtype, backend)
        with open_writer(dst, fingerprint(src, dtype, shown, backend), crc32c, wait=wait) as writer:
            files = job.write(writer, progress or _silent)
            texts = text_files(src, checkpoint.config)
            writer.copy_texts(src, TEXT_FILES)
            manifest = Manifest(
                version=PACK_VERSION,
                backend=backend,
                family=model.family.architecture,
                name=shown,
                precision=job.precision,
                created_by=f"colibrid {__version__}",
                hyperparameters=model.description.hyperparameters,
                layers=model.description.layers,
                files=files,
                text=texts,
            )
            writer.publish(manifest)
    return manifest


def _silent(_done: int, _total: int, _file: str) -> None:
    pass


class _Job:
    """One conversion: what to make, and where each part comes from."""

    def __init__(self, model: CheckpointModel, dtype: Dtype, backend: Backend) -> None:
        self._model = model
        self.precision: FloatPrecision = model.precision() if dtype == "auto" else dtype
        if backend == "cuda" and self.precision == "fp32":
            raise ModelError("the cuda backend computes with 16-bit weights; convert with --dtype bf16 or fp16")
        self._files = layout.planned_files(
            model.description.hyperparameters, model.description.layers, self.precision, layout.LAYOUT_OF[backend]
        )

    def write(self, writer: PackWriter, progress: Progress) -> tuple[PackFile, ...]:
        """All files of weights."""
        return writer.write_all(self._files, self._file_chunks, progress)

    def _file_chunks(self, planned: PackFile) -> Iterator[memoryview | bytes]:
        tensors = zip(planned.sections, self._model.tensors[planned.name], strict=True)
        return file_bytes((section, self._section_chunks(section, tensor)) for section, tensor in tensors)

    def _section_chunks(self, section: Section, tensor: Tensor) -> Iterator[floats.Array]:
        if section.group_rows:
            yield from quantised_section(section, self._model.rows(tensor, "fp32"))
            return
        rows = self._model.rows(tensor, float_of(section))
        if section.layout != "flat":
            yield from tiled(rows, section.layout)
        elif tensor.role == "down":  # flat has it transposed
            yield np.concatenate(list(rows)).T
        else:
            yield from rows


__all__ = ["Crc32c", "PackExistsError", "Progress", "convert"]
