"""A name for what a pack holds, by which a profile says what pack it is for.

Packs of one checkpoint for the CPU and for a GPU hold the same numbers in another order, and formats differ by pack, so each
has a profile of its own: the figures that speak for a point were measured on that pack. Two conversions of one checkpoint
for one device have one name, on any host.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from colibrid.model.manifest import Manifest

_DIGITS = 16
_MOST_NAME = 256  # characters, of a profile's pack: line


def pack_identity(manifest: Manifest) -> str:
    """`name@digits`: the digits change with any weight, shape or format, and with nothing else. The name is for people.

    Files without a checksum (packs that were written by hand, dummy weights) count by their descriptions alone.
    """
    digest = hashlib.sha256()
    for part in (manifest.backend, manifest.hyperparameters, manifest.layers):
        digest.update(msgspec.json.encode(part))
    for file in manifest.files:
        digest.update(msgspec.json.encode((file.name, file.bytes, file.sections, file.sha256)))
    return f"{manifest.name[:_MOST_NAME]}@{digest.hexdigest()[:_DIGITS]}"
