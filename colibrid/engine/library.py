"""The only place that finds and loads the native files: libcolibri.so and the CPU kernel modules.

They lie in colibrid/engine/lib/, beside modules.json, which holds the SHA-256 of each module; custom modules lie in the
folders that the settings name, which hold their SHA-256. A module is copied into a sealed memfd, and the copy is hashed
and loaded, so that the bytes that were checked are the bytes that run.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

import msgspec
from msgspec import Meta

from colibrid.engine import abi
from colibrid.errors import ConfigError, EngineError, RequestError
from colibrid.model.below import open_below

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import BinaryIO

LIBRARY_FOLDER = Path(__file__).parent / "lib"
LIBRARY_NAME = "libcolibri.so"
MODULES_NAME = "modules.json"
CUBIN_FOLDER = LIBRARY_FOLDER / "cubins"  # of kernels_cu/build.py; absent in a wheel for the CPU only
_BUILD_HINT = "build it with `make lib`, or install the package with `pip install .`"
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_COPY_BYTES = 1 << 20


class InstallError(EngineError):
    """The native files are missing, damaged or of another version: starting again does not help."""


class ModuleEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kernel module of modules.json."""

    name: str  # "cpu_generic_bf16"
    file: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$")]
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]


class ModuleList(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """modules.json, written by the build."""

    version: Annotated[int, Meta(ge=1, le=1)]
    modules: tuple[ModuleEntry, ...]


class CustomModule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kernel module that is not ours (settings `modules`); it computes only experts for which it is named."""

    name: str
    file: str  # an absolute path below one of `folders`
    folders: tuple[str, ...]
    sha256: str


class Library:
    """libcolibri.so with typed functions. Free of state; the shared object stays loaded."""

    def __init__(self, folder: Path = LIBRARY_FOLDER) -> None:
        """InstallError if the library is missing, does not load or has another ABI version."""
        self.folder = folder
        path = folder / LIBRARY_NAME
        if not path.is_file():
            raise InstallError(f"the native engine {LIBRARY_NAME} is not built: {_BUILD_HINT}")
        try:
            self.c = ctypes.CDLL(str(path))
        except OSError as error:
            raise InstallError(f"the native engine {LIBRARY_NAME} does not load ({error}): {_BUILD_HINT}") from error
        for name, (result, arguments) in abi.PROTOTYPES.items():
            function = getattr(self.c, name, None)
            if function is None:
                raise InstallError(f"{LIBRARY_NAME} has no function {name}; it is of another version: {_BUILD_HINT}")
            function.restype = result
            function.argtypes = arguments
        found = self.c.clb_abi_version()
        if found != abi.ABI_VERSION:
            raise InstallError(
                f"{LIBRARY_NAME} has ABI version {found}, this package needs {abi.ABI_VERSION}: {_BUILD_HINT}"
            )

    def status_name(self, status: int) -> str:
        """The name of a clb_status, for messages."""
        name: bytes = self.c.clb_status_name(status)
        return name.decode("ascii")


class KernelModules:
    """Checked copies of all kernel modules, open for as long as this object. Use as a context manager."""

    _made: ClassVar = itertools.count()  # of this process

    def __init__(self, folder: Path = LIBRARY_FOLDER, custom: Sequence[CustomModule] = ()) -> None:
        """InstallError if modules.json or a module is missing, or a hash differs, ConfigError if a custom one is or does;
        nothing is left open then.
        """
        self._fds: list[int] = []
        self._detour = "./" * next(self._made)
        self.names: list[str] = []
        try:
            for entry in _read_entries(folder):
                self._fds.append(_checked_copy(folder, entry))
                self.names.append(entry.name)
            self.built_in = len(self.names)  # the others are custom
            for module in custom:
                self._fds.append(_checked_custom(module))
                self.names.append(module.name)
        except BaseException:
            self.close()
            raise

    @property
    def paths(self) -> list[str]:
        """Paths that name the checked bytes, for dlopen in this process.

        No path comes twice: for one that it knows dlopen gives what it loaded then, while descriptors are used again.
        """
        return [f"/proc/self/fd/{self._detour}{fd}" for fd in self._fds]

    def close(self) -> None:
        """Close the copies; modules already loaded by dlopen stay mapped."""
        while self._fds:
            os.close(self._fds.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _checked_custom(module: CustomModule) -> int:
    """A sealed memfd with the module's bytes, whose SHA-256 is the one in the settings."""
    setting = f"modules.load.{module.name}"
    try:
        opened = open_below(module.file, module.folders, "modules.folders")
    except RequestError as error:
        raise ConfigError(f"{setting}.{error}") from None
    copy = os.memfd_create(module.name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.close(opened.folder)
        with os.fdopen(opened.file, "rb") as source:
            found = _copy_and_hash(source, copy)
        fcntl.fcntl(copy, fcntl.F_ADD_SEALS, _SEALS)
        _check_custom_hash(setting, module.sha256, found)
    except BaseException:
        os.close(copy)
        raise
    return copy


def _check_custom_hash(setting: str, expected: str, found: str) -> None:
    if found != expected:
        raise ConfigError(f"{setting}.sha256 is {expected}, but the file's is {found}; do not use it")


def _read_entries(folder: Path) -> tuple[ModuleEntry, ...]:
    try:
        text = (folder / MODULES_NAME).read_bytes()
    except OSError as error:
        raise InstallError(f"{MODULES_NAME} of the native engine cannot be read: {_BUILD_HINT}") from error
    try:
        return msgspec.json.decode(text, type=ModuleList).modules
    except msgspec.MsgspecError as error:
        raise InstallError(f"{MODULES_NAME} of the native engine is damaged ({error}): {_BUILD_HINT}") from error


def _checked_copy(folder: Path, entry: ModuleEntry) -> int:
    """A sealed memfd with the module's bytes, whose SHA-256 is as expected."""
    copy = os.memfd_create(entry.file, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with _opened(folder / entry.file) as source:
            found = _copy_and_hash(source, copy)
        fcntl.fcntl(copy, fcntl.F_ADD_SEALS, _SEALS)
        _check_hash(entry, found)
    except BaseException:
        os.close(copy)
        raise
    return copy


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise InstallError(f"kernel module {path.name} cannot be read: {_BUILD_HINT}") from error


def _copy_and_hash(source: BinaryIO, copy: int) -> str:
    digest = hashlib.sha256()
    with os.fdopen(os.dup(copy), "wb") as target:
        while block := source.read(_COPY_BYTES):
            digest.update(block)
            target.write(block)
    return digest.hexdigest()


def _check_hash(entry: ModuleEntry, found: str) -> None:
    if found != entry.sha256:
        raise InstallError(
            f"kernel module {entry.file} has SHA-256 {found}, {MODULES_NAME} says {entry.sha256}; "
            f"do not use it: {_BUILD_HINT}"
        )
