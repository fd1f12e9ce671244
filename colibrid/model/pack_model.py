"""A pack's tensors back as matrices, whatever layout and format they lie in: to compare, to export, to calibrate.

`matrix` is float32, `quantised` the numbers of an int8, int4 or fp8 matrix as they are stored. Sizes and places were
checked when the pack was opened; bytes are checked by verify.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from colibrid.errors import ModelError
from colibrid.model import floats, layout
from colibrid.model.families.base import Description
from colibrid.model.formats import float_of, format_of_section
from colibrid.model.quantised import QuantisedMatrix, read_section
from colibrid.model.tiles import untiled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from colibrid.model.formats import Format
    from colibrid.model.layout import Tensor
    from colibrid.model.manifest import PackFile, Section
    from colibrid.model.pack import Pack


class PackModel:
    """An opened pack as `Weights` (forward.py)."""

    def __init__(self, pack: Pack) -> None:
        self.pack = pack
        manifest = pack.manifest
        self.description = Description(manifest.hyperparameters, manifest.layers)
        experts = {name for layer in manifest.layers for name in layer.expert_files}
        self._places: dict[tuple[str, int | None, str], tuple[PackFile, Section]] = {}
        for file in manifest.files:
            for section in file.sections:
                self._places[section.role, section.layer, file.name if file.name in experts else ""] = file, section

    def tensors(self) -> Iterator[Tensor]:
        """All tensors, in the order of the files."""
        hyper, layers = self.description.hyperparameters, self.description.layers
        yield from layout.dense_tensors(hyper, layers)
        for index, layer in enumerate(layers):
            for expert in range(layer.experts):
                yield from layout.expert_tensors(hyper.hidden, index, expert, layer.expert_width)

    def format_of(self, tensor: Tensor) -> Format:
        return format_of_section(self._place(tensor)[1])

    def matrix(self, tensor: Tensor) -> floats.Array:
        """The whole of it as float32: (outputs, inputs), a vector as (1, n)."""
        file, section = self._place(tensor)
        if self.format_of(tensor).quantised:
            return self.quantised(tensor).dequantise()
        precision = float_of(section)
        storage = floats.STORAGE[precision]
        data = np.frombuffer(self._read(file, section), storage)
        if section.layout != "flat":
            return floats.widen(untiled(data, section.layout, section.shape), precision)
        values = floats.widen(data, precision).reshape(section.shape)
        return values.T if section.role == "down" else values

    def quantised(self, tensor: Tensor) -> QuantisedMatrix:
        """A matrix that is quantised."""
        file, section = self._place(tensor)
        return read_section(section, self._read(file, section))

    def _place(self, tensor: Tensor) -> tuple[PackFile, Section]:
        if tensor.expert is None or tensor.layer is None:
            return self._places[tensor.role, tensor.layer, ""]
        name = self.description.layers[tensor.layer].expert_files[tensor.expert]
        return self._places[tensor.role, None, name]

    def _read(self, file: PackFile, section: Section) -> bytes:
        path = self.pack.path / file.name
        try:
            with path.open("rb") as opened:
                opened.seek(section.offset)
                data = opened.read(section.bytes)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
        if len(data) != section.bytes:
            raise ModelError(f"{path}: ended inside {section.role}; copy or convert it again")
        return data
