"""colibrid.model.expert_file: what describes an expert's file, and whether it is whole."""

from __future__ import annotations

import hashlib
import os
import shutil
import zlib
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from colibrid.errors import RequestError
from colibrid.model.expert_file import open_expert

if TYPE_CHECKING:
    from pathlib import Path

    from colibrid.model.pack import Pack


def checksum(data: bytes) -> int:
    return zlib.crc32(data)


def section(role: str, offset: int) -> dict[str, Any]:
    return {"role": role, "offset": offset, "bytes": 512, "precision": "bf16", "shape": [16, 16], "layout": "rows16"}


DATA = bytes(range(256)) * 6
MOST = 1 << 20
PIECES = [zlib.crc32(DATA)]
DESCRIPTION: dict[str, Any] = {
    "bytes": len(DATA),
    "sha256": hashlib.sha256(DATA).hexdigest(),
    "sections": [section("gate", 0), section("up", 512), section("down", 1024)],
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    target = tmp_path / "e.bin"
    target.write_bytes(DATA)
    return target


def describe(path: Path, **changes: Any) -> None:
    described = {key: value for key, value in (DESCRIPTION | changes).items() if value is not None}
    path.with_name("e.bin.json").write_bytes(msgspec.json.encode(described))


def test_a_description_beside_the_file(path: Path) -> None:
    """FILE.json is one entry of a pack's files; both checksums come out, of the bytes that were read."""
    describe(path)
    opened = open_expert(str(path), [str(path.parent)], checksum, MOST)
    try:
        assert os.pread(opened.fd, 4, 0) == DATA[:4]
        assert (opened.name, opened.precision, opened.sha256) == ("e.bin", "bf16", DESCRIPTION["sha256"])
        assert opened.file.crc32c == tuple(PIECES)
    finally:
        os.close(opened.fd)


def test_a_pack_is_a_source(bundled_pack: Pack, tmp_path: Path) -> None:
    """Without FILE.json the colibri.json of the folder tells."""
    names = bundled_pack.manifest.layers[0].expert_files
    library_sum = {file.name: file.crc32c for file in bundled_pack.manifest.files}[names[2]]
    assert library_sum is not None
    values = iter(library_sum)
    opened = open_expert(str(bundled_pack.path / names[2]), [str(bundled_pack.path)], lambda _piece: next(values), MOST)
    os.close(opened.fd)
    assert opened.name == names[2]
    shutil.copy(bundled_pack.path / names[2], tmp_path / "alone.bin")
    with pytest.raises(RequestError, match="neither alone.bin.json nor colibri.json"):
        open_expert(str(tmp_path / "alone.bin"), [str(tmp_path)], checksum, MOST)
    shutil.copy(bundled_pack.path / "colibri.json", tmp_path / "colibri.json")
    with pytest.raises(RequestError, match="has no entry alone.bin"):
        open_expert(str(tmp_path / "alone.bin"), [str(tmp_path)], checksum, MOST)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"sha256": "0" * 64}, "sha256 is"),
        ({"sha256": None, "crc32c": [1]}, "crc32c differs .* in MiB 0"),
        ({"crc32c": [*PIECES, 5]}, "crc32c differs .* in MiB 1"),
        ({"sha256": None}, "neither sha256 nor crc32c"),
        ({"bytes": 1000}, "1536 bytes, 1000 are described"),
        ({"sections": DESCRIPTION["sections"][:2]}, "gate, up and down"),
        ({"sections": DESCRIPTION["sections"][::-1]}, "gate, up and down"),
        ({"sections": 5}, "sections"),
        ({"other": 5}, "other"),
    ],
)
def test_what_does_not_fit_is_refused(path: Path, changes: dict[str, Any], text: str) -> None:
    """Checksums, size, sections and unknown fields; no descriptor is left behind."""
    describe(path, **changes)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(RequestError, match=text) as refused:
        open_expert(str(path), [str(path.parent)], checksum, MOST)
    assert refused.value.param == "file"
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff", b"[" * 5000])
def test_descriptions_that_are_none(path: Path, raw: bytes) -> None:
    """Bytes that are no JSON object are refused as well, in either place."""
    path.with_name("e.bin.json").write_bytes(raw)
    with pytest.raises(RequestError):
        open_expert(str(path), [str(path.parent)], checksum, MOST)
    path.with_name("e.bin.json").unlink()
    path.with_name("colibri.json").write_bytes(raw)
    with pytest.raises(RequestError):
        open_expert(str(path), [str(path.parent)], checksum, MOST)


def test_what_no_expert_can_be_is_not_read(path: Path) -> None:
    """A sparse file of a tebibyte is refused at once, before a byte of it is read."""
    os.truncate(path, 1 << 40)
    describe(path, bytes=1 << 40)

    def unread(_piece: bytes) -> int:
        raise AssertionError("it was read")

    with pytest.raises(RequestError, match=f"at most {MOST}"):
        open_expert(str(path), [str(path.parent)], unread, MOST)
