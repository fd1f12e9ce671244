"""PEP 517 backend: meson-python, then the tag that a wheel without CPython extension modules deserves.

The package reaches its C library through ctypes, so one wheel serves every Python 3. meson-python tags everything
that lies in site-packages beside native code with the building interpreter's version; `wheel tags` corrects that.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import mesonpy
from mesonpy import (  # noqa: F401  # hooks that are meson-python's own
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)


def build_wheel(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Build the wheel and return its file name, tagged py3-none-<platform>."""
    name = mesonpy.build_wheel(wheel_directory, config_settings, metadata_directory)
    command = [sys.executable, "-m", "wheel", "tags", "--python-tag=py3", "--abi-tag=none", "--remove"]
    path = str(Path(wheel_directory, name))
    done = subprocess.run([*command, path], check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603  # our own words
    return done.stdout.split()[-1]
