"""Pack -> Hugging Face checkpoint: plain safetensors, or AWQ or GPTQ whose int4 numbers are the pack's own.

Plain export writes every matrix in a float type, quantised ones as the numbers that they stand for. AWQ and GPTQ keep
int4 matrices as they are, bit by bit, and float ones beside them; a pack with int8 or fp8 has no such form. config.json
is the one that the conversion kept in the pack.
"""

from __future__ import annotations

import shutil
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from colibrid.errors import ModelError
from colibrid.model import floats, int4_words, layout
from colibrid.model.checkpoint import PRECISION_BY_DTYPE, TEXT_FILES, read_json
from colibrid.model.families import family_of
from colibrid.model.families.base import recipe
from colibrid.model.pack_model import PackModel
from colibrid.model.quantised import INT4_MIDDLE
from colibrid.model.safetensors_writer import Entry, write_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from colibrid.model.families.base import Source
    from colibrid.model.floats import Array
    from colibrid.model.layout import Tensor
    from colibrid.model.manifest import FloatPrecision
    from colibrid.model.pack import Pack
    from colibrid.model.quantised import QuantisedMatrix

CONFIG_FILE = "config.json"
Kind = Literal["safetensors", "awq", "gptq"]
_DTYPES: dict[FloatPrecision, str] = {precision: dtype for dtype, precision in PRECISION_BY_DTYPE.items()}
_TORCH: dict[FloatPrecision, str] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def export(
    pack: Pack,
    dst: Path,
    kind: Kind = "safetensors",
    progress: Callable[[int, int, str], None] = lambda *_: None,
    *,
    precision: FloatPrecision | None = None,
) -> None:
    """Writes the folder DST, which appears when it is complete. precision: of float tensors, else the pack's main one.

    ModelError: DST is there, the pack has no config.json, or formats that `kind` cannot hold.
    """
    if dst.exists():
        raise ModelError(f"{dst}: exists already; remove it or choose another destination")
    if not (pack.path / CONFIG_FILE).is_file():
        raise ModelError(
            f"{pack.path / CONFIG_FILE}: missing; packs of earlier versions do not keep it, so copy the original "
            "checkpoint's there"
        )
    job = _Export(pack, kind, precision or pack.manifest.precision)
    entries = list(job.entries())
    partial_folder = dst.with_name(f"{dst.name}.partial")
    try:
        shutil.rmtree(partial_folder, ignore_errors=True)
        partial_folder.mkdir(parents=True)
        write_tensors(partial_folder, entries, progress)
        (partial_folder / CONFIG_FILE).write_bytes(
            msgspec.json.format(msgspec.json.encode(job.config()), indent=2) + b"\n"
        )
        for name in TEXT_FILES:
            if (pack.path / name).is_file():
                shutil.copyfile(pack.path / name, partial_folder / name)
        partial_folder.rename(dst)
    except OSError as error:
        raise ModelError(f"{dst}: cannot be written: {error.strerror or error}") from None


class _Export:
    """One export: which tensors there will be."""

    def __init__(self, pack: Pack, kind: Kind, precision: FloatPrecision) -> None:
        self._model = PackModel(pack)
        self._kind = kind
        self._precision = precision
        self._config = read_json(pack.path, CONFIG_FILE)
        self._names = family_of({"architectures": [pack.manifest.family]}).names
        self._group = 0
        self._version = 1  # of GPTQ's zero points

    def entries(self) -> Iterator[Entry]:
        """All tensors. ModelError: a format that has no place here."""
        hyper, layers = self._model.description.hyperparameters, self._model.description.layers
        packed = {tensor for tensor in self._model.tensors() if self._is_packed(tensor)}
        if self._kind != "safetensors":
            if not packed:
                raise ModelError(f"the pack has no int4 matrices, so it cannot be written as {self._kind}")
            self._version = self._zero_version(packed)
        for tensor in self._model.tensors():
            begin = 0
            for source in recipe(self._names, hyper, layers, tensor, ()):
                count = source.shape[0]
                rows = slice(begin, begin + count)
                begin += count
                yield from self._packed(tensor, source, rows) if tensor in packed else self._plain(tensor, source, rows)

    def config(self) -> dict[str, Any]:
        """The original config.json with what this export is."""
        found = {name: value for name, value in self._config.items() if name != "quantization_config"}
        found["dtype" if "dtype" in found else "torch_dtype"] = _TORCH[self._precision]
        if self._kind == "awq":
            found["quantization_config"] = {
                "quant_method": "awq",
                "bits": 4,
                "group_size": self._group,
                "zero_point": True,
                "version": "gemm",
                "modules_to_not_convert": None,
            }
        if self._kind == "gptq":
            found["quantization_config"] = {
                "quant_method": "gptq",
                "bits": 4,
                "group_size": self._group,
                "desc_act": False,
                "sym": False,
                "checkpoint_format": "gptq" if self._version == 1 else "gptq_v2",
            }
        return found

    def _is_packed(self, tensor: Tensor) -> bool:
        form = self._model.format_of(tensor)
        if self._kind == "safetensors" or not form.quantised:
            return False
        rows, cols = layout.shape_of(tensor, "rows16")
        group = form.group_cols
        if form.precision != "int4" or rows % int4_words.IN_A_WORD or self._group not in (0, group):
            raise ModelError(
                f"{tensor.label()} is {form.name}, {rows} x {cols}: {self._kind} holds int4 of one group size and of rows "
                "in eights; write --format safetensors"
            )
        self._group = group
        return True

    def _zero_version(self, packed: set[Tensor]) -> int:
        """The version of GPTQ's zero points: as in the original, unless that has no number for a zero of 0."""
        original = self._config.get("quantization_config")
        if isinstance(original, dict) and original.get("checkpoint_format") == "gptq_v2":
            return 2
        for tensor in packed:
            if self._model.format_of(tensor).zero_points and (_zeros(self._model.quantised(tensor)) == 0).any():
                return 2
        return 1

    def _plain(self, tensor: Tensor, source: Source, rows: slice) -> Iterator[Entry]:
        """In the main precision; norms, biases and routers keep float32 if they would lose something."""

        def make(precision: FloatPrecision) -> Array:
            matrix = self._model.matrix(tensor)
            values = matrix[rows] if len(source.shape) > 1 else matrix[0, rows]
            return floats.narrow(np.ascontiguousarray(values), precision)

        precision = self._precision
        if tensor.role in layout.FP32_ROLES:
            exact = make("fp32")
            if not np.array_equal(floats.widen(floats.narrow(exact, precision), precision), exact):
                precision = "fp32"
        size = int(np.prod(source.shape)) * floats.STORAGE[precision].itemsize
        yield Entry(source.name, _DTYPES[precision], source.shape, size, partial(make, precision))

    def _packed(self, tensor: Tensor, source: Source, rows: slice) -> Iterator[Entry]:
        """qweight, qzeros, scales, and the order of inputs that GPTQ's readers want."""
        base = source.name.removesuffix(".weight")
        count, cols = source.shape
        groups = cols // self._group
        awq = self._kind == "awq"

        def values() -> Array:
            numbers = self._model.quantised(tensor).values[rows]
            return int4_words.to_awq(numbers) if awq else int4_words.to_gptq(numbers)

        def zeros() -> Array:
            numbers = _zeros(self._model.quantised(tensor))[rows]
            return int4_words.to_awq(numbers) if awq else int4_words.zeros_to_gptq(numbers, self._version)

        def scales() -> Array:
            return self._model.quantised(tensor).scales[rows].T

        shape = (cols, count // 8) if awq else (cols // 8, count)
        yield Entry(f"{base}.qweight", "I32", shape, count * cols // 2, values)
        yield Entry(f"{base}.qzeros", "I32", (groups, count // 8), groups * count // 2, zeros)
        yield Entry(f"{base}.scales", "F16", (groups, count), groups * count * 2, scales)
        if not awq:
            order = (np.arange(cols) // self._group).astype(np.int32)
            yield Entry(f"{base}.g_idx", "I32", (cols,), 4 * cols, lambda: order)


def _zeros(matrix: QuantisedMatrix) -> Array:
    return np.full(matrix.scales.shape, INT4_MIDDLE, np.uint8) if matrix.zeros is None else matrix.zeros
