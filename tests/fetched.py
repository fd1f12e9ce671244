"""Files of public packages, fetched by name with the machine's own package clients, once for all test runs.

Nothing of them is committed, and each has its version, so that a new release does not turn a clean tree red. A test
whose package cannot be fetched is skipped with what the client said.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

_TIMEOUT_S = 300


def npm_package(cache: pytest.Cache, name: str) -> Path:
    """The unpacked folder of an npm package, NAME@VERSION."""
    folder = cache.mkdir(f"npm-{name.replace('/', '-')}")
    if not (folder / "package").exists():
        archive = _download(["npm", "pack", "--silent", name], folder, "*.tgz")
        _unpack(archive, folder, "")
        archive.unlink()
    return folder / "package"


def sdist(cache: pytest.Cache, name: str, version: str, suffix: str) -> Path:
    """A folder with those files of a source distribution on PyPI that end with `suffix`."""
    folder = cache.mkdir(f"sdist-{name}-{version}")
    if not any(folder.rglob(f"*{suffix}")):
        wanted = ["--no-binary", name, f"{name}=={version}"]
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *wanted]
        archive = _download(pip, folder, "*.tar.gz")
        _unpack(archive, folder, suffix)
        archive.unlink()
    return folder


def _download(command: list[str], folder: Path, pattern: str) -> Path:
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"{command[0]} cannot fetch {command[-1]}: {error}")
    found = sorted(folder.glob(pattern))
    if done.returncode != 0 or not found:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        pytest.skip(f"{command[0]} cannot fetch {command[-1]}: {said[-1] if said else 'no reason given'}")
    return found[0]


def _unpack(archive: Path, folder: Path, suffix: str) -> None:
    with tarfile.open(archive) as packed:
        members = [member for member in packed.getmembers() if member.isfile() and member.name.endswith(suffix)]
        packed.extractall(folder, members, filter="data")
