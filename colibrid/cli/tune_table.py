"""What `colibrid tune` prints: a line a point, and what was chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from colibrid.config.sizes import format_bytes
from colibrid.tune.points import point_name
from colibrid.tune.slo import read_figure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from colibrid.tune.result import Result


class _Column(NamedTuple):
    title: str
    figure: str
    write: Callable[[float], str]


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _milliseconds(value: float) -> str:
    return f"{value:.3g} ms" if value < 100 else f"{value:.0f} ms"


_COLUMNS = (
    _Column("loss", "loss", "{:.4f}".format),
    _Column("KL", "kl", "{:.5f}".format),
    _Column("top-1", "top1", _percent),
    _Column("exact", "exact", _percent),
    _Column("cosine", "cosine", "{:.5f}".format),
    _Column("neighbours", "neighbours", _percent),
    _Column("experts", "experts_per_token", "{:.2f}".format),
    _Column("tokens/s", "tokens_per_s", "{:.0f}".format),
    _Column("ITL p50", "p50_itl_ms", _milliseconds),
    _Column("ITL p99", "p99_itl_ms", _milliseconds),
    _Column("TTFT p99", "p99_ttft_ms", _milliseconds),
    _Column("e2e p50", "p50_e2e_ms", _milliseconds),
    _Column("bytes/token", "bytes_per_token", lambda value: format_bytes(round(value))),
)


def table(result: Result) -> Iterator[str]:
    """In Markdown. Figures that no point has are left out; * is the choice, + is on the front."""
    rows = [[_mark(result, index) + point_name(one.point)] for index, one in enumerate(result.tried)]
    head = ["point"]
    for column in _COLUMNS:
        values = [read_figure(column.figure, one.quality, one.cost) for one in result.tried]
        if any(value is not None for value in values):
            head.append(column.title)
            for row, value in zip(rows, values, strict=True):
                row.append("" if value is None else column.write(value))
    widths = [max(len(row[index]) for row in (head, *rows)) for index in range(len(head))]
    for cells in (head, ["-" * width for width in widths], *rows):
        yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"
    for one in result.tried:
        if one.hopeless is not None:
            yield f"given up: {point_name(one.point)}: {one.hopeless}"


def _mark(result: Result, index: int) -> str:
    if index == result.chosen:
        return "* "
    return "+ " if index in result.front else "  "
