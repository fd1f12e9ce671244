"""`colibrid keys add|list|revoke`: edits a credential file, which a running daemon reads again on SIGHUP.

A change is one rename, so a reader sees the old file or the new one; lines that are not meant stay as they are.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from colibrid.cli.access import keys_file
from colibrid.cli.options import load_settings
from colibrid.config.environment import read_environment
from colibrid.errors import ConfigError
from colibrid.http import credentials

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, TypeVar

    _F = TypeVar("_F", bound="Callable[..., Any]")

_MODE = 0o600
_RELOAD = "a running daemon accepts it after SIGHUP (systemctl reload)"


def _file_options(function: _F) -> _F:
    function = click.option("--file", "file", metavar="FILE", help="The credential file; else the configuration's.")(
        function
    )
    return click.option("--config", "config_file", metavar="FILE", help="YAML with auth.keys_file.")(function)


@click.group()
def keys() -> None:
    """Keys that clients must send, in the file of auth.keys_file. It holds hashes only: a key is shown once."""


@keys.command()
@click.argument("key_id", metavar="ID")
@_file_options
@click.option("--scopes", metavar="SCOPES", default="inference", help="inference, admin, metrics, with commas between.")
@click.option("--requests-per-minute", metavar="N", help="Requests a minute.")
@click.option("--requests-at-once", metavar="N", help="Requests that run or wait at a time.")
@click.option("--tokens-per-minute", metavar="N", help="Tokens of prompts and answers a minute.")
@click.option("--tokens-per-day", metavar="N", help="Tokens of prompts and answers a day.")
@click.option("--priority", metavar="N", help="The lowest number, served first, that its requests may give.")
@click.option("--expires", metavar="TIME", help="2027-01-31 (from its beginning in UTC on) or 2027-01-31T12:00:00Z.")
@click.option("--comment", metavar="TEXT", default="", help="Whose it is.")
@click.option("--stdin", "from_stdin", is_flag=True, help="Read the key from standard input instead of making one.")
def add(
    key_id: str,
    file: str | None,
    config_file: str | None,
    scopes: str,
    expires: str | None,
    comment: str,
    *,
    from_stdin: bool,
    **limits: str | None,
) -> None:
    """Make a key called ID, write down its hash, and print the key, this once."""
    path = _place(file, config_file)
    until = None if expires is None else credentials.read_time(expires)
    if until is not None and until <= time.time():
        raise ConfigError(f"--expires {expires} is over already; give a time to come, or leave it out")
    text = _read_key() if from_stdin else credentials.new_key()
    made = credentials.Key(
        id=credentials.read_id(key_id),
        digest=credentials.digest_of(text),
        scopes=credentials.read_scopes(scopes),
        limits=credentials.read_limits({name: value for name, value in limits.items() if value is not None}),
        expires=until,
        comment=" ".join("".join(c if c.isprintable() else " " for c in comment).split()),
    )
    with _edited(path, may_make=True) as lines:
        if _line_of(lines, key_id) is not None:
            raise ConfigError(f"{path} has a key called {key_id!r} already; revoke it first, or choose another id")
        lines.append(credentials.write_line(made))
    if not from_stdin:
        print(text)
    print(f"{key_id} is in {path}; {_RELOAD}", file=sys.stderr)


@keys.command("list")
@_file_options
def list_keys(file: str | None, config_file: str | None) -> None:
    """Show ids, scopes, limits and expiry; never a key."""
    path = _place(file, config_file)
    for key in credentials.read_keys(_read(path), str(path)):
        limits = [f"{name}={value}" for name, value in msgspec.structs.asdict(key.limits).items() if value is not None]
        until = [] if key.expires is None else [f"expires={credentials.show_time(key.expires)}"]
        notes = ["EXPIRED"] if key.expires is not None and key.expires <= time.time() else []
        notes += ["plain key: replace it by one of `colibrid keys add`"] if key.plain else []
        notes += [f"# {key.comment}"] if key.comment else []
        print("  ".join([f"{key.id:<16}", ",".join(sorted(key.scopes)), *limits, *until, *notes]))


@keys.command()
@click.argument("key_id", metavar="ID")
@_file_options
def revoke(key_id: str, file: str | None, config_file: str | None) -> None:
    """Remove the key called ID."""
    path = _place(file, config_file)
    with _edited(path, may_make=False) as lines:
        number = _line_of(lines, key_id)
        if number is None:
            raise ConfigError(f"{path} has no key called {key_id!r}; `colibrid keys list` shows them")
        del lines[number]
    print(f"{key_id} is gone from {path}; {_RELOAD.replace('accepts it', 'refuses it')}", file=sys.stderr)


def _place(file: str | None, config_file: str | None) -> Path:
    """The file that is meant. ConfigError when nothing names one."""
    if file is not None:
        return Path(file)
    environment = read_environment()
    found = keys_file(load_settings(environment, config_file, (), {}).settings, environment)
    if found is None:
        raise ConfigError("no credential file is named; give --file, or --config with auth.keys_file")
    return found[0]


def _read_key() -> str:
    text = sys.stdin.readline().strip()
    if len(text) < credentials.MIN_KEY_CHARACTERS or len(text.split()) != 1:
        raise ConfigError(
            f"--stdin: the key must be one word of at least {credentials.MIN_KEY_CHARACTERS} characters; send a longer one"
        )
    return text


def _line_of(lines: list[str], key_id: str) -> int | None:
    plain = 0
    for number, line in enumerate(lines):
        words, _ = credentials.split_line(line)
        if not words:
            continue
        plain += 1
        if key_id == (f"plain-{plain}" if len(words) == 1 else words[0]):
            return number
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ConfigError(f"{path} cannot be read: {reason}; check the file") from None


@contextlib.contextmanager
def _edited(path: Path, *, may_make: bool) -> Iterator[list[str]]:
    """The file's lines, to be changed; written back as a whole unless something is raised, or the result is wrong."""
    place = path.resolve()  # the file behind a link is replaced, not the link
    try:
        folder = os.open(place.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{place.parent} cannot be opened: {error.strerror}; make the folder") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # two commands at once must not lose a key
        lines = _read(place).splitlines() if place.exists() or not may_make else []
        yield lines
        text = "".join(f"{line}\n" for line in lines)
        credentials.read_keys(text, str(path))
        _write(place, text, folder)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; check folder and rights") from None
    finally:
        os.close(folder)


def _write(place: Path, text: str, folder: int) -> None:
    """Puts a new file in the place of the old one, with its owner and mode: the daemon must still be able to read it."""
    new = place.with_name(f".{place.name}.{os.getpid()}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, _MODE)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            if place.exists():
                old = place.stat()
                if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(descriptor, old.st_uid, old.st_gid)
                os.fchmod(descriptor, stat.S_IMODE(old.st_mode))
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        new.rename(place)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    os.fsync(folder)
