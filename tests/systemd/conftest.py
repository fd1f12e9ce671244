"""A sandbox as systemd/colibrid.service describes it, where this machine lets one be made."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from unit_file import FOLDER
from unit_sandbox import UNAVAILABLE

import colibrid

if TYPE_CHECKING:
    from collections.abc import Callable

_LAUNCHER = Path(__file__).parents[1] / "unit_sandbox.py"
UNIT = FOLDER / "colibrid.service"


@pytest.fixture
def sandbox(tmp_path: Path) -> Callable[..., list[str]]:
    """The words that run a command in the unit's sandbox; the test is skipped, with the reason, where there can be none."""
    if os.geteuid() != 0:
        pytest.skip("namespaces and read-only paths of a unit need root")
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze, which knows the groups of system calls, is not installed")
    work = tmp_path / "packs"
    work.mkdir()
    visible = {sys.prefix, sys.base_prefix, str(Path(colibrid.__file__).parents[1])}
    shown = [word for path in sorted(visible) for word in ("--visible", path)]
    # The launcher imports what lies beside it, whatever the tests themselves may import.
    words = [
        "env",
        "-u",
        "PYTHONSAFEPATH",
        sys.executable,
        str(_LAUNCHER),
        "--unit",
        str(UNIT),
        "--work",
        str(work),
        *shown,
    ]
    tried = subprocess.run([*words, "--", "true"], capture_output=True, text=True, check=False)
    if tried.returncode == UNAVAILABLE:
        pytest.skip(tried.stderr.strip())
    assert tried.returncode == 0, tried.stderr

    def command(*options: str) -> list[str]:
        return [*words, *options, "--"]

    return command
