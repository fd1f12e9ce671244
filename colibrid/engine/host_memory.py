"""How much memory this process may still take: the machine's, and the limits of its control groups. Reads /proc, /sys."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP, root: Path = _CGROUP_ROOT) -> int:
    """The smaller of MemAvailable and what each enclosing control group (version 2) has left."""
    found = [_mem_available(meminfo), *_cgroup_room(cgroup, root)]
    return max(min(found), 0)


def _mem_available(path: Path) -> int:
    for line in path.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    raise OSError(f"{path.name} has no MemAvailable")


def _cgroup_room(path: Path, root: Path) -> list[int]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    unified = [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    if not unified:
        return []
    folder = root / unified[0]
    rooms = [_room(place) for place in (folder, *folder.parents) if place.is_relative_to(root)]
    return [room for room in rooms if room is not None]


def _room(folder: Path) -> int | None:
    """Bytes left in one control group; None without a limit. Page cache counts as free, as in MemAvailable."""
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        if limit == "max":
            return None
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return None
    return int(limit) - used + int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
