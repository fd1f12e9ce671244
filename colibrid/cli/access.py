"""Which keys clients must send: from settings, command line and the service manager's credentials to one key ring."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from colibrid.errors import ConfigError
from colibrid.ops.addresses import is_loopback

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from colibrid.config.environment import Environment
    from colibrid.config.settings import Settings
    from colibrid.http.auth import KeyRing

CREDENTIAL = "colibrid-keys"  # LoadCredential=colibrid-keys:/etc/colibrid/keys


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
    server = settings.server
    special = (
        server.allowed_hosts,
        server.allowed_origins,
        server.trusted_proxies,
        server.tls_cert_file,
        server.tls_key_file,
    )
    if has_keys(settings, environment, api_keys) or any(value is not None for value in special):
        from colibrid.http.tls import make_tls  # noqa: PLC0415

        read_access(settings, environment, api_keys)
        make_tls(server)


def has_keys(settings: Settings, environment: Environment, api_keys: Sequence[str]) -> bool:
    """True iff clients must send a key."""
    return bool(api_keys) or keys_file(settings, environment) is not None


def check_hosts(hosts: Iterable[str | None], *, with_keys: bool) -> None:
    """ConfigError when others could reach one of the addresses without a key; None stands for a path, whose rights hold."""
    for host in hosts:
        if not with_keys and host is not None and not is_loopback(host):
            raise ConfigError(
                f"{host} can be reached from other machines, and no API key is set;"
                " set auth.keys_file (--api-key-file; `colibrid keys add` makes one), or bind 127.0.0.1"
            )


def read_access(settings: Settings, environment: Environment, api_keys: Sequence[str]) -> KeyRing:
    """The keys that clients must send. Called at start and for each reload; changes nothing.

    ConfigError for bad keys or names.
    """
    from colibrid.http.auth import KeyRing, read_key_file  # noqa: PLC0415 (see daemon._open_http)
    from colibrid.http.origin import Origins  # noqa: PLC0415

    found = keys_file(settings, environment)
    if api_keys and found is not None:
        raise ConfigError(f"--api-key and {found[1]} are both given; put all keys into the file")
    keys = KeyRing.of_plain(api_keys, "--api-key") if found is None else read_key_file(*found)
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
