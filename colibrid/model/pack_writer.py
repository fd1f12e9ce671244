"""Writes a pack's folder so that it appears whole or not at all.

    DST.partial/            locked while somebody writes it
      journal.jsonl         a line per finished file: its size, sections and checksums
      dense.bin, expert_*.bin, texts, colibri.json
    DST                     the same folder after one rename; the journal is gone

An interrupted writer leaves DST.partial. The next one for the same fingerprint keeps every file whose bytes still
match their line, and removes the rest.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from colibrid.errors import ModelError
from colibrid.model.manifest import Manifest, PackFile

if TYPE_CHECKING:
    from concurrent.futures import Executor

MANIFEST_FILE = "colibri.json"
JOURNAL_FILE = "journal.jsonl"
CRC_BLOCK = 1 << 20  # bytes under one crc32c
SPARE_BYTES = 16 << 20  # for texts, description and the file system's own needs

Crc32c = Callable[[bytes | memoryview], int]
Progress = Callable[[int, int, str], None]  # bytes finished, bytes of the whole pack, the file that was just finished


class PackExistsError(ModelError):
    """The pack is already there under its final name."""


class _Line(msgspec.Struct, frozen=True):
    fingerprint: str
    file: PackFile


class PackWriter:
    """Owns DST.partial from `open_writer` until its `with` block ends."""

    def __init__(self, dst: Path, partial: Path, fingerprint: str, crc32c: Crc32c) -> None:
        self.dst = dst
        self._partial = partial
        self._fingerprint = fingerprint
        self._crc32c = crc32c
        self._finished: dict[str, PackFile] = {}

    def resume(self, planned: Iterable[PackFile]) -> int:
        """Keeps what an earlier run finished, removes all else; returns the bytes that are kept."""
        plan = {file.name: file for file in planned}
        for line in self._read_journal():
            wanted = plan.get(line.file.name)
            if line.fingerprint == self._fingerprint and wanted is not None and self._still_good(line.file, wanted):
                self._finished[line.file.name] = line.file
        for entry in list(os.scandir(self._partial)):
            if entry.name not in self._finished:
                shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else Path(entry.path).unlink()
        for file in self._finished.values():
            self._append_journal(file)
        return sum(file.bytes for file in self._finished.values())

    def require_space(self, needed: int) -> None:
        """ModelError unless the file system holds `needed` more bytes."""
        free = shutil.disk_usage(self._partial).free
        if free < needed + SPARE_BYTES:
            raise ModelError(
                f"{self.dst.parent}: the pack needs {needed + SPARE_BYTES:,} more bytes but {free:,} are free; "
                "free some space or choose another destination"
            )

    def finished(self, name: str) -> PackFile | None:
        return self._finished.get(name)

    def write(self, planned: PackFile, chunks: Iterator[bytes | memoryview]) -> PackFile:
        """One file from its bytes in order. Returns it with its checksums. Threads may write different files."""
        total, sha, crc = 0, hashlib.sha256(), _BlockCrc(self._crc32c)
        with (self._partial / planned.name).open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
                sha.update(chunk)
                crc.update(chunk)
                total += len(chunk)
        if total != planned.bytes:
            raise ValueError(f"{planned.name}: {planned.bytes} bytes planned, {total} made")
        done = msgspec.structs.replace(planned, sha256=sha.hexdigest(), crc32c=crc.finish())
        self._append_journal(done)
        self._finished[done.name] = done
        return done

    def write_all(
        self,
        files: Sequence[PackFile],
        chunks: Callable[[PackFile], Iterator[bytes | memoryview]],
        progress: Progress,
        pool: Executor | None = None,
    ) -> tuple[PackFile, ...]:
        """All files, those of an earlier run kept; by the threads of `pool` side by side. ModelError: no space."""
        total = sum(file.bytes for file in files)
        done = self.resume(files)
        self.require_space(total - done)

        def write(planned: PackFile) -> PackFile:
            nonlocal done
            file = self.finished(planned.name)
            if file is None:
                file = self.write(planned, chunks(planned))
                done += planned.bytes  # of several threads: a shown number, no more
                progress(done, total, planned.name)
            return file

        return tuple(map(write, files) if pool is None else pool.map(write, files))

    def copy_texts(self, folder: Path, names: Iterable[str]) -> None:
        """Copies those files of the folder that are there."""
        for name in names:
            if (folder / name).is_file():
                self.copy_text(folder / name)

    def copy_text(self, source: Path) -> None:
        shutil.copyfile(source, self._partial / source.name)

    def publish(self, manifest: Manifest) -> None:
        """Makes the folder durable and gives it its final name. Nothing may be written after."""
        text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        (self._partial / MANIFEST_FILE).write_bytes(text + b"\n")
        (self._partial / JOURNAL_FILE).unlink(missing_ok=True)
        for entry in list(os.scandir(self._partial)):
            _sync(Path(entry.path))
        _sync(self._partial)
        try:
            self._partial.rename(self.dst)
        except OSError as error:
            raise ModelError(f"{self.dst}: cannot be created: {error.strerror}") from None
        _sync(self.dst.parent)

    def _read_journal(self) -> list[_Line]:
        try:
            lines = (self._partial / JOURNAL_FILE).read_bytes().splitlines()
        except FileNotFoundError:
            return []
        found = []
        for line in lines:
            try:
                found.append(msgspec.json.decode(line, type=_Line))
            except (msgspec.DecodeError, UnicodeDecodeError):  # torn by the interruption
                continue
        return found

    def _append_journal(self, file: PackFile) -> None:
        with (self._partial / JOURNAL_FILE).open("ab") as journal:
            journal.write(msgspec.json.encode(_Line(self._fingerprint, file)) + b"\n")

    def _still_good(self, found: PackFile, wanted: PackFile) -> bool:
        if found.sections != wanted.sections or found.sha256 is None:
            return False
        try:
            with (self._partial / found.name).open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == found.sha256
        except OSError:
            return False


class _BlockCrc:
    """crc32c of every started MiB of a stream that comes in chunks of any size."""

    def __init__(self, crc32c: Crc32c) -> None:
        self._crc32c = crc32c
        self._pending = bytearray()
        self._values: list[int] = []

    def update(self, chunk: bytes | memoryview) -> None:
        view = memoryview(chunk)
        if self._pending:
            need = CRC_BLOCK - len(self._pending)
            self._pending += view[:need]
            view = view[need:]
            if len(self._pending) < CRC_BLOCK:
                return
            self._values.append(self._crc32c(bytes(self._pending)))
            self._pending.clear()
        whole = len(view) - len(view) % CRC_BLOCK
        for begin in range(0, whole, CRC_BLOCK):
            self._values.append(self._crc32c(view[begin : begin + CRC_BLOCK]))
        self._pending += view[whole:]

    def finish(self) -> tuple[int, ...]:
        if self._pending:
            self._values.append(self._crc32c(bytes(self._pending)))
            self._pending.clear()
        return tuple(self._values)


@contextmanager
def open_writer(dst: Path, fingerprint: str, crc32c: Crc32c, *, wait: bool) -> Iterator[PackWriter]:
    """Locks DST.partial. With `wait`, stands in line behind another writer instead of failing.

    PackExistsError: DST is there. ModelError: somebody else writes it, or the place is not writable.
    """
    dst = dst.resolve()  # also "." has a name then
    _require_absent(dst)
    partial = dst.with_name(f"{dst.name}.partial")
    descriptor = _lock(dst, partial, wait=wait)
    try:
        yield PackWriter(dst, partial, fingerprint, crc32c)
    except OSError as error:
        raise ModelError(
            f"{partial}: {error.strerror or error}; make room there, or name another folder (serve: model.cache_dir), "
            "and run the same command again to resume"
        ) from error
    finally:
        os.close(descriptor)


def _require_absent(dst: Path) -> None:
    if dst.exists():
        raise PackExistsError(f"{dst}: exists already; remove it or choose another destination")


def _lock(dst: Path, partial: Path, *, wait: bool) -> int:
    while True:
        _require_absent(dst)
        try:
            partial.mkdir(exist_ok=True)
            descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ModelError(f"{partial}: cannot be created: {error.strerror}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The writer we waited for has renamed it: what we locked is the finished pack.
            if partial.exists() and partial.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise ModelError(f"{partial}: another conversion is writing it; wait until it has finished") from None
        os.close(descriptor)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
