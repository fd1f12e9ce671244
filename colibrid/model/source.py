"""A Hugging Face checkpoint as the tensors of a model: which of its tensors make each of ours, and their values.

Values come as rows in a float precision of ours, in blocks, so that a matrix larger than memory can be copied; or whole,
as float32 (`matrix`); or, of an AWQ or GPTQ checkpoint, as the int4 numbers that it has (`packed`). Every value read is
checked to be finite.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from colibrid.errors import ModelError
from colibrid.model import floats, layout
from colibrid.model.families import Family, family_of
from colibrid.model.families.base import Description, Recipe, Source, ignorable, recipe
from colibrid.model.families.config import Config
from colibrid.model.formats import format_of
from colibrid.model.int4_scheme import read_scheme
from colibrid.model.int4_source import Int4Source
from colibrid.model.quantised import QuantisedMatrix

if TYPE_CHECKING:
    from collections.abc import Iterator

    from colibrid.model.checkpoint import Checkpoint, TensorInfo
    from colibrid.model.layout import Tensor
    from colibrid.model.manifest import FloatPrecision

BLOCK_BYTES = 32 << 20  # of source rows read at once
_SHOWN = 3  # names listed in a message about many tensors


class CheckpointModel:
    """A checkpoint whose configuration has been understood. It does not own the checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.family: Family = family_of(checkpoint.config)
        self.description: Description = self.family.read(Config(checkpoint.config))
        hyper, layers = self.description.hyperparameters, self.description.layers
        self.tensors: dict[str, tuple[Tensor, ...]] = {  # of each file of a pack, in its order
            layout.DENSE_FILE: tuple(layout.dense_tensors(hyper, layers))
        }
        for index, layer in enumerate(layers):
            for expert, name in enumerate(layer.expert_files):
                self.tensors[name] = layout.expert_tensors(hyper.hidden, index, expert, layer.expert_width)
        scheme = read_scheme(checkpoint.config)
        self._int4 = None if scheme is None else Int4Source(checkpoint, scheme)
        packed = next((name for name in checkpoint.tensors if name.endswith(".qweight")), None)
        if scheme is None and packed is not None:
            raise ModelError(
                f"tensor {packed} is int4, but config.json has no quantization_config; put what quantize_config.json or "
                'quant_config.json says there, with quant_method "gptq" or "awq", bits and group_size'
            )
        self._zero_points: dict[tuple[int | None, int | None, str], bool] = {}

    def precision(self) -> FloatPrecision:
        """The type of most of the checkpoint's bytes, int4 matrices aside."""
        sizes: Counter[FloatPrecision] = Counter()
        for info in self.checkpoint.tensors.values():
            if self._int4 is None or info.name.endswith((".weight", ".bias")):
                sizes[info.precision] += info.bytes
        if not sizes:
            raise ModelError(f"{self.checkpoint.folder}: the checkpoint has no tensors")
        return sizes.most_common(1)[0][0]

    def check(self) -> None:
        """ModelError naming tensors that are missing, too many, of a wrong shape or of an unknown type."""
        found = self.checkpoint.tensors
        wanted: set[str] = set()
        missing: list[str] = []
        for tensors in self.tensors.values():
            for source in (source for tensor in tensors for source in self.recipe(tensor)):
                info = found.get(source.name)
                if self._int4 is not None and self._int4.has(source):
                    wanted.update(self._int4.check(source))
                elif info is None:
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

    def recipe(self, tensor: Tensor) -> Recipe:
        """Which of the checkpoint's tensors make this one."""
        hyper, layers = self.description.hyperparameters, self.description.layers
        return recipe(self.family.names, hyper, layers, tensor, self.checkpoint.tensors)

    def packed_format(self, tensor: Tensor) -> str | None:
        """The format of a matrix that the checkpoint has as int4, else None. An expert's three matrices have one."""
        if not self._is_packed(tensor):
            return None
        assert self._int4 is not None, "a packed matrix comes from an int4 checkpoint"
        alike: tuple[Tensor, ...] = (tensor,)
        if tensor.layer is not None and tensor.expert is not None:
            alike = self.tensors[self.description.layers[tensor.layer].expert_files[tensor.expert]]
        return f"int4-g{self._int4.scheme.group}" + ("-z" if any(map(self._has_zero_points, alike)) else "")

    def packed(self, tensor: Tensor) -> QuantisedMatrix:
        """A matrix that the checkpoint has as int4, with its own numbers, in packed_format."""
        assert self._int4 is not None, "a packed matrix comes from an int4 checkpoint"
        form = format_of(self.packed_format(tensor) or "")
        parts = [self._int4.numbers(source) for source in self.recipe(tensor)]
        return QuantisedMatrix(
            form,
            np.concatenate([part.values for part in parts]),
            np.concatenate([part.scales for part in parts]),
            np.concatenate([part.zeros for part in parts]) if form.zero_points else None,
        )

    def rows(self, tensor: Tensor, target: FloatPrecision) -> Iterator[floats.Array]:
        """Blocks (rows, cols) of the matrix as it multiplies, outputs by inputs; of a vector, pieces (1, n)."""
        if self._is_packed(tensor):
            yield floats.narrow(self.packed(tensor).dequantise(), target)
            return
        for source in self.recipe(tensor):
            yield from self._blocks(source, target)

    def matrix(self, tensor: Tensor) -> floats.Array:
        """The whole of it as float32: (outputs, inputs), a vector as (1, n)."""
        blocks = list(self.rows(tensor, "fp32"))
        return np.concatenate(blocks, axis=0 if tensor.role in layout.MATRIX_ROLES else 1)

    def _is_packed(self, tensor: Tensor) -> bool:
        if self._int4 is None:
            return False
        found = [self._int4.has(source) for source in self.recipe(tensor)]
        if any(found) and not all(found):
            raise ModelError(f"{tensor.label()}: some of its parts are int4 and some are not, which is not read")
        return all(found)

    def _has_zero_points(self, tensor: Tensor) -> bool:
        key = (tensor.layer, tensor.expert, tensor.role)
        if key not in self._zero_points:
            assert self._int4 is not None, "a packed matrix comes from an int4 checkpoint"
            self._zero_points[key] = not all(self._int4.symmetric(source) for source in self.recipe(tensor))
        return self._zero_points[key]

    def _may_ignore(self, name: str) -> bool:
        found = self.checkpoint.tensors
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
            if self.checkpoint.read(one, begin, count) != self.checkpoint.read(other, begin, count):
                return False
        return True

    def _blocks(self, source: Source, target: FloatPrecision) -> Iterator[floats.Array]:
        """The source's rows (rows, cols) in the target precision, some at a time."""
        info = self.checkpoint.tensors[source.name]
        cols = source.shape[-1]
        rows = source.shape[-2] if len(source.shape) > 1 else 1
        begin, end = source.rows or (0, rows)
        first = (source.index or 0) * rows
        row_bytes = cols * floats.STORAGE[info.precision].itemsize
        step = max(1, BLOCK_BYTES // row_bytes)
        for row in range(begin, end, step):
            count = min(step, end - row)
            data = self.checkpoint.read(info, (first + row) * row_bytes, count * row_bytes)
            values = np.frombuffer(data, floats.STORAGE[info.precision]).reshape(count, cols)
            yield _checked(values, info, target)


def _checked(values: floats.Array, info: TensorInfo, target: FloatPrecision) -> floats.Array:
    """Converted values. ModelError naming the tensor if one is or becomes infinite or NaN."""
    bad = floats.count_not_finite(values, info.precision)
    if bad:
        raise ModelError(f"{info.file}: tensor {info.name} has values that are not finite ({bad} in one block)")
    converted = floats.convert(values, info.precision, target)
    if converted is not values and floats.count_not_finite(converted, target):
        raise ModelError(f"{info.file}: tensor {info.name} has values too large for {target}; use --dtype fp32")
    return converted


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"tensor {shown}{more}" if len(names) == 1 else f"tensors {shown}{more}"
