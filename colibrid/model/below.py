"""Opening files that a request names, below folders that the settings name, and nothing else.

Each part of the way is opened by itself, relative to the one before, and no link is followed: what is opened lies where
it seems to lie, whatever is renamed meanwhile.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from colibrid.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_PART = _FOLDER | os.O_NOFOLLOW
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_MAX_PATH = 4096


class Opened(NamedTuple):
    """A regular file and the folder that it lies in; the descriptors are the caller's."""

    file: int
    folder: int
    name: str

    def close(self) -> None:
        """Both."""
        os.close(self.file)
        os.close(self.folder)


def open_below(path: str, folders: Sequence[str], setting: str) -> Opened:
    """Open the regular file at `path`, an absolute one below one of `folders`. RequestError on `file` says why not."""
    rest = _below(path, folders)
    if rest is None:
        allowed = (
            f"below one of the {len(folders)} folders of {setting}" if folders else f"anywhere: {setting} is empty"
        )
        raise _refused(f"must be the absolute path of a file {allowed}, without links, '.' and '..'")
    root, parts = rest
    try:
        folder = os.open(root, _FOLDER)
    except OSError as error:
        raise _refused(f"cannot be opened: a folder of {setting} is not there ({error.strerror})") from None
    try:
        for part in parts[:-1]:
            inner = os.open(part, _PART, dir_fd=folder)
            os.close(folder)
            folder = inner
        return Opened(open_in(folder, parts[-1]), folder, parts[-1])
    except OSError as error:
        os.close(folder)
        raise _refused(f"cannot be opened without following links ({error.strerror}); check the path") from None


def open_in(folder: int, name: str) -> int:
    """Open a regular file of a folder. OSError, also for anything else of that name."""
    fd = os.open(name, _FILE, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(0, "not a regular file")
    return fd


def read_in(folder: int, name: str, limit: int) -> bytes | None:
    """The bytes of a file of a folder; None if there is none of that name. RequestError if it is too large."""
    try:
        fd = open_in(folder, name)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _refused(f"its description {name} cannot be opened ({error.strerror})") from None
    with os.fdopen(fd, "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise _refused(f"its description {name} has more than {limit} bytes")
    return data


def _below(path: str, folders: Sequence[str]) -> tuple[str, list[str]] | None:
    if "\0" in path or len(os.fsencode(path)) > _MAX_PATH:
        return None
    for folder in folders:
        root = folder.rstrip("/") + "/"
        parts = path.removeprefix(root).split("/")
        if path.startswith(root) and all(part not in ("", ".", "..") for part in parts):
            return root, parts
    return None


def _refused(why: str) -> RequestError:
    return RequestError(f"file: {why}.", param="file", code="file_refused")
