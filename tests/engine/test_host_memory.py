"""The memory that may be taken is the smallest of all that limit it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from colibrid.engine.host_memory import available_bytes

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n")
    return path


def write_group(folder: Path, limit: str, current: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 0\ninactive_file {cached}\nactive_file 0\n")


def test_without_control_groups_it_is_what_the_kernel_says(meminfo: Path, tmp_path: Path) -> None:
    """MemAvailable counts when there is no limit."""
    assert available_bytes(meminfo, tmp_path / "none", tmp_path) == 8 * GIB


def test_the_tightest_group_counts(meminfo: Path, tmp_path: Path) -> None:
    """A parent's limit holds for its children; page cache counts as free."""
    root = tmp_path / "groups"
    write_group(root / "outer", str(2 * GIB), GIB, cached=GIB // 2)
    write_group(root / "outer" / "inner", "max", GIB)
    own = tmp_path / "cgroup"
    own.write_text("0::/outer/inner\n")
    assert available_bytes(meminfo, own, root) == GIB + GIB // 2


def test_a_group_over_its_limit_leaves_nothing(meminfo: Path, tmp_path: Path) -> None:
    """The result is never negative."""
    root = tmp_path / "groups"
    write_group(root / "full", str(GIB), 2 * GIB)
    own = tmp_path / "cgroup"
    own.write_text("0::/full\n")
    assert available_bytes(meminfo, own, root) == 0


def test_this_machine_has_memory() -> None:
    """The defaults read the real files."""
    assert available_bytes() > 0
