from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from colibrid.errors import ModelError
from colibrid.model.manifest import PackFile, Section
from colibrid.model.pack_writer import CRC_BLOCK, PackExistsError, open_writer

FILE = PackFile(
    name="a.bin",
    bytes=3 * CRC_BLOCK + 100,
    sections=(Section(role="gate", offset=0, bytes=3 * CRC_BLOCK + 100, precision="fp32", shape=(1, 1)),),
)


@pytest.mark.parametrize("size", [1, 1000, CRC_BLOCK - 1, CRC_BLOCK, CRC_BLOCK + 1, 3 * CRC_BLOCK + 100])
def test_checksums_do_not_depend_on_how_bytes_arrive(size: int, tmp_path: Path) -> None:
    """crc32c is of each started MiB whatever the chunks are."""
    data = bytes(range(251)) * (FILE.bytes // 251 + 1)
    data = data[: FILE.bytes]
    step = size if size > 1 else FILE.bytes // 7
    with open_writer(tmp_path / "p", "key", zlib.crc32, wait=False) as writer:
        made = writer.write(FILE, (data[i : i + step] for i in range(0, len(data), step)))
    assert made.crc32c == tuple(zlib.crc32(data[i : i + CRC_BLOCK]) for i in range(0, len(data), CRC_BLOCK))


def test_a_file_of_another_length_than_planned_is_a_mistake(tmp_path: Path) -> None:
    """Sizes in the description and on disk cannot differ."""
    with (
        open_writer(tmp_path / "p", "key", zlib.crc32, wait=False) as writer,
        pytest.raises(ValueError, match=r"a.bin: 3145828 bytes planned, 3 made"),
    ):
        writer.write(FILE, iter([b"abc"]))


def test_leaving_without_publishing_leaves_only_the_partial_folder(tmp_path: Path) -> None:
    """Whatever ends the writer early, the final name stays free and the lock is given back."""
    with pytest.raises(KeyboardInterrupt), open_writer(tmp_path / "p", "key", zlib.crc32, wait=False):
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["p.partial"]
    with open_writer(tmp_path / "p", "key", zlib.crc32, wait=False) as writer:
        assert writer.resume(()) == 0


def test_an_existing_name_is_refused_at_once(tmp_path: Path) -> None:
    """Also when it is a file."""
    (tmp_path / "p").write_text("")
    with pytest.raises(PackExistsError), open_writer(tmp_path / "p", "key", zlib.crc32, wait=True):
        pass


@pytest.mark.parametrize("name", [".", "..", "/", "./"])
def test_folders_without_a_name_of_their_own_exist(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`convert SRC .` is refused like every existing destination."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PackExistsError), open_writer(Path(name), "key", zlib.crc32, wait=False):
        pass


def test_a_file_in_the_partial_folders_place_is_an_error(tmp_path: Path) -> None:
    """The message names the path."""
    (tmp_path / "p.partial").write_text("")
    with (
        pytest.raises(ModelError, match=r"p.partial: cannot be created"),
        open_writer(tmp_path / "p", "key", zlib.crc32, wait=False),
    ):
        pass
