"""AWQ and GPTQ checkpoints: which matrices come as int4, and their numbers, scales and zero points as they are.

Nothing is rounded again: (q - z) x scale of the checkpoint is (value - zero) x scale of the pack, bit by bit.
int4_words.py has the words; the rest of such a checkpoint (norms, embedding, routers) is plain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from colibrid.errors import ModelError
from colibrid.model import floats, int4_words

if TYPE_CHECKING:
    from colibrid.model.checkpoint import Checkpoint, TensorInfo
    from colibrid.model.families.base import Source
    from colibrid.model.int4_scheme import Scheme

_SUFFIX = ".weight"
_MIDDLE = 8  # the zero point of a symmetric matrix


class Numbers(msgspec.Struct, frozen=True):
    """A matrix (rows, cols) as it is stored."""

    values: floats.Array  # (rows, cols) uint8, 0 .. 15
    scales: floats.Array  # (rows, groups) float16
    zeros: floats.Array  # (rows, groups) uint8


class Int4Source:
    """The int4 matrices of an open checkpoint."""

    def __init__(self, checkpoint: Checkpoint, scheme: Scheme) -> None:
        self._checkpoint = checkpoint
        self.scheme = scheme

    def has(self, source: Source) -> bool:
        """Whether the checkpoint has this matrix as int4."""
        return source.name.endswith(_SUFFIX) and f"{_base(source)}.qweight" in self._checkpoint.tensors

    def check(self, source: Source) -> tuple[str, ...]:
        """The names of the checkpoint's tensors that make it up. ModelError: a wrong shape, type or order of inputs."""
        rows, cols = source.shape
        group, base = self.scheme.group, _base(source)
        if cols % group or rows % int4_words.IN_A_WORD:
            raise ModelError(f"{base}: {rows} x {cols} cannot be int4 in groups of {group}; the checkpoint is damaged")
        weight = (cols, rows // 8) if self.scheme.method == "awq" else (cols // 8, rows)
        self._require(f"{base}.qweight", weight, ("I32",))
        self._require(f"{base}.qzeros", (cols // group, rows // 8), ("I32",))
        self._require(f"{base}.scales", (cols // group, rows), ("F16", "BF16", "F32"))
        names = [f"{base}.{part}" for part in ("qweight", "qzeros", "scales")]
        if f"{base}.g_idx" in self._checkpoint.tensors:
            self._check_order(base, cols)
            names.append(f"{base}.g_idx")
        elif self.scheme.desc_act:
            raise ModelError(f"the checkpoint lacks tensor {base}.g_idx, though quantization_config.desc_act is true")
        bias = self._checkpoint.tensors.get(f"{base}.bias")
        if bias is not None and not any(self._checkpoint.read(bias, 0, bias.bytes)):
            names.append(bias.name)  # some writers add a bias of zeros to every layer
        return tuple(names)

    def symmetric(self, source: Source) -> bool:
        """Whether every zero point is the middle, so that none need be kept."""
        return bool((self._zeros(source) == _MIDDLE).all())

    def numbers(self, source: Source) -> Numbers:
        """The whole matrix. ModelError: scales that are not finite or not exact in float16."""
        words = self._words(f"{_base(source)}.qweight")
        values = int4_words.from_awq(words) if self.scheme.method == "awq" else int4_words.from_gptq(words)
        return Numbers(values, self._scales(source), self._zeros(source))

    def _zeros(self, source: Source) -> floats.Array:
        name = f"{_base(source)}.qzeros"
        if self.scheme.method == "awq":
            return int4_words.from_awq(self._words(name))
        zeros = int4_words.zeros_from_gptq(self._words(name), self.scheme.version)
        if zeros.max() > 15:
            raise ModelError(
                f"tensor {name} stores 15 in version 1 of GPTQ, which some programs read as zero point 16 and some as 0; "
                "take a checkpoint in gptq_v2, or `colibrid quantize` the original one"
            )
        return zeros

    def _scales(self, source: Source) -> floats.Array:
        info = self._checkpoint.tensors[f"{_base(source)}.scales"]
        data = self._checkpoint.read(info, 0, info.bytes)
        stored = np.frombuffer(data, floats.STORAGE[info.precision]).reshape(info.shape)
        wide = floats.widen(stored, info.precision)
        scales = floats.narrow(wide, "fp16")
        if not np.array_equal(scales.astype(np.float32), wide) or not np.isfinite(wide).all():
            raise ModelError(f"{info.file}: tensor {info.name} has {info.dtype} values that float16 does not have")
        return np.ascontiguousarray(scales.T)

    def _check_order(self, base: str, cols: int) -> None:
        """Inputs must be in groups one after the other."""
        name = f"{base}.g_idx"
        self._require(name, (cols,), ("I32",))
        if not np.array_equal(self._words(name), np.arange(cols) // self.scheme.group):
            raise ModelError(
                f"tensor {name} puts inputs into groups out of order (desc_act); this is not read, so take a checkpoint "
                "made with desc_act false, or `colibrid quantize` the original one"
            )

    def _require(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> TensorInfo:
        info = self._checkpoint.tensors.get(name)
        if info is None:
            raise ModelError(f"the checkpoint lacks tensor {name}; download it again")
        if info.shape != shape or info.dtype not in dtypes:
            raise ModelError(
                f"{info.file}: tensor {name} is {info.dtype} {list(info.shape)}, expected {dtypes[0]} {list(shape)} by "
                "config.json"
            )
        return info

    def _words(self, name: str) -> floats.Array:
        info = self._checkpoint.tensors[name]
        return np.frombuffer(self._checkpoint.read(info, 0, info.bytes), "<i4").reshape(info.shape)


def _base(source: Source) -> str:
    return source.name.removesuffix(_SUFFIX)
