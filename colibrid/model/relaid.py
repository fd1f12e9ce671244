"""What a flat pack will be once it is laid out for a backend. Pure, and without numpy: the daemon plans with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from colibrid import __version__
from colibrid.errors import ModelError
from colibrid.model import layout

if TYPE_CHECKING:
    from colibrid.model.manifest import Backend, Manifest, PackFile, Section


class Places:
    """Where a pack keeps each tensor: by the file of a routed expert, else by layer and role."""

    def __init__(self, manifest: Manifest) -> None:
        self._experts = {name for layer in manifest.layers for name in layer.expert_files}
        self._found = {
            self._key(file, section): (file, section) for file in manifest.files for section in file.sections
        }

    def find(self, file: PackFile, section: Section) -> tuple[PackFile, Section]:
        """File and section of the tensor that another pack of the same model keeps in `section` of `file`."""
        return self._found[self._key(file, section)]

    def _key(self, file: PackFile, section: Section) -> tuple[str | None, int | None, str]:
        return (file.name if file.name in self._experts else None, section.layer, section.role)


def relaid(manifest: Manifest, backend: Backend) -> Manifest:
    """What the pack will say of itself. ModelError: it is not flat, or its matrices have several precisions."""
    if manifest.backend != "any":
        raise ModelError(
            f"{manifest.name}: a pack for the {manifest.backend} backend; only flat ones (convert --backend any) can be "
            "laid out anew, so convert the checkpoint"
        )
    files = layout.planned_files(
        manifest.hyperparameters, manifest.layers, manifest.precision, layout.LAYOUT_OF[backend]
    )
    places = Places(manifest)
    for planned in files:
        for section in planned.sections:
            kind = places.find(planned, section)[1].precision
            if kind != section.precision:
                raise ModelError(
                    f"{manifest.name}: {section.role} is {kind}, expected {section.precision}; a pack of several "
                    "precisions cannot be laid out anew, so convert the checkpoint"
                )
    return msgspec.structs.replace(
        manifest, backend=backend, files=files, created_by=f"colibrid {__version__}, from a flat pack"
    )
