"""Who may ask: API keys, and the Host and Origin checks that keep web pages away from a loopback server."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from typing import TYPE_CHECKING, Self

from colibrid.errors import ConfigError
from colibrid.http.errors import ForbiddenError, InvalidKeyError, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_MIN_KEY_CHARS = 8
_HOST = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[^:@\[\]/]+))(?::[0-9]{0,5})?")


class KeyRing:
    """The accepted keys, kept as SHA-256 digests only. An empty ring accepts everyone."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = tuple({hashlib.sha256(key.encode()).digest() for key in keys})

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """One key a line; blank lines and lines that begin with # are skipped. Raises ConfigError naming the file."""
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
            raise ConfigError(f"server.api_key_file {path} cannot be read: {reason}; check the file") from error
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise ConfigError(f"server.api_key_file {path} holds no key; write one a line")
        if any(len(key) < _MIN_KEY_CHARS for key in keys):
            raise ConfigError(f"server.api_key_file {path}: a key is shorter than {_MIN_KEY_CHARS} characters")
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def tenant_of(self, key: str) -> str | None:
        """A name for whoever has `key`, which tells nothing of it; None unless it is one of the keys.

        Takes the same time whichever it is.
        """
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return digest.hex() if found else None

    def check(self, headers: Mapping[str, str]) -> str:
        """Whose bearer key `headers` have; empty without keys. Raises InvalidKeyError unless it is accepted."""
        if not self._digests:
            return ""
        scheme, _, key = headers.get("Authorization", "").partition(" ")
        tenant = self.tenant_of(key.strip()) if scheme.lower() == "bearer" else None
        if tenant is None:
            raise InvalidKeyError
        return tenant


def is_loopback(host: str) -> bool:
    """True iff binding to `host` reaches only this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_bind(host: str, keys: KeyRing) -> None:
    """Raises ConfigError when others could reach the server without a key."""
    if not keys and not is_loopback(host):
        raise ConfigError(
            f"server.host {host} can be reached from other machines, and no API key is set;"
            " set server.api_key_file (--api-key-file), or bind 127.0.0.1"
        )


class HostPolicy:
    """Which Host and Origin headers are ours."""

    def __init__(self, bind_host: str) -> None:
        self._allowed = _LOCAL_NAMES | {bind_host.lower()} if is_loopback(bind_host) else None

    def check(self, headers: Mapping[str, str]) -> None:
        """Raises ForbiddenError for a Host that only DNS rebinding sends, or for a page of another origin."""
        host = headers.get("Host")
        if self._allowed is not None and host is not None and _hostname(host) not in self._allowed:
            raise ForbiddenError(
                f"The Host header {shown(host)} is not a name of this server; use localhost or 127.0.0.1.",
                code="host_not_allowed",
            )
        origin = headers.get("Origin")
        if origin is not None and origin.partition("://")[2].lower() != (host or "").lower():
            raise ForbiddenError(
                "Requests from web pages of other origins are refused; call the server from a program.",
                code="origin_not_allowed",
            )


def _hostname(host: str) -> str | None:
    """The name in `name:port`, `[v6]:port` or either without port, in lower case; none in anything else."""
    found = _HOST.fullmatch(host)
    return None if found is None else (found["v6"] or found["name"]).lower()
