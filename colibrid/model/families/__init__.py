"""The families that can be converted. A new one is one small file here and one name in the tuple below."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from colibrid.errors import ConfigError, ModelError
from colibrid.model.families import mixtral, olmoe, qwen2_moe, qwen3_moe
from colibrid.model.families.base import Family

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FAMILIES: tuple[Family, ...] = (mixtral.FAMILY, olmoe.FAMILY, qwen2_moe.FAMILY, qwen3_moe.FAMILY)


_plugged: list[Family] = []  # of plugins; written once by the command line, before a checkpoint is read


def add_families(families: Iterable[Family]) -> None:
    """Families of plugins, to be found beside ours. ConfigError: the architecture is known already."""
    for family in families:
        if any(known.architecture == family.architecture for known in (*FAMILIES, *_plugged)):
            raise ConfigError(
                f"plugins: {family.architecture} is a family that is known already; remove the plugin that brings it"
            )
        _plugged.append(family)


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json. ModelError: its architecture is not supported, with the list of those that are."""
    found = config.get("architectures")
    names = found if isinstance(found, list) else []
    known = (*FAMILIES, *_plugged)
    for family in known:
        if family.architecture in names:
            return family
    supported = ", ".join(family.architecture for family in known)
    shown = ", ".join(str(name) for name in names) or "none"
    raise ModelError(f"config.json: architecture {shown} is not supported; supported: {supported}")


__all__ = ["FAMILIES", "Family", "add_families", "family_of"]
