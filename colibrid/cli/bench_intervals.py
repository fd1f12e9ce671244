"""Two loads compared: each figure's ratio, with an interval that says how much of it may be chance.

Where an interval would be no better than a guess there is none, and how much more data it takes is said instead.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from colibrid.cli.bench_batches import CONFIDENCE, LEAST_INDEPENDENT, PARTS, Bounds, Values, rate, ratio
from colibrid.cli.bench_load import HttpLoad
from colibrid.cli.bench_report import cut_words
from colibrid.cli.bench_result import HttpReport, Sample, good_ones
from colibrid.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from colibrid.cli.bench_batches import Floats

_LEAST_REQUESTS = 10
# Whatever makes two loads different; where they were sent, how long and in which form is not the load.
_FREE = {"url", "model", "api_key", "timeout", "requests", "seconds", "warmup", "seed", "slo", "fields", "trace"}

Better = Literal["more", "less"]
Verdict = Literal["better", "worse", "unclear", "few", "zero"]


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of both sides. `low` and `high` bound the ratio b / a; both None: too few data, or a is 0."""

    name: str
    unit: str
    better: Better
    a: float
    b: float
    ratio: float | None  # None: a is 0
    low: float | None
    high: float | None  # None beside a `low`: there is no upper bound
    needs: (
        float | None
    )  # about how many times as many requests an interval would take; None: it has one, or nobody knows

    @property
    def verdict(self) -> Verdict:
        """Of b, where the whole interval is on one side of 1."""
        if self.ratio is None:
            return "zero"
        if self.low is None:
            return "few"
        if self.low <= 1 and (self.high is None or self.high >= 1):
            return "unclear"
        return "better" if (self.low > 1) == (self.better == "more") else "worse"


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What two sides differ in."""

    confidence: float
    parts: int  # into which each side was cut
    requests: tuple[int, int]
    independent: tuple[float, float]  # parts that the sides are worth; below 8 nothing of them has an interval
    warnings: list[str]
    figures: list[Figure]


class _Side:
    """The requests of one side, in order of their end, and its figures."""

    def __init__(self, reports: Sequence[HttpReport], slo: str | None, name: str) -> None:
        """ConfigError: too few requests."""
        self.name = name
        self.samples: list[Sample] = []
        steps: list[float] = []
        good: list[bool] = []
        for report in reports:
            samples = sorted(report.samples, key=_end)
            steps += np.diff([_end(sample) for sample in samples], prepend=0.0).tolist()
            if slo is not None:
                good += good_ones(samples, slo, stream=report.load.stream)
            self.samples += samples
        if len(self.samples) < _LEAST_REQUESTS:
            raise ConfigError(
                f"the {name} side has {len(self.samples)} answered requests, and {_LEAST_REQUESTS} are needed for a "
                "comparison; measure longer"
            )
        times = {
            "TTFT": [[] if sample.ttft_ms is None else [sample.ttft_ms] for sample in self.samples],
            "TPOT": [[] if sample.tpot_ms is None else [sample.tpot_ms] for sample in self.samples],
            "ITL": [sample.gaps_ms for sample in self.samples],
            "e2e": [[sample.e2e_ms] for sample in self.samples],
        }
        kinds = {name: _values(values) for name, values in times.items() if any(values)}
        # Requests that wait for each other share more than the times that neighbours have in common.
        under_way = sum(sample.e2e_ms for sample in self.samples) / 1e3 / (sum(steps) or 1.0)
        together = len(self.samples) / max(2 * under_way, 1.0)
        self.independent = min(together, *(values.independent for values in kinds.values()))
        self.figures = {**self._rates(np.array(steps), good), **_times(kinds)}

    def _rates(self, steps: Floats, good: Sequence[bool]) -> dict[tuple[str, str, Better], Bounds]:
        tokens = np.array([sample.tokens or 0 for sample in self.samples], dtype=np.float64)
        found: dict[tuple[str, str, Better], Bounds] = {
            ("requests/s", "", "more"): rate(np.ones_like(steps), steps),
            ("tokens/s out", "", "more"): rate(tokens, steps),
        }
        if good:
            found["goodput", "requests/s", "more"] = rate(np.array(good, dtype=np.float64), steps)
        return found


def compare(a: Sequence[HttpReport], b: Sequence[HttpReport], *, slo: str | None = None) -> Comparison:
    """B against a; each side one run or several of the same load. ConfigError: a side has too few requests."""
    slo = slo or _common_slo([*a, *b])
    first, second = _Side(a, slo, "first"), _Side(b, slo, "second")
    needs = LEAST_INDEPENDENT / min(first.independent, second.independent)
    return Comparison(
        confidence=CONFIDENCE,
        parts=PARTS,
        requests=(len(first.samples), len(second.samples)),
        independent=(first.independent, second.independent),
        warnings=[*_differences(a, b), *_short((first, second))],
        figures=[
            _figure(key, bounds, second.figures[key], needs)
            for key, bounds in first.figures.items()
            if key in second.figures
        ],
    )


def _values(values: Sequence[Sequence[float]]) -> Values:
    flat = np.array([value for request in values for value in request])
    owner = np.repeat(np.arange(len(values)), [len(request) for request in values])
    return Values(flat, owner, len(values))


def _times(kinds: dict[str, Values]) -> dict[tuple[str, str, Better], Bounds]:
    found: dict[tuple[str, str, Better], Bounds] = {}
    for name, values in kinds.items():
        found[f"{name} mean", "ms", "less"] = values.mean()
        for percent in (50, 90, 99):
            found[f"{name} p{percent}", "ms", "less"] = values.percentile(percent / 100)
    return found


def _figure(key: tuple[str, str, Better], a: Bounds, b: Bounds, needs: float) -> Figure:
    """`needs`: of the sides as a whole."""
    name, unit, better = key
    needs = max(needs, a.needs, b.needs)
    low: float | None = None
    high: float | None = None
    if needs < 1 and a.value > 0:
        low, high = ratio(a, b)
        vague = [side for side in (a, b) if side.value > 0 >= side.low]
        if vague and low <= 1 and (high is None or high >= 1):  # as good as nothing is known
            low = high = None
            needs = max((1 - side.low / side.value) ** 2 for side in vague)
    return Figure(
        name=name,
        unit=unit,
        better=better,
        a=a.value,
        b=b.value,
        ratio=b.value / a.value if a.value > 0 else None,
        low=low,
        high=high,
        needs=needs if needs > 1 else None,
    )


def _end(sample: Sample) -> float:
    return sample.at + sample.e2e_ms / 1e3


def _common_slo(reports: Sequence[HttpReport]) -> str | None:
    """Of all reports, if it is the same."""
    named = {report.load.slo for report in reports}
    return named.pop() if len(named) == 1 else None


def _differences(a: Sequence[HttpReport], b: Sequence[HttpReport]) -> list[str]:
    """Fields of the load that are not the same everywhere."""
    found = []
    for name in (name for name in HttpLoad.__struct_fields__ if name not in _FREE):
        values = [getattr(report.load, name) for report in (*a, *b)]
        if any(value != values[0] for value in values):
            shown = " and ".join(dict.fromkeys(str(value) for value in values))
            found.append(f"the loads differ in {name}: {shown}")
    written = {msgspec.structs.replace(report.form, words_per_token=1.0) for report in (*a, *b)}
    if len(written) > 1:
        found.append("the servers took requests in different forms (token ids, ignore_eos, include_usage)")
    traces = {report.load.trace.sha256 if report.load.trace else None for report in (*a, *b)}
    if len(traces) > 1:
        found.append("the loads have different traces")
    if len({report.load.slo for report in (*a, *b)}) > 1:
        found.append("the loads have different limits: goodput is left out, unless --slo says which to use")
    cut = [report for report in (*a, *b) if report.cut_short is not None]
    if cut:
        were = "was" if len(cut) == 1 else "were"
        found.append(
            f"{len(cut)} of the runs {were} cut short ({cut_words(cut[0])}): slow requests that were under way then are missing"
        )
    lost = sum(report.failed for report in (*a, *b))
    if lost:
        found.append(f"{lost} requests failed, and times are of the others only")
    return found


def _short(sides: Sequence[_Side]) -> list[str]:
    """Sides that nothing can be said about."""
    return [
        f"the {side.name} side changes slowly, or is short: it is worth {side.independent:.1f} independent parts, and "
        f"{LEAST_INDEPENDENT:g} are needed; measure {math.ceil(LEAST_INDEPENDENT / side.independent)} times as long"
        for side in sides
        if side.independent <= LEAST_INDEPENDENT
    ]
