"""What of changed settings may be taken over while serving. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from colibrid.config.tree import Group, tree

if TYPE_CHECKING:
    from collections.abc import Iterator

    from colibrid.config.settings import Settings


@dataclass(frozen=True, slots=True)
class Change:
    """The paths of keys that differ."""

    live: tuple[str, ...]
    restart: tuple[str, ...]  # nothing happens to these until a restart


def compare(before: Settings, after: Settings) -> Change:
    """Which keys differ."""
    differ = list(_differences(tree(), before, after))
    return Change(tuple(path for path, live in differ if live), tuple(path for path, live in differ if not live))


def with_live(serving: Settings, wanted: Settings) -> Settings:
    """`serving` with the live keys of `wanted`."""
    merged: Settings = _merged(tree(), serving, wanted)
    return merged


def _differences(group: Group, before: Any, after: Any) -> Iterator[tuple[str, bool]]:
    for name, part in group.parts.items():
        old, new = getattr(before, name), getattr(after, name)
        if isinstance(part, Group):
            yield from _differences(part, old, new)
        elif old != new:
            yield part.path, part.live


def _merged(group: Group, serving: Any, wanted: Any) -> Any:
    changed = {}
    for name, part in group.parts.items():
        old, new = getattr(serving, name), getattr(wanted, name)
        if isinstance(part, Group):
            changed[name] = _merged(part, old, new)
        elif part.live:
            changed[name] = new
    return msgspec.structs.replace(serving, **changed)
