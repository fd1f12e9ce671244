"""Hugging Face checkpoint -> pack: checks that the tensors are those of the configuration, then writes file by file.

Nothing is written before names, shapes and types have been checked. Rounding between float formats is to nearest even,
to int8, int4 and fp8 as in rounding.py; what comes as int4 keeps its numbers. At most one matrix of an expert, or a block
of rows of a larger matrix, is in memory at a time.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from colibrid import __version__
from colibrid.errors import ModelError
from colibrid.model import floats, layout
from colibrid.model.checkpoint import TEXT_FILES, Checkpoint, text_files
from colibrid.model.fingerprint import Dtype, fingerprint
from colibrid.model.formats import FORMATS, Format, float_of
from colibrid.model.manifest import PACK_VERSION, Backend, FloatPrecision, Manifest, PackFile, Section
from colibrid.model.pack_writer import Crc32c, PackExistsError, PackWriter, Progress, open_writer
from colibrid.model.precision import AS_IT_IS, Plan, check_plan
from colibrid.model.quantised import quantised_section, section_bytes
from colibrid.model.rounding import rounded
from colibrid.model.source import CheckpointModel
from colibrid.model.tiles import file_bytes, tiled

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from colibrid.model.calibrate import Calibration
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
    plan: Plan = AS_IT_IS,
) -> Manifest:
    """Writes the pack DST from the checkpoint folder SRC and returns its description.

    crc32c takes the bytes of one block. backend: whose kernels read the pack; "any" is the form to exchange, repacked
    whenever it is loaded. `name` is the model's default id, else the folder's. `wait`: stand in line
    behind another conversion to the same place. `plan`: which matrices get another format than dtype. PackExistsError: DST is there. ModelError: all else that is wrong
    with the checkpoint or the destination; a partial result is kept and resumed by the same call.
    """
    shown = name or src.resolve().name
    with Checkpoint(src) as checkpoint:
        model = CheckpointModel(checkpoint)
        model.check()
        job = Job(model, dtype, backend, plan)
        key = fingerprint(src, dtype, shown, backend, plan=str(plan))
        with open_writer(dst, key, crc32c, wait=wait) as writer:
            return job.write(writer, shown, progress or _silent)


def _silent(_done: int, _total: int, _file: str) -> None:
    pass


class Job:
    """One conversion: what to make, and where each part comes from."""

    def __init__(
        self,
        model: CheckpointModel,
        dtype: Dtype,
        backend: Backend,
        plan: Plan,
        scaling: Calibration | None = None,
    ) -> None:
        self._model = model
        self._backend = backend
        self._plan = plan
        self._scaling = scaling
        description = model.description
        check_plan(plan, description.layers, tied_head=description.hyperparameters.tied_head)
        self._precision: FloatPrecision = model.precision() if dtype == "auto" else dtype
        self._files = layout.planned_files(
            description.hyperparameters, description.layers, self._precision, layout.LAYOUT_OF[backend], self.format_of
        )
        if backend == "cuda" and any(
            section.layout == "mma" and section.precision == "fp32" for file in self._files for section in file.sections
        ):
            raise ModelError("the cuda backend computes with 16-bit weights; convert with --dtype bf16 or fp16")

    def format_of(self, tensor: Tensor) -> Format:
        """What a tensor is to be written as. ModelError: it is int4 already, and another format is asked for."""
        if tensor.role in layout.FP32_ROLES:
            return FORMATS["fp32"]
        packed = self._model.packed_format(tensor)
        chosen = FORMATS[self._plan.format_of(tensor, packed or self._precision)]
        if packed is not None and chosen.quantised and chosen.name != packed:
            raise ModelError(
                f"{tensor.label()}: the checkpoint has it as {packed}, and {chosen.name} would round it again; leave it out "
                "of --precision, or convert the original checkpoint"
            )
        return chosen

    def write(self, writer: PackWriter, name: str, progress: Progress) -> Manifest:
        """The whole pack; it is published."""
        files = writer.write_all(self._files, self._file_chunks, progress)
        folder = self._model.checkpoint.folder
        texts = text_files(folder, self._model.checkpoint.config)
        writer.copy_texts(folder, (*TEXT_FILES, "config.json"))  # config.json: for `colibrid export`
        manifest = Manifest(
            version=PACK_VERSION,
            backend=self._backend,
            family=self._model.family.architecture,
            name=name,
            precision=self._precision,
            created_by=f"colibrid {__version__}",
            hyperparameters=self._model.description.hyperparameters,
            layers=self._model.description.layers,
            files=files,
            text=texts,
        )
        writer.publish(manifest)
        return manifest

    def _file_chunks(self, planned: PackFile) -> Iterator[memoryview | bytes]:
        tensors = zip(planned.sections, self._model.tensors[planned.name], strict=True)
        return file_bytes((section, self._section_chunks(section, tensor)) for section, tensor in tensors)

    def _section_chunks(self, section: Section, tensor: Tensor) -> Iterator[floats.Array]:
        form = self.format_of(tensor)
        if form.quantised and form.name == self._model.packed_format(tensor):
            yield from section_bytes(section, [self._model.packed(tensor)])
            return
        if form.quantised:
            energy = None if self._scaling is None else self._scaling.energy(tensor)
            rounding = partial(rounded, energy=energy)
            yield from quantised_section(section, self._rows(tensor, "fp32"), form, rounding)
            return
        rows = self._rows(tensor, float_of(section))
        if section.layout != "flat":
            yield from tiled(rows, section.layout)
        elif tensor.role == "down":  # flat has it transposed
            yield np.concatenate(list(rows)).T
        else:
            yield from rows

    def _rows(self, tensor: Tensor, target: FloatPrecision) -> Iterator[floats.Array]:
        if self._scaling is None or tensor.layer is None:
            yield from self._model.rows(tensor, target)
            return
        scaled = floats.narrow(self._scaling.fold(tensor, self._model.matrix(tensor)), target)
        if floats.count_not_finite(scaled, target):
            raise ModelError(f"{tensor.label()}: scaled values are too large for {target}; use --dtype bf16 or fp32")
        yield scaled


__all__ = ["Crc32c", "Job", "PackExistsError", "Progress", "convert"]
