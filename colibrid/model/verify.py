"""Whether a pack's bytes are what its description says: sha256 of every file, and no number that is not one. Pure numpy."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from colibrid.model import floats
from colibrid.model.formats import float_of, format_of_section
from colibrid.model.quantised import read_section

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from colibrid.model.manifest import PackFile, Section
    from colibrid.model.pack import Pack

_FP8_NAN = 0x7F


class Finding(msgspec.Struct, frozen=True):
    """Something that is wrong with a pack."""

    file: str
    problem: str


def damages(pack: Pack, progress: Callable[[int, int, str], None] = lambda *_: None) -> Iterator[Finding]:
    """Every file whose bytes are wrong; shapes and sizes were checked when the pack was opened."""
    total = sum(file.bytes for file in pack.manifest.files)
    done = 0
    for file in pack.manifest.files:
        yield from _file(pack, file)
        done += file.bytes
        progress(done, total, file.name)


def _file(pack: Pack, file: PackFile) -> Iterator[Finding]:
    path = pack.path / file.name
    try:
        with path.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
            if file.sha256 is None:
                yield Finding(file.name, "has no sha256 in colibri.json, so its bytes cannot be checked")
            elif found != file.sha256:
                yield Finding(file.name, f"sha256 is {found}, expected {file.sha256}; copy or convert it again")
            for section in file.sections:
                opened.seek(section.offset)
                data = opened.read(section.bytes)
                problem = _section(section, data)
                if problem:
                    where = section.role if section.layer is None else f"layer {section.layer} {section.role}"
                    yield Finding(file.name, f"{where}: {problem}")
    except OSError as error:
        yield Finding(file.name, f"cannot be read: {error.strerror}")


def _section(section: Section, data: bytes) -> str | None:
    """What is wrong with the numbers of a section, None: nothing."""
    if len(data) != section.bytes:
        return "the file ended within it"
    if not format_of_section(section).quantised:
        precision = float_of(section)
        bad = floats.count_not_finite(np.frombuffer(data, floats.STORAGE[precision]), precision)
        return f"{bad} values are not finite" if bad else None
    matrix = read_section(section, data)
    if not np.isfinite(matrix.scales).all():
        return "scales are not finite"
    if matrix.zeros is not None and matrix.zeros.max() > 15:
        return "zero points are above 15"
    if section.precision == "fp8" and ((matrix.values & _FP8_NAN) == _FP8_NAN).any():
        return "values are not finite"
    return None
