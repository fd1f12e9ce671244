"""colibrid.http.load."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

from colibrid.batch.measures import ExpertLoad, Measures
from colibrid.http.load import expert_load


def test_engines_add_up() -> None:
    """Each expert's work is that of all engines together, layer by layer."""
    reports: list[Any] = []
    for block in ([1, 2, 0, 0, 5, 0], [10, 0, 0, 0, 1, 0], [0, 3, 0, 0, 0, 0]):
        load = ExpertLoad((2, 0, 1), 2, 100)
        load.add(array("I", block).tobytes())
        reports.append(SimpleNamespace(measures=Measures(load)))
    assert [(one.layer, list(one.assignments)) for one in expert_load(reports)] == [(0, [11, 5]), (2, [6])]
    assert [list(one.assignments) for one in expert_load(reports[:1])] == [[1, 2], [5]]
