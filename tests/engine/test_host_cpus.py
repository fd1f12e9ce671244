"""Threads follow from the affinity mask, the cores and the tightest quota."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from colibrid.engine.host_cpus import HostCpus, host_cpus

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def four_cpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """CPUs 0, 1, 4 and 5; 0 with 4 and 1 with 5 are two threads of one core each. Returns the topology's folder."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4, 5})
    for cpu, siblings in {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5"}.items():
        folder = tmp_path / "cpu" / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    return tmp_path / "cpu"


def test_cores_come_before_their_second_threads(four_cpus: Path, tmp_path: Path) -> None:
    """Automatic threads take one CPU of every core."""
    cpus = host_cpus(tmp_path / "none", tmp_path, four_cpus)
    assert cpus == HostCpus(ids=(0, 1, 4, 5), cores=2, quota=None)
    assert cpus.auto_threads == 2


def test_without_a_topology_every_cpu_is_a_core(four_cpus: Path, tmp_path: Path) -> None:
    """A machine that does not say which CPUs belong together is taken at its word."""
    assert four_cpus.exists()
    assert host_cpus(tmp_path / "none", tmp_path, tmp_path / "none").auto_threads == 4


@pytest.mark.parametrize(
    ("outer", "inner", "threads"),
    [
        ("max 100000", "max 100000", 2),
        ("150000 100000", "max 100000", 1),
        ("400000 100000", "250000 100000", 2),
        ("max 100000", "20000 100000", 1),
        ("nonsense", "900000 100000", 2),
    ],
)
def test_the_tightest_quota_counts(four_cpus: Path, tmp_path: Path, outer: str, inner: str, threads: int) -> None:
    """A quota is rounded down, holds for child groups, and leaves one thread at least."""
    group = tmp_path / "groups" / "outer" / "inner"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text(f"{inner}\n")
    (group.parent / "cpu.max").write_text(f"{outer}\n")
    own = tmp_path / "cgroup"
    own.write_text("1:cpu:/other\n0::/outer/inner\n")
    assert host_cpus(own, tmp_path / "groups", four_cpus).auto_threads == threads


@pytest.mark.parametrize(("threads", "pins"), [(1, ()), (2, (3, 7)), (3, (3, 7, 8)), (4, (3, 7, 8, 9)), (5, ())])
def test_threads_are_pinned_where_they_use_all_cores(threads: int, pins: tuple[int, ...]) -> None:
    """One thread, more threads than CPUs, or fewer than cores are left to the system."""
    assert HostCpus(ids=(3, 7, 8, 9), cores=2, quota=None).pins(threads) == pins
    assert HostCpus(ids=(3, 7, 8, 9), cores=4, quota=None).pins(threads) == (pins if threads == 4 else ())


def test_this_machine_has_a_cpu() -> None:
    """The defaults read the real files."""
    cpus = host_cpus()
    assert set(cpus.ids) == os.sched_getaffinity(0)
    assert 1 <= cpus.auto_threads <= cpus.cores <= len(cpus.ids)
