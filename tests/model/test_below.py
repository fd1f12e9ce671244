"""colibrid.model.below: what a request may open."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from colibrid.errors import RequestError
from colibrid.model.below import open_below, read_in

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A named folder with a file, a folder, links to both and to the outside, and a pipe."""
    inside = tmp_path / "named"
    (inside / "deep").mkdir(parents=True)
    (inside / "file").write_text("inside")
    (inside / "deep" / "file").write_text("deep")
    (tmp_path / "secret").write_text("secret")
    (inside / "link").symlink_to(inside / "file")
    (inside / "out").symlink_to(tmp_path / "secret")
    (inside / "linked").symlink_to(inside / "deep")
    os.mkfifo(inside / "pipe")
    (tmp_path / "named2").mkdir()
    (tmp_path / "named2" / "file").write_text("beside")
    return inside


def test_files_below_a_named_folder(folder: Path) -> None:
    """A regular file at any depth, of any of the folders."""
    for path, text in (("file", b"inside"), ("deep/file", b"deep")):
        opened = open_below(f"{folder}/{path}", ["/nowhere", f"{folder}/"], "experts.swap_folders")
        assert os.read(opened.file, 100) == text
        assert read_in(opened.folder, "file", 100) == text
        assert opened.name == "file"
        opened.close()


@pytest.mark.parametrize(
    "path",
    [
        "{folder}", "{folder}/", "{folder}/deep", "{folder}/none", "{folder}/pipe", "{folder}/link", "{folder}/out",
        "{folder}/linked/file", "{folder}/../secret", "{folder}/deep/../file", "{folder}/./file", "{folder}//file",
        "{folder}2/file", "file", "/etc/passwd", "", "{folder}/file\0", "{folder}/" + "x" * 5000,
    ],
)  # fmt: skip
def test_everything_else_is_refused(folder: Path, path: str) -> None:
    """Folders, pipes, links, dots, neighbours, relative paths and names too long: no descriptor is left behind."""
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(RequestError) as refused:
        open_below(path.format(folder=folder), [str(folder)], "experts.swap_folders")
    assert refused.value.param == "file"
    assert str(folder) not in refused.value.message
    assert set(os.listdir("/proc/self/fd")) == before


def test_without_folders_nothing_is_opened(folder: Path) -> None:
    """An empty list names no place."""
    with pytest.raises(RequestError, match=r"experts\.swap_folders is empty"):
        open_below(f"{folder}/file", [], "experts.swap_folders")


def test_descriptions_are_bounded_and_no_links(folder: Path) -> None:
    """A missing one is none; a link or a large one is refused."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        assert read_in(fd, "none", 10) is None
        for name, text in (("out", "cannot be opened"), ("file", "more than 3 bytes")):
            with pytest.raises(RequestError, match=text):
                read_in(fd, name, 3)
    finally:
        os.close(fd)
