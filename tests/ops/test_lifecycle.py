"""colibrid.ops.lifecycle."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from colibrid.ops.lifecycle import Lifecycle, Stage


async def test_first_signal_drains_second_stops() -> None:
    """SIGTERM begins draining, the next one ends waiting."""
    life = Lifecycle()
    life.serving()
    give_back = life.watch_signals(asyncio.get_running_loop(), lambda: None)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(life.drain.wait(), 60)
        assert (life.stage, life.now.is_set()) == (Stage.DRAINING, False)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(life.now.wait(), 60)
    finally:
        give_back()
    life.stopped()
    assert life.stage is Stage.STOPPED


async def test_hangup_is_passed_on() -> None:
    """SIGHUP does not end the daemon; it calls whoever asked for it."""
    hangup = asyncio.Event()
    life = Lifecycle()
    life.serving()
    give_back = life.watch_signals(asyncio.get_running_loop(), hangup.set)
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.wait_for(hangup.wait(), 60)
    finally:
        give_back()
    assert life.stage is Stage.SERVING


async def test_stages_only_move_forward() -> None:
    """A daemon asked to stop while loading does not begin to serve, and a serving one cannot be stopped outright."""
    if __debug__:
        with pytest.raises(AssertionError):
            Lifecycle().stopped()
    life = Lifecycle()
    life.stop("test")
    life.serving()
    assert life.stage is Stage.DRAINING
