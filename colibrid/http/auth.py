"""Who may ask: API keys and what each of them opens."""

from __future__ import annotations

import hmac
import stat
import time
from typing import TYPE_CHECKING, Self

import msgspec

from colibrid.errors import ConfigError
from colibrid.http.credentials import MAX_FILE_BYTES, SCOPES, digest_of, plain_key, read_keys
from colibrid.http.errors import ForbiddenError, InvalidKeyError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path

    from colibrid.config.settings import KeyLimits
    from colibrid.http.credentials import Key, Scope


class KeyRing:
    """The accepted keys, of which it has digests only. An empty ring accepts everyone."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._keys = tuple(keys)

    @classmethod
    def of_plain(cls, keys: Iterable[str], source: str) -> Self:
        """Keys given as themselves, by `source`. ConfigError for a short one."""
        return cls(plain_key(key, f"{source}-{number}", source) for number, key in enumerate(dict.fromkeys(keys), 1))

    def __bool__(self) -> bool:
        return bool(self._keys)

    @property
    def keys(self) -> tuple[Key, ...]:
        """All of them, in the file's order."""
        return self._keys

    def find(self, key: str) -> Key | None:
        """What is known of `key`; None unless it is one of the keys. Takes the same time whichever it is."""
        digest = digest_of(key)
        found: Key | None = None
        for known in self._keys:
            if hmac.compare_digest(digest, known.digest):
                found = known
        return found

    def check(self, headers: Mapping[str, str], scope: Scope) -> Key | None:
        """Whose bearer key `headers` have; None without keys.

        InvalidKeyError unless it is accepted, ForbiddenError if it does not open `scope`; admin needs a key always.
        """
        if not self._keys:
            if scope == "admin":
                raise ForbiddenError(
                    "This route needs a key of scope admin, and the server has no keys; use the admin socket.",
                    code="insufficient_scope",
                )
            return None
        scheme, _, sent = headers.get("Authorization", "").partition(" ")
        key = self.find(sent.strip()) if scheme.lower() == "bearer" else None
        if key is None:
            raise InvalidKeyError
        if key.expires is not None and time.time() >= key.expires:
            raise InvalidKeyError("This API key has expired; ask the server's operator for another one.")
        if scope not in key.scopes:
            raise scope_error(key.scopes, scope)
        return key


def scope_error(scopes: Collection[Scope], needed: Scope) -> ForbiddenError:
    """A key of `scopes` was sent to a route that needs another one."""
    return ForbiddenError(
        f"This API key is for {', '.join(one for one in SCOPES if one in scopes)}, and the route needs {needed};"
        " send another key.",
        code="insufficient_scope",
    )


def read_key_file(path: Path, setting: str) -> KeyRing:
    """The keys of a file, see credentials. ConfigError, which names `setting` and file, tells what is wrong."""
    source = f"{setting} {path}"
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        text = data.decode("utf-8-sig")  # some editors begin a file with a mark
    except (OSError, UnicodeDecodeError) as error:
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ConfigError(f"{source} cannot be read: {reason}; check the file") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{source} is larger than {MAX_FILE_BYTES} bytes; this is not a file of keys")
    keys = read_keys(text, source)
    if not keys:
        raise ConfigError(f"{source} holds no key; have `colibrid keys add` write one")
    return KeyRing(keys)


def readable_by_others(path: Path) -> bool:
    """True iff every user of this machine may read the file."""
    return bool(path.stat().st_mode & stat.S_IROTH)


def limits_of(key: Key, general: KeyLimits) -> KeyLimits:
    """The key's own limits, completed by those of all keys."""
    own = {name: value for name, value in msgspec.structs.asdict(key.limits).items() if value is not None}
    return msgspec.structs.replace(general, **own)
