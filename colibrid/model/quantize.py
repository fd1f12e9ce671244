"""Checkpoint -> pack in formats of a plan, with scales found on the user's own texts (calibrate.py).

    DST.partial/        the pack under way, as in a conversion
    DST.calibration/    the layers whose scales have been found; removed when the pack is complete

Without texts it is a conversion by the same plan; nothing here is needed.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

from colibrid.errors import ModelError
from colibrid.model.calibrate import Store, calibrate
from colibrid.model.checkpoint import Checkpoint
from colibrid.model.convert import Job
from colibrid.model.fingerprint import Dtype, fingerprint
from colibrid.model.pack_writer import Crc32c, Progress, open_writer
from colibrid.model.source import CheckpointModel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from colibrid.model.formats import Format
    from colibrid.model.layout import Tensor
    from colibrid.model.manifest import Backend, Manifest
    from colibrid.model.precision import Plan

CALIBRATION_VERSION = 1  # moves when the same texts would give other scales


def quantize(
    src: Path,
    dst: Path,
    plan: Plan,
    texts: Sequence[Sequence[int]],
    *,
    crc32c: Crc32c,
    dtype: Dtype = "auto",
    backend: Backend = "cpu",
    name: str | None = None,
    on_layer: Callable[[int, int], None] = lambda _done, _total: None,
    progress: Progress = lambda *_: None,
) -> Manifest:
    """Writes the pack DST. on_layer and progress tell of the two halves of the work. Errors and resumption as convert.

    ModelError too: the checkpoint is int4 already, or no rule of the plan rounds anything.
    """
    shown = name or src.resolve().name
    with Checkpoint(src) as checkpoint:
        model = CheckpointModel(checkpoint)
        model.check()
        if any(model.packed_format(tensor) for tensors in model.tensors.values() for tensor in tensors):
            raise ModelError(
                f"{src}: the checkpoint is int4 already; quantize the original one, or `colibrid convert` it"
            )
        unscaled = Job(model, dtype, backend, plan)

        def rounds(tensor: Tensor) -> Format | None:
            form = unscaled.format_of(tensor)
            return form if form.quantised and tensor.layer is not None else None

        if not any(rounds(tensor) for tensors in model.tensors.values() for tensor in tensors):
            raise ModelError(
                f"--precision: {str(plan)!r} rounds no matrix to int8, int4 or fp8; `colibrid convert` does that"
            )
        data = hashlib.sha256(msgspec.json.encode([list(text) for text in texts])).hexdigest()
        key = fingerprint(src, dtype, shown, backend, plan=f"{plan}; scaled {CALIBRATION_VERSION} {data}")
        with open_writer(dst, key, crc32c, wait=False) as writer:
            store = Store(writer.dst.with_name(f"{writer.dst.name}.calibration"), key)
            scaling = calibrate(model, texts, rounds, on_layer, store)
            manifest = Job(model, dtype, backend, plan, scaling).write(writer, shown, progress)
            store.clear()
    return manifest
