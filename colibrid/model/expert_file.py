"""One expert's file outside of the pack that is served: what it holds, and whether it is whole.

It is described as in a pack (docs/PACK.md): by FILE.json beside it, which holds one entry of `files` of a colibri.json,
or, where there is none, by the colibri.json of the folder that it lies in, so that any pack is a source of experts.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from colibrid.errors import RequestError
from colibrid.model import layout
from colibrid.model.below import open_below, read_in
from colibrid.model.manifest import PackFile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from colibrid.model.below import Opened

MAX_DESCRIPTION_BYTES = 1 << 20
_MAX_MANIFEST_BYTES = 256 << 20
_MANIFEST = "colibri.json"
_PIECE = 1 << 20


class ExpertFile(NamedTuple):
    """An open file, and its description with checksums of the bytes that were read."""

    fd: int  # the owner closes it
    name: str  # of the file itself
    file: PackFile

    @property
    def sha256(self) -> str:
        """Of the bytes that were read."""
        assert self.file.sha256 is not None, "open_expert sets it"
        return self.file.sha256

    @property
    def precision(self) -> str:
        """Of its matrices."""
        return self.file.sections[0].precision


class _Files(msgspec.Struct):
    files: tuple[msgspec.Raw, ...] = ()


class _Name(msgspec.Struct):
    name: str = ""


def open_expert(path: str, folders: Sequence[str], checksum: Callable[[bytes], int], most: int) -> ExpertFile:
    """Open, describe and read the whole file; `checksum` is crc32c. Blocks as long as that takes.

    RequestError on `file`: not below the folders, not described, larger than `most` bytes, which are then not read, or
    its bytes are not those that were described.
    """
    opened = open_below(path, folders, "experts.swap_folders")
    try:
        described = _described(opened)
        file = _checked(opened.file, described, checksum, most)
    except OSError as error:
        opened.close()
        raise _wrong(f"it cannot be read ({error.strerror})") from None
    except BaseException:
        opened.close()
        raise
    os.close(opened.folder)
    return ExpertFile(opened.file, opened.name, file)


def _described(opened: Opened) -> PackFile:
    beside = f"{opened.name}.json"
    own = read_in(opened.folder, beside, MAX_DESCRIPTION_BYTES)
    if own is not None:
        return _converted(own, beside)
    manifest = read_in(opened.folder, _MANIFEST, _MAX_MANIFEST_BYTES)
    if manifest is None:
        raise _wrong(f"neither {beside} nor {_MANIFEST} lies beside it; write one of them (docs/HOT_SWAP.md)")
    try:
        entries = msgspec.json.decode(manifest, type=_Files).files
        found = next((raw for raw in entries if msgspec.json.decode(raw, type=_Name).name == opened.name), None)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _wrong(f"{_MANIFEST} beside it cannot be read ({error})") from None
    if found is None:
        raise _wrong(f"{_MANIFEST} beside it has no entry {opened.name} in files; write {beside}")
    return _converted(bytes(found), _MANIFEST)


def _converted(raw: bytes, where: str) -> PackFile:
    try:
        value: Any = msgspec.json.decode(raw)
        if isinstance(value, dict):
            value.setdefault("name", "expert.bin")
        file = msgspec.convert(value, PackFile)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _wrong(f"{where}: {error}") from None
    if tuple(section.role for section in file.sections) != layout.EXPERT_ROLES:
        raise _wrong(f"{where}: its sections must be gate, up and down, in this order")
    if file.sha256 is None and file.crc32c is None:
        raise _wrong(f"{where}: neither sha256 nor crc32c is given, so damage would not be noticed")
    return file


def _checked(fd: int, file: PackFile, checksum: Callable[[bytes], int], most: int) -> PackFile:
    """The description, with both checksums of the bytes as they are."""
    size = os.fstat(fd).st_size
    if size > most:
        raise _wrong(f"it has {size} bytes, an expert of this model at most {most}")
    if size != file.bytes:
        raise _wrong(f"it has {size} bytes, {file.bytes} are described")
    digest, crcs, done = hashlib.sha256(), [], 0
    while done < size:
        piece = os.pread(fd, min(_PIECE, size - done), done)
        if not piece:
            raise _wrong(f"it ended at byte {done} of {size}")
        while len(piece) < min(_PIECE, size - done):
            more = os.pread(fd, min(_PIECE, size - done) - len(piece), done + len(piece))
            if not more:
                raise _wrong(f"it ended at byte {done + len(piece)} of {size}")
            piece += more
        digest.update(piece)
        crcs.append(checksum(piece))
        done += len(piece)
    if file.sha256 is not None and digest.hexdigest() != file.sha256:
        raise _wrong(f"its sha256 is {digest.hexdigest()}, {file.sha256} is described; copy or convert it again")
    if file.crc32c is not None and tuple(crcs) != file.crc32c:
        bad = next((i for i, pair in enumerate(zip(crcs, file.crc32c, strict=False)) if pair[0] != pair[1]), len(crcs))
        raise _wrong(f"its crc32c differs from the one described in MiB {bad}; copy or convert it again")
    return msgspec.structs.replace(file, sha256=digest.hexdigest(), crc32c=tuple(crcs))


def _wrong(why: str) -> RequestError:
    return RequestError(f"file: {why}.", param="file", code="file_refused")
