"""The garbage collector of the daemon."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import TYPE_CHECKING

import pytest

from colibrid.ops.collector import calm_collector, collect_when_idle

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def calm() -> Iterator[None]:
    """The daemon's collector; afterwards as before."""
    before = gc.get_threshold()
    calm_collector()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


class Node:
    """Refers to itself, so that no reference count ever frees it."""

    def __init__(self) -> None:
        self.me = self


@pytest.mark.usefixtures("calm")
def test_many_objects_start_no_full_collection() -> None:
    """A million objects that stay, as of a large answer, do not have everything looked at."""
    before = gc.get_stats()[2]["collections"]
    kept = [[index] for index in range(1_000_000)]
    assert gc.get_stats()[2]["collections"] == before
    assert len(kept) == 1_000_000


@pytest.mark.usefixtures("calm")
def test_cycles_are_still_found() -> None:
    """Garbage in cycles is freed while young."""
    node = Node()
    seen = weakref.ref(node)
    del node
    kept = [[index] for index in range(10_000)]
    assert seen() is None
    assert len(kept) == 10_000


@pytest.mark.usefixtures("calm")
@pytest.mark.parametrize(("idle", "many", "found"), [(True, True, True), (False, True, False), (False, False, True)])
async def test_old_cycles_are_found_when_it_does_not_matter(idle: bool, many: bool, found: bool) -> None:
    """Garbage that has grown old is freed when nobody is being served, or when it is quickly looked through."""
    kept = [[index] for index in range(60_000 if many else 10)]
    node = Node()
    gc.collect()
    seen = weakref.ref(node)
    del node
    asked = asyncio.Event()

    def is_idle() -> bool:
        asked.set()
        return idle

    collecting = asyncio.create_task(collect_when_idle(is_idle, 0.01))
    await asked.wait()
    await asyncio.sleep(0)
    collecting.cancel()
    assert (seen() is None) == found
    assert kept
