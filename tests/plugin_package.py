"""Installs the example plugin for a test: its folder and its metadata on the module path, without pip or network."""

from __future__ import annotations

import tomllib
from pathlib import Path

SOURCE = Path(__file__).parent / "plugins" / "example"


def metadata(folder: Path, *, name: str | None = None, points: dict[str, str] | None = None) -> Path:
    """A folder for the module path with what pip would write for the example's pyproject.toml.

    `name` and `points` (entry points of our group): those of another package.
    """
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    name = name or project["name"]
    info = folder / f"{name.replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {project['version']}\n")
    found = points or project["entry-points"]["colibrid.plugins"]
    lines = [f"{point} = {target}" for point, target in found.items()]
    (info / "entry_points.txt").write_text("[colibrid.plugins]\n" + "\n".join(lines) + "\n")
    return folder
