"""colibrid.cli.heartbeat."""

from __future__ import annotations

import pytest

from colibrid.cli.heartbeat import engine_is_well
from colibrid.engine.state import EnginePhase, Readiness


@pytest.mark.parametrize(
    ("phase", "age", "well"),
    [("ready", None, True), ("ready", 9.9, True), ("ready", 10.1, False), ("starting", None, True),
     ("loading", None, True), ("restarting", 99.0, True), ("failed", None, False), ("stopped", None, False)],
)  # fmt: skip
def test_when_the_daemon_is_well(phase: EnginePhase, age: float | None, well: bool) -> None:
    """Fresh steps or an engine being cured are well; an old step or an engine given up are not."""
    assert engine_is_well(Readiness(phase=phase, last_step_age_s=age), 10.0) is well
