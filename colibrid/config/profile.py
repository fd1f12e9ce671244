"""A profile: the few settings that `colibrid tune` has chosen for one pack, as a YAML file that people may edit.

    profile: 1                     # version of this form
    pack: hummingbird-13m@3f…      # what it was made for; another pack is refused
    experts:
      per_token: 1
      threshold: 0.2
    batch:
      slots: 8

Read as strictly as the configuration, whose keys, bounds and words for mistakes it shares. `colibrid tune` writes every
key of experts that a point decides, so that null there means the model's own whatever a configuration says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from colibrid.config import reader
from colibrid.config.load import BUILT_IN, load
from colibrid.config.values import shorten
from colibrid.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from colibrid.config.settings import ExpertsSettings

PROFILE_VERSION = 1
KEYS = (
    "experts.per_token",
    "experts.threshold",
    "experts.max_per_token",
    "experts.max_tokens_per_expert",
    "batch.window_ms",
    "batch.slots",
)
_MOST_PACK = 512  # characters
_REMEDY = "write it anew with colibrid tune"


class Profile(NamedTuple):
    """A file that is sound in itself; whether it fits a pack is for who knows the pack."""

    source: str  # the file
    pack: str
    root: reader.Mapping  # of its settings
    experts: ExpertsSettings  # with defaults where it says nothing


def read_profile(path: Path) -> Profile:
    """ConfigError holds one line for each mistake, with its place."""
    document = reader.read_file(path)
    source = str(path)
    errors = list(document.problems)
    if document.root is None:
        errors = errors or [f"{source}: nothing in it; {_REMEDY}"]
    elif not isinstance(document.root, reader.Mapping):
        errors.append(f"{source}: not a profile; {_REMEDY}")
    if errors or not isinstance(document.root, reader.Mapping):
        raise ConfigError("\n".join(errors))
    given = {entry.key: entry for entry in document.root.entries}
    pack = _header(given, source)
    root = reader.Mapping(
        tuple(entry for name, entry in given.items() if name not in ("profile", "pack")), document.root.position
    )
    loaded = load(profile=(source, root))
    wrong = [
        f"{origin}: {key} is no key of a profile; it may hold {', '.join(KEYS)}"
        for key, origin in loaded.origins.items()
        if origin != BUILT_IN and key not in KEYS
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))
    return Profile(source, pack, root, loaded.settings.experts)


def _header(given: dict[str, reader.Entry], source: str) -> str:
    """The pack's name. ConfigError: version or name are missing or wrong."""
    version, pack = (_scalar(given.get(name)) for name in ("profile", "pack"))
    if version is None or type(version.value) is not int or version.value != PROFILE_VERSION:
        found = "no profile: line" if version is None else f"profile: {shorten(version.text)}"
        raise ConfigError(f"{source}: {found}, expected profile: {PROFILE_VERSION}; {_REMEDY}")
    if pack is None or not isinstance(pack.value, str) or not 0 < len(pack.value) <= _MOST_PACK:
        raise ConfigError(f"{source}: no pack: line that says what pack it is for; {_REMEDY}")
    return pack.value


def _scalar(entry: reader.Entry | None) -> reader.Scalar | None:
    return entry.node if entry is not None and isinstance(entry.node, reader.Scalar) else None
