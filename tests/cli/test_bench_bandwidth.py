"""The probe of read bandwidth: that it reads everything with the threads it says, not how fast."""

from __future__ import annotations

import os

import pytest

from colibrid.cli import bench_bandwidth
from colibrid.cli.bench_bandwidth import PROBE_BYTES, BandwidthProbe, probe_threads


def test_the_probe_reads_a_buffer_that_no_cache_holds() -> None:
    """The benches read at least 1 GiB."""
    assert PROBE_BYTES >= 1 << 30


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_parts_make_up_the_buffer(threads: int) -> None:
    """Each thread reads its own part, and together they read all of it."""
    probe = BandwidthProbe(threads, 1 << 20, os.sched_getaffinity(0))
    assert probe.threads == threads
    assert sum(part.nbytes for part in probe._parts) == 1 << 20
    assert len({part.__array_interface__["data"][0] for part in probe._parts}) == threads


def test_bandwidth_is_plausible() -> None:
    """A machine reads between 100 MB and 100 TB a second."""
    assert 1e8 < BandwidthProbe(2, 64 << 20, os.sched_getaffinity(0)).measure() < 1e14


def test_a_pinned_caller_does_not_pin_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads take the CPUs that they were given, not those of the thread that starts them."""
    asked: list[object] = []
    monkeypatch.setattr(bench_bandwidth.os, "sched_setaffinity", lambda pid, mask: asked.append((pid, mask)))
    BandwidthProbe(2, 1 << 20, {3, 5})._read_all()
    assert asked == [(0, {3, 5}), (0, {3, 5})]


@pytest.mark.parametrize(("engine", "cpus", "threads"), [(1, 1, 1), (1, 8, 2), (2, 2, 2), (6, 8, 6)])
def test_as_many_threads_as_the_engine_but_two_where_possible(engine: int, cpus: int, threads: int) -> None:
    """An engine of one thread is compared with what two can read."""
    assert probe_threads(engine, cpus) == threads
