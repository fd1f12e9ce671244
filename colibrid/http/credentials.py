"""The credential file: one key a line, of which it holds only the SHA-256, with what its owner may do.

    # comment
    alice   sha256:9f86d0…0a08  scopes=inference,metrics  requests_per_minute=60  expires=2027-01-31  # her laptop
    a-plain-key-as-of-older-versions

A line of a single word is a plain key without limits of its own, for inference and metrics. Reads and writes text only:
cli/keys owns the file, auth.KeyRing what is accepted.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from colibrid.config.settings import KeyLimits
from colibrid.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Scope = Literal["inference", "admin", "metrics"]

SCOPES: tuple[Scope, ...] = get_args(Scope)
MAX_KEYS = 1024  # of a file: each request is compared with all of them
MAX_FILE_BYTES = 1 << 20
MIN_KEY_CHARACTERS = 8
PLAIN_SCOPES: frozenset[Scope] = frozenset({"inference", "metrics"})
_PREFIX = "clb_"
_KEY_BYTES = 32
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
_SHOWN = 40


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """One accepted key, without the key."""

    id: str
    digest: bytes  # SHA-256
    scopes: frozenset[Scope] = frozenset({"inference"})
    limits: KeyLimits = KeyLimits()  # None in it: what auth.limits says
    expires: float | None = None  # Unix seconds: from then on it is refused
    comment: str = ""
    plain: bool = False  # it stands in the file itself

    @property
    def tenant(self) -> str:
        """Whose prompts may share computed beginnings: another key's never, also where it takes over an id."""
        return self.digest.hex()


def digest_of(key: str) -> bytes:
    """What is kept of `key`, whatever characters a client has sent."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def new_key() -> str:
    """A key that nobody guesses."""
    return _PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def plain_key(text: str, id_: str, source: str) -> Key:
    """A key given as itself. ConfigError, which begins with `source`, if it is too short."""
    if len(text) < MIN_KEY_CHARACTERS:
        raise ConfigError(f"{source}: a key is shorter than {MIN_KEY_CHARACTERS} characters; take a longer one")
    return Key(id=id_, digest=digest_of(text), scopes=PLAIN_SCOPES, plain=True)


def read_keys(text: str, source: str) -> tuple[Key, ...]:
    """The keys of a file's text. ConfigError, whose lines begin with `source`, tells all that is wrong."""
    keys: list[Key] = []
    errors: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        words, comment = split_line(line)
        if not words:
            continue
        try:
            keys.append(_read_line(words, comment, f"plain-{len(keys) + 1}"))
        except ConfigError as error:
            errors.append(f"{source}:{number}: {error}")
    errors += [f"{source}: {error}" for error in _wrong_together(keys)] if not errors else []
    if errors:
        raise ConfigError("\n".join(errors))
    return tuple(keys)


def write_line(key: Key) -> str:
    """The line of a hashed key, without a line's end."""
    words = [key.id, f"sha256:{key.digest.hex()}", f"scopes={','.join(sorted(key.scopes))}"]
    words += [f"{name}={value}" for name, value in msgspec.structs.asdict(key.limits).items() if value is not None]
    if key.expires is not None:
        words.append(f"expires={show_time(key.expires)}")
    return " ".join([*words, *([f"# {key.comment}"] if key.comment else [])])


def split_line(line: str) -> tuple[list[str], str]:
    """Words and comment of a line; a # begins a comment at the start of a word."""
    words = line.split()
    begin = next((index for index, word in enumerate(words) if word.startswith("#")), len(words))
    return words[:begin], " ".join(words[begin:]).removeprefix("#").strip()


def read_time(text: str) -> float:
    """Unix seconds of a day (its beginning, in UTC) or of a time with its zone. ConfigError for anything else."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is not None and found.tzinfo is None and len(text) == len("2027-01-31"):
        found = found.replace(tzinfo=UTC)
    if found is None or found.tzinfo is None:
        raise ConfigError(
            f"expires {text[:_SHOWN]!r} is no day such as 2027-01-31 or time such as 2027-01-31T12:00:00Z; correct it"
        )
    return found.timestamp()


def show_time(seconds: float) -> str:
    """As `read_time` takes it."""
    text = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return text.removesuffix("T00:00:00Z")


def read_id(text: str) -> str:
    """A key's name. ConfigError unless it can stand in a file and in a log."""
    if not _ID.fullmatch(text):
        raise ConfigError(
            f"{text[:_SHOWN]!r} is no id of a key; use up to 64 letters, digits and . _ @ -, beginning with one of the first two"
        )
    return text


def read_scopes(text: str) -> frozenset[Scope]:
    """Scopes with commas between. ConfigError for an unknown one."""
    found = frozenset(scope for scope in SCOPES if scope in text.split(","))
    unknown = sorted(set(text.split(",")) - found)
    if unknown:
        raise ConfigError(f"scope {unknown[0][:_SHOWN]!r} is not known; use {', '.join(SCOPES)}, with commas between")
    return found


def read_limits(given: Mapping[str, str]) -> KeyLimits:
    """Limits from text. ConfigError naming the first that is wrong."""
    values: dict[str, int] = {}
    for name, text in given.items():
        try:
            values[name] = int(text)
            msgspec.convert({name: values[name]}, KeyLimits)
        except (ValueError, msgspec.ValidationError):
            least = "a whole number from -1000 to 1000" if name == "priority" else "a whole number from 1 on"
            raise ConfigError(f"{name}={text[:_SHOWN]} must be {least}; correct it") from None
    return KeyLimits(**values)


def _read_line(words: list[str], comment: str, plain_id: str) -> Key:
    if len(words) == 1:
        if _HASH.fullmatch(words[0]):
            raise ConfigError("a hash without an id; write `ID sha256:…`, or have `colibrid keys add` write the line")
        return plain_key(words[0], plain_id, "a line of one word is a plain key")
    id_, hashed, *options = words
    found = _HASH.fullmatch(hashed)
    if found is None:
        raise ConfigError(
            "the second word is not sha256: and 64 hexadecimal digits; write `ID sha256:…`, have `colibrid keys add`"
            " write the line, or write a plain key without blanks"
        )
    given = _read_options(options)
    scopes, expires = given.pop("scopes", None), given.pop("expires", None)
    return Key(
        id=read_id(id_),
        digest=bytes.fromhex(found[1]),
        scopes=frozenset({"inference"}) if scopes is None else read_scopes(scopes),
        expires=None if expires is None else read_time(expires),
        limits=read_limits(given),
        comment=comment,
    )


def _read_options(words: list[str]) -> dict[str, str]:
    known = ("scopes", "expires", *KeyLimits.__struct_fields__)
    given: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if name not in known or not equals:
            raise ConfigError(f"{word[:_SHOWN]!r} is not known; use {', '.join(f'{one}=…' for one in known)}")
        if name in given:
            raise ConfigError(f"{name} is given twice; keep one of them")
        given[name] = value
    return given


def _wrong_together(keys: list[Key]) -> list[str]:
    if len(keys) > MAX_KEYS:
        return [f"{len(keys)} keys are more than {MAX_KEYS}; remove some"]
    return [*_twice(keys, "id", lambda key: key.id), *_twice(keys, "key", lambda key: key.digest)]


def _twice(keys: list[Key], what: str, of: Callable[[Key], str | bytes]) -> list[str]:
    seen: dict[str | bytes, Key] = {}
    for key in keys:
        if of(key) in seen:
            return [f"the {what} of {key.id} is that of {seen[of(key)].id}, too; keep one of them"]
        seen[of(key)] = key
    return []
