"""What `colibrid tune` prints: a line a point, and what was chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from colibrid.report.table import table_lines
from colibrid.tune import columns
from colibrid.tune.points import point_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from colibrid.tune.columns import Column
    from colibrid.tune.result import Result, Tried

_SHOWN = (
    "loss", "kl", "top1", "exact", "cosine", "neighbours", "experts_per_token", "tokens_per_s", "p50_itl_ms", "p99_itl_ms",
    "p99_ttft_ms", "p50_e2e_ms", "bytes_per_token",
)  # fmt: skip


def table(result: Result) -> Iterator[str]:
    """In Markdown. Figures that no point has are left out; * is the choice, + is on the front."""
    shown = columns.of(result, *_SHOWN)
    rows = [
        [_mark(result, index) + point_name(one.point), *(_cell(column, one) for column in shown)]
        for index, one in enumerate(result.tried)
    ]
    yield from table_lines(["point", *(column.title for column in shown)], rows)
    for one in result.tried:
        if one.hopeless is not None:
            yield f"given up: {point_name(one.point)}: {one.hopeless}"


def _cell(column: Column, tried: Tried) -> str:
    value = column.read(tried)
    if value is None:
        return ""
    return column.write(value) + (" ms" if column.name.endswith("_ms") else "")


def _mark(result: Result, index: int) -> str:
    if index == result.chosen:
        return "* "
    return "+ " if index in result.front else "  "
