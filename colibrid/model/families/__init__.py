"""The families that can be converted. A new one is one small file here and one name in the tuple below."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from colibrid.errors import ModelError
from colibrid.model.families import mixtral, olmoe, qwen2_moe, qwen3_moe
from colibrid.model.families.base import Family

if TYPE_CHECKING:
    from collections.abc import Mapping

FAMILIES: tuple[Family, ...] = (mixtral.FAMILY, olmoe.FAMILY, qwen2_moe.FAMILY, qwen3_moe.FAMILY)


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json. ModelError: its architecture is not supported, with the list of those that are."""
    found = config.get("architectures")
    names = found if isinstance(found, list) else []
    for family in FAMILIES:
        if family.architecture in names:
            return family
    supported = ", ".join(family.architecture for family in FAMILIES)
    shown = ", ".join(str(name) for name in names) or "none"
    raise ModelError(f"config.json: architecture {shown} is not supported; supported: {supported}")


__all__ = ["FAMILIES", "Family", "family_of"]
