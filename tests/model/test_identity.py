"""colibrid.model.identity."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from tune_results import manifest

from colibrid.cli.models import checksum
from colibrid.model.cache import BUNDLED_MODEL
from colibrid.model.convert import convert
from colibrid.model.identity import pack_identity
from colibrid.model.manifest import Layer
from colibrid.model.pack import open_pack

if TYPE_CHECKING:
    from pathlib import Path

    from colibrid.engine.library import Library
    from colibrid.model.pack import Pack

replace = msgspec.structs.replace


def test_an_identity_changes_with_what_a_pack_holds() -> None:
    """Weights, formats, shapes and the device; not with its name, version or texts."""
    own = manifest()
    file, digits = own.files[0], pack_identity(own).partition("@")[2]
    same = [replace(own, created_by="another version"), replace(own, name="renamed"), manifest()]
    assert {pack_identity(one).partition("@")[2] for one in same} == {digits}
    section = replace(file.sections[0], precision="fp16")
    others = [
        replace(own, files=(replace(file, sha256="ef" * 32),)),
        replace(own, files=(replace(file, sha256=None),)),
        replace(own, files=(replace(file, sections=(section,)),)),
        replace(own, backend="cuda"),
        replace(own, layers=(*own.layers[:3], Layer(ffn="dense"))),
    ]
    found = {pack_identity(one).partition("@")[2] for one in others}
    assert len(found) == len(others)
    assert digits not in found
    assert pack_identity(own).startswith("small@")


def test_two_conversions_have_one_identity(bundled_pack: Pack, library: Library, tmp_path: Path) -> None:
    """A profile follows a model to another host, where it is converted again."""
    convert(BUNDLED_MODEL, tmp_path / "again", crc32c=checksum(library))
    again = open_pack(tmp_path / "again").manifest
    assert pack_identity(again).partition("@")[2] == pack_identity(bundled_pack.manifest).partition("@")[2]
