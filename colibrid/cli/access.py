"""Which keys clients must send: from settings, command line and the service manager's credentials to one key ring."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from colibrid.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from colibrid.config.environment import Environment
    from colibrid.config.settings import Settings
    from colibrid.http.auth import KeyRing

CREDENTIAL = "colibrid-keys"  # LoadCredential=colibrid-keys:/etc/colibrid/keys
_PLAIN_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})


def keys_file(settings: Settings, environment: Environment) -> tuple[Path, str] | None:
    """The credential file, and what named it; None where there is none. ConfigError if it has two names."""
    new, old = settings.auth.keys_file, settings.server.api_key_file
    if new is not None and old is not None:
        raise ConfigError("server.api_key_file is the older name of auth.keys_file; give one of them")
    if new is not None:
        return Path(new), "auth.keys_file"
    if old is not None:
        return Path(old), "server.api_key_file"
    passed = None if environment.credentials is None else environment.credentials / CREDENTIAL
    return (passed, "the service manager's credential") if passed is not None and passed.exists() else None


def check_access(settings: Settings, environment: Environment, api_keys: Sequence[str]) -> None:
    """Raises what `read_access` raises, early, unless there is nothing to check: reading keys needs slow imports."""
    plain = settings.server.host in _PLAIN_HOSTS and not api_keys and keys_file(settings, environment) is None
    names = (settings.server.allowed_hosts, settings.server.allowed_origins, settings.server.trusted_proxies)
    if not plain or names != (None, None, None):
        read_access(settings, environment, api_keys)


def read_access(settings: Settings, environment: Environment, api_keys: Sequence[str]) -> KeyRing:
    """The keys that clients must send. Called at start and for each reload; changes nothing.

    ConfigError for bad keys or names, and if others could connect without a key.
    """
    from colibrid.http.auth import KeyRing, check_bind, read_key_file  # noqa: PLC0415 (see daemon._open_http)
    from colibrid.http.origin import Origins  # noqa: PLC0415

    found = keys_file(settings, environment)
    if api_keys and found is not None:
        raise ConfigError(f"--api-key and {found[1]} are both given; put all keys into the file")
    keys = KeyRing.of_plain(api_keys, "--api-key") if found is None else read_key_file(*found)
    check_bind(settings.server.host, keys)
    Origins(settings.server, has_keys=bool(keys))
    return keys


def log_access(settings: Settings, environment: Environment, api_keys: Sequence[str], keys: KeyRing) -> None:
    """What an operator should know of the keys: how many, and what is unwise about them."""
    from colibrid.http.auth import readable_by_others  # noqa: PLC0415

    log = structlog.get_logger()
    found = keys_file(settings, environment)
    plain = sum(key.plain for key in keys.keys)
    if api_keys:
        log.warning("api_key_on_command_line", hint="others can see it; use --api-key-file")
    elif found is not None:
        log.info("keys_read", count=len(keys.keys), plain=plain, file=str(found[0]))
        if plain and readable_by_others(found[0]):
            log.warning(
                "keys_readable_by_others",
                file=str(found[0]),
                hint="chmod 600 it; better, have `colibrid keys add` write hashed keys",
            )
