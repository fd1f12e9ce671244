"""What the experts of all engines have done together."""

from __future__ import annotations

import operator
from array import array
from typing import TYPE_CHECKING, Any

from colibrid.batch.measures import LayerLoad

if TYPE_CHECKING:
    from collections.abc import Sequence

    from colibrid.batch.reports import EngineReport
    from colibrid.http.state import AppState


def load_json(state: AppState) -> list[dict[str, Any]]:
    """The heat map: a row for each layer that has experts."""
    return [
        {
            "layer": one.layer,
            "assignments": one.assignments.tolist(),
            "imbalance": round(one.imbalance, 3),
            "unused": one.unused,
        }
        for one in expert_load(state.scheduler.reports)
    ]


def expert_load(reports: Sequence[EngineReport]) -> list[LayerLoad]:
    """Assignments of each layer that has experts, since the daemon was started."""
    loads = [report.measures.load.layers() for report in reports]
    total = loads[0]
    for other in loads[1:]:
        total = [
            LayerLoad(one.layer, array("Q", map(operator.add, one.assignments, more.assignments)))
            for one, more in zip(total, other, strict=True)
        ]
    return total
