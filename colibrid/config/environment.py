"""The only place that reads the process environment (ops/systemd reads what systemd says: NOTIFY_SOCKET, LISTEN_FDS …).

Known: COLIBRID_CONFIG (the file), COLIBRID_SECTION__KEY (any setting), CACHE_DIRECTORY (systemd), XDG_CACHE_HOME,
CREDENTIALS_DIRECTORY (systemd), HF_HUB_CACHE, HF_HOME, HOME.
"""

from __future__ import annotations

import os
import pwd
import site
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from colibrid.paths import user_path

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIG_VARIABLE = "COLIBRID_CONFIG"
_PREFIX = "COLIBRID_"


@dataclass(frozen=True, slots=True)
class Environment:
    """What the environment says, read once."""

    config_file: Path | None
    settings: dict[str, str]  # variable name -> text, every COLIBRID_* but COLIBRID_CONFIG
    cache_dir: Path  # where converted packs go unless model.cache_dir says otherwise
    hugging_face_hub: Path  # folder of models--org--name
    credentials: Path | None = None  # folder of files that the service manager passes (LoadCredential=)


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Reads `environ` (default: the process's own). Touches no file."""
    source = os.environ if environ is None else environ
    config = source.get(CONFIG_VARIABLE)
    return Environment(
        config_file=Path(config) if config else None,
        settings={
            name: text for name, text in sorted(source.items()) if name.startswith(_PREFIX) and name != CONFIG_VARIABLE
        },
        cache_dir=_cache_dir(source),
        hugging_face_hub=_hugging_face_hub(source),
        credentials=Path(source["CREDENTIALS_DIRECTORY"]) if source.get("CREDENTIALS_DIRECTORY") else None,
    )


def child_environment(package_root: Path) -> dict[str, str]:
    """The environment for a child that must import the same colibrid, also from a source tree."""
    inherited = dict(os.environ)
    if str(package_root) in (*site.getsitepackages(), site.getusersitepackages()):
        return inherited
    paths = [str(package_root), *filter(None, [inherited.get("PYTHONPATH")])]
    return {**inherited, "PYTHONPATH": os.pathsep.join(paths)}


def _cache_dir(source: Mapping[str, str]) -> Path:
    systemd = source.get("CACHE_DIRECTORY")
    if systemd:
        return Path(systemd.split(":")[0])  # systemd lists several with colons; ours is the first
    return _user_cache(source) / "colibrid"


def _hugging_face_hub(source: Mapping[str, str]) -> Path:
    if hub := source.get("HF_HUB_CACHE"):
        return user_path(hub)
    if home := source.get("HF_HOME"):
        return user_path(home) / "hub"
    return _user_cache(source) / "huggingface" / "hub"


def _user_cache(source: Mapping[str, str]) -> Path:
    cache = source.get("XDG_CACHE_HOME")
    if cache and Path(cache).is_absolute():  # relative values are invalid by the XDG specification
        return Path(cache)
    return Path(source.get("HOME") or _home()) / ".cache"


def _home() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # a uid without an entry, as in containers
        return "/nonexistent"
