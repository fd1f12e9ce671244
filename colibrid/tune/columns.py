"""How the figures of a point are shown: title, unit, meaning. Their names are those of limits (slo.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from colibrid.config.sizes import format_bytes
from colibrid.tune.slo import figures, read_figure, rises

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from colibrid.tune.result import Result, Tried


@dataclass(frozen=True)
class Column:
    """One figure of a point."""

    name: str
    title: str
    meaning: str
    write: Callable[[float], str]

    def read(self, tried: Tried) -> float | None:
        """None where it was not measured."""
        return read_figure(self.name, tried.quality, tried.cost)

    @property
    def share(self) -> bool:
        """A part of 1, written in percent."""
        return self.write is _percent

    @property
    def rises(self) -> bool:
        """More of it is better."""
        return rises(self.name)


def _decimals(count: int) -> Callable[[float], str]:
    return lambda value: f"{value:,.{count}f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _milliseconds(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _bytes(value: float) -> str:
    return format_bytes(round(value))


QUALITY = (
    Column("loss", "loss", "mean negative log-likelihood of a token of the data, nats", _decimals(4)),
    Column(
        "kl",
        "KL",
        "divergence of the model's own setting from this one: mean over positions, whole vocabulary, nats",
        _decimals(5),
    ),
    Column("exact", "exact", "greedy answers that are the data's, letter by letter", _percent),
    Column("top1", "top-1", "positions whose likeliest token is that of the own setting", _percent),
    Column("same", "same", "greedy answers that equal those of the own setting", _percent),
    Column(
        "divergence",
        "parts at",
        "position in the output where a greedy answer parts from that of the own setting, mean; equal ones count their length",
        _decimals(1),
    ),
    Column("cosine", "cosine", "of an embedding with that of the own setting, mean", _decimals(5)),
    Column(
        "neighbours",
        "neighbours",
        "share of a text's ten nearest neighbours that stay as they are with the own setting",
        _percent,
    ),
)
COST = (
    Column(
        "experts_per_token",
        "experts/token",
        "experts that a token used in a layer, mean, after threshold and limits",
        _decimals(2),
    ),
    Column(
        "tokens_per_s",
        "tokens/s",
        "output tokens a second of all requests together; prompt tokens where there is no output",
        _decimals(0),
    ),
    Column("p50_itl_ms", "ITL p50", "milliseconds between two tokens of an answer, median", _milliseconds),
    Column("p99_itl_ms", "ITL p99", "the same, 99th percentile", _milliseconds),
    Column("p50_ttft_ms", "TTFT p50", "milliseconds to the first token, median", _milliseconds),
    Column("p99_ttft_ms", "TTFT p99", "the same, 99th percentile", _milliseconds),
    Column("p50_e2e_ms", "e2e p50", "milliseconds of a whole request, median", _milliseconds),
    Column("p99_e2e_ms", "e2e p99", "the same, 99th percentile", _milliseconds),
    Column(
        "bytes_per_token",
        "bytes/token",
        "weights that a decode step reads, divided by the requests that it serves",
        _bytes,
    ),
    Column("distinct_experts", "distinct", "different experts that a layer runs in a decode step, mean", _decimals(1)),
)
_BY_NAME = {column.name: column for column in (*QUALITY, *COST)}


def measured(columns: Iterable[Column], result: Result) -> list[Column]:
    """Those that at least one point has a figure for, of those that the task has."""
    known = figures(result.task)
    found = [column for column in columns if column.name in known]
    return [column for column in found if any(column.read(tried) is not None for tried in result.tried)]


def of(result: Result, *names: str) -> list[Column]:
    """The columns of these names, where measured."""
    return measured((_BY_NAME[name] for name in names), result)
