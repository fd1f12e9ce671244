"""Native files are found, checked, and refused with a remedy."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from descriptors import open_descriptors

from colibrid.engine import library as native
from colibrid.engine.library import InstallError, KernelModules, Library


@pytest.fixture
def folder(tmp_path: Path, library: Library) -> Path:
    """A copy of the native files that the test may damage."""
    return shutil.copytree(library.folder, tmp_path / "lib")


def test_library_says_its_status_names(library: Library) -> None:
    """Statuses have names for messages."""
    assert library.status_name(0) != library.status_name(3)


def test_modules_are_loaded_anew_each_time(library: Library) -> None:
    """A module is what its path names now, not what lay under the same descriptor when it was loaded before."""

    def loaded() -> list[str]:
        with KernelModules(library.folder) as modules:
            handles = [ctypes.CDLL(path) for path in modules.paths]
        entries = [handle.clb_module_entry for handle in handles]
        for entry in entries:
            entry.restype = ctypes.POINTER(ctypes.c_char_p)
        return [entry()[1].decode() for entry in entries]  # clb_module.name

    first = loaded()
    assert len(set(first)) == len(first)
    spare = os.dup(0)  # the same modules, one descriptor further
    try:
        assert loaded() == first
    finally:
        os.close(spare)


def test_missing_library_names_the_build_command(tmp_path: Path) -> None:
    """Without libcolibri.so the error says how to build it."""
    with pytest.raises(InstallError, match="make lib"):
        Library(tmp_path)


def test_damaged_library_is_refused(tmp_path: Path) -> None:
    """A file that is no shared object gives an error of ours."""
    (tmp_path / "libcolibri.so").write_bytes(b"not a library")
    with pytest.raises(InstallError, match="does not load"):
        Library(tmp_path)


def test_library_without_our_functions_is_refused(tmp_path: Path) -> None:
    """Another shared object under our name is of another version."""
    other = next(path for path in (Path("/lib"), Path("/usr/lib")) if path.is_dir()).rglob("libm.so.6")
    shutil.copy(next(other), tmp_path / "libcolibri.so")
    with pytest.raises(InstallError, match="of another version"):
        Library(tmp_path)


def test_modules_are_sealed_copies_that_load(library: Library) -> None:
    """Each path names loadable bytes that nobody can change any more."""
    with KernelModules(library.folder) as modules:
        assert modules.names
        for path in modules.paths:
            assert ctypes.CDLL(path).clb_module_entry is not None
            with Path(path).open("r+b", buffering=0) as file, pytest.raises(PermissionError):
                file.write(b"x")


def test_changed_module_is_refused_with_both_hashes(folder: Path) -> None:
    """One flipped bit in a module is noticed before it is loaded; no descriptor is left open."""
    entry = json.loads((folder / "modules.json").read_text())["modules"][-1]
    path = folder / entry["file"]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    before = open_descriptors()
    with pytest.raises(InstallError) as caught:
        KernelModules(folder)
    assert hashlib.sha256(data).hexdigest() in str(caught.value)
    assert entry["sha256"] in str(caught.value)
    assert open_descriptors() == before


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        (None, "cannot be read"),
        ("{", "damaged"),
        ('{"version": 2, "modules": []}', "damaged"),
        ('{"version": 1, "modules": [{"name": "a", "file": "../a.so", "sha256": "' + "0" * 64 + '"}]}', "damaged"),
    ],
)
def test_bad_module_list_is_refused(folder: Path, text: str | None, pattern: str) -> None:
    """A missing, broken, newer or path-escaping modules.json is an error of the installation."""
    (folder / "modules.json").unlink()
    if text is not None:
        (folder / "modules.json").write_text(text)
    with pytest.raises(InstallError, match=pattern):
        KernelModules(folder)


def test_missing_module_is_named(folder: Path) -> None:
    """A module that the list names and the folder lacks is an error with its file name."""
    entry = json.loads((folder / "modules.json").read_text())["modules"][0]
    (folder / entry["file"]).unlink()
    with pytest.raises(InstallError, match=entry["file"]):
        KernelModules(folder)


def test_folder_is_beside_the_package() -> None:
    """The native files are looked for in the package only, never beside a model or in the working directory."""
    assert Path(native.__file__).parent / "lib" == native.LIBRARY_FOLDER
