"""Hugging Face checkpoint -> pack: checks that the tensors are those of the configuration, then writes file by file.

Nothing is written before names, shapes and types have been checked. Rounding is to nearest even. At most one matrix
of an expert, or a block of rows of a larger matrix, is in memory at a time.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from colibrid import __version__
from colibrid.errors import ModelError
from colibrid.model import floats, layout
from colibrid.model.checkpoint import TEXT_FILES, Checkpoint, TensorInfo, text_files
from colibrid.model.families import Family, family_of
from colibrid.model.families.base import Description, Recipe, Source, ignorable, recipe
from colibrid.model.families.config import Config
from colibrid.model.fingerprint import Dtype, fingerprint
from colibrid.model.manifest import PACK_VERSION, Backend, Manifest, PackFile, Precision, Section
from colibrid.model.pack_writer import Crc32c, PackExistsError, PackWriter, Progress, open_writer
from colibrid.model.tiles import file_bytes, tiled

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from colibrid.model.layout import Tensor

BLOCK_BYTES = 32 << 20  # of source rows read at once
_SHOWN = 3  # names listed in a message about many tensors


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
        job = _Job(checkpoint, dtype, backend)
        job.check()
        with open_writer(dst, fingerprint(src, dtype, shown, backend), crc32c, wait=wait) as writer:
            files = job.write(writer, progress or _silent)
            texts = text_files(src, checkpoint.config)
            writer.copy_texts(src, TEXT_FILES)
            manifest = Manifest(
                version=PACK_VERSION,
                backend=backend,
                family=job.family.architecture,
                name=shown,
                precision=job.precision,
                created_by=f"colibrid {__version__}",
                hyperparameters=job.description.hyperparameters,
                layers=job.description.layers,
                files=files,
                text=texts,
            )
            writer.publish(manifest)
    return manifest


def _silent(_done: int, _total: int, _file: str) -> None:
    pass


class _Job:
    """One conversion: what to make, and where each part comes from."""

    def __init__(self, checkpoint: Checkpoint, dtype: Dtype, backend: Backend) -> None:
        self._checkpoint = checkpoint
        self.family: Family = family_of(checkpoint.config)
        self.description: Description = self.family.read(Config(checkpoint.config))
        self.precision: Precision = _main_precision(checkpoint) if dtype == "auto" else dtype
        if backend == "cuda" and self.precision == "fp32":
            raise ModelError("the cuda backend computes with 16-bit weights; convert with --dtype bf16 or fp16")
        hyper, layers = self.description.hyperparameters, self.description.layers
        self._files = layout.planned_files(hyper, layers, self.precision, layout.LAYOUT_OF[backend])
        self._tensors: dict[str, tuple[Tensor, ...]] = {layout.DENSE_FILE: tuple(layout.dense_tensors(hyper, layers))}
        for index, layer in enumerate(layers):
            for expert, name in enumerate(layer.expert_files):
                self._tensors[name] = layout.expert_tensors(hyper.hidden, index, expert, layer.expert_width)

    def check(self) -> None:
        """ModelError naming tensors that are missing, too many, of a wrong shape or of an unknown type."""
        found = self._checkpoint.tensors
        wanted: set[str] = set()
        missing: list[str] = []
        for tensors in self._tensors.values():
            for source in (source for tensor in tensors for source in self._recipe(tensor).sources):
                info = found.get(source.name)
                if info is None:
                    missing.append(source.name)
                elif info.shape != source.shape:
                    raise ModelError(
                        f"{info.file}: tensor {source.name} has shape {list(info.shape)}, "
                        f"config.json asks for {list(source.shape)}"
                    )
                else:
                    _ = info.precision
                wanted.add(source.name)
        if missing:
            raise ModelError(f"the checkpoint lacks {_listed(missing)}; download it again, or correct config.json")
        extra = [name for name in found if name not in wanted and not self._may_ignore(name)]
        if extra:
            raise ModelError(f"the checkpoint has {_listed(extra)} that config.json does not call for")

    def write(self, writer: PackWriter, progress: Progress) -> tuple[PackFile, ...]:
        """All files of weights."""
        return writer.write_all(self._files, self._file_chunks, progress)

    def _may_ignore(self, name: str) -> bool:
        found = self._checkpoint.tensors
        if name == "lm_head.weight" and self.description.hyperparameters.tied_head:
            if self._same_bytes(found[name], found["model.embed_tokens.weight"]):
                return True
            raise ModelError(
                "lm_head.weight differs from model.embed_tokens.weight though config.json ties them; "
                "set tie_word_embeddings to false"
            )
        return ignorable(self.family.names, self.description.layers, name)

    def _same_bytes(self, one: TensorInfo, other: TensorInfo) -> bool:
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        for begin in range(0, one.bytes, BLOCK_BYTES):
            count = min(BLOCK_BYTES, one.bytes - begin)
            if self._checkpoint.read(one, begin, count) != self._checkpoint.read(other, begin, count):
                return False
        return True

    def _recipe(self, tensor: Tensor) -> Recipe:
        hyper, layers = self.description.hyperparameters, self.description.layers
        return recipe(self.family.names, hyper, layers, tensor, self._checkpoint.tensors)

    def _file_chunks(self, planned: PackFile) -> Iterator[memoryview | bytes]:
        tensors = zip(planned.sections, self._tensors[planned.name], strict=True)
        return file_bytes((section, self._section_chunks(section, self._recipe(tensor))) for section, tensor in tensors)

    def _section_chunks(self, section: Section, made: Recipe) -> Iterator[floats.Array]:
        rows = (block for source in made.sources for block in self._blocks(source, section.precision))
        if section.layout != "flat":
            yield from tiled(rows, section.layout)
        elif made.transpose:
            yield np.concatenate(list(rows)).T
        else:
            yield from rows

    def _blocks(self, source: Source, target: Precision) -> Iterator[floats.Array]:
        """The source's rows (rows, cols) in the target precision, some at a time."""
        info = self._checkpoint.tensors[source.name]
        cols = source.shape[-1]
        rows = source.shape[-2] if len(source.shape) > 1 else 1
        begin, end = source.rows or (0, rows)
        first = (source.index or 0) * rows
        row_bytes = cols * floats.STORAGE[info.precision].itemsize
        step = max(1, BLOCK_BYTES // row_bytes)
        for row in range(begin, end, step):
            count = min(step, end - row)
            data = self._checkpoint.read(info, (first + row) * row_bytes, count * row_bytes)
            values = np.frombuffer(data, floats.STORAGE[info.precision]).reshape(count, cols)
            yield _checked(values, info, target)


def _checked(values: floats.Array, info: TensorInfo, target: Precision) -> floats.Array:
    """Converted values. ModelError naming the tensor if one is or becomes infinite or NaN."""
    bad = floats.count_not_finite(values, info.precision)
    if bad:
        raise ModelError(f"{info.file}: tensor {info.name} has values that are not finite ({bad} in one block)")
    converted = floats.convert(values, info.precision, target)
    if converted is not values and floats.count_not_finite(converted, target):
        raise ModelError(f"{info.file}: tensor {info.name} has values too large for {target}; use --dtype fp32")
    return converted


def _main_precision(checkpoint: Checkpoint) -> Precision:
    """The type of most of the checkpoint's bytes."""
    sizes: Counter[Precision] = Counter()
    for info in checkpoint.tensors.values():
        sizes[info.precision] += info.bytes
    if not sizes:
        raise ModelError(f"{checkpoint.folder}: the checkpoint has no tensors")
    return sizes.most_common(1)[0][0]


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"tensor {shown}{more}" if len(names) == 1 else f"tensors {shown}{more}"


__all__ = ["Crc32c", "PackExistsError", "Progress", "convert"]
