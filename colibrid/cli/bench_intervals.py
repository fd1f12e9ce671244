"""Two loads compared: each figure's ratio, with an interval that says how much of it may be chance.

Requests that run together share their fate, so that intervals from single requests would be too narrow. Blocks of
consecutive requests are drawn instead (a moving-block bootstrap, in order of their end). A rate is requests over the
times between ends, so that it varies with the blocks, too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from colibrid.cli.bench_load import HttpLoad
from colibrid.cli.bench_result import HttpReport, Sample, good_ones
from colibrid.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Counts = NDArray[np.int64]
    Statistic = Callable[[Counts], float]

CONFIDENCE = 0.95
SEED = 1
_LEAST_BLOCKS = 8
_LEAST_REQUESTS = 10
# Whatever makes two loads different; where they were sent, how long and in which form is not the load.
_FREE = {"url", "model", "api_key", "timeout", "requests", "seconds", "warmup", "seed", "slo", "fields", "trace"}


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of both sides. `low` and `high` bound b / a; None: one side has nothing but zeros."""

    name: str
    unit: str
    better: Literal["more", "less"]
    a: float
    b: float
    ratio: float | None
    low: float | None
    high: float | None

    @property
    def verdict(self) -> Literal["better", "worse", "unclear"]:
        """Of b, where the whole interval is on one side of 1."""
        if self.low is None or self.high is None or self.low <= 1 <= self.high:
            return "unclear"
        return "better" if (self.low > 1) == (self.better == "more") else "worse"


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What two sides differ in."""

    confidence: float
    resamples: int
    seed: int
    requests: tuple[int, int]
    block: tuple[int, int]  # requests that are drawn together
    warnings: list[str]
    figures: list[Figure]


class _Side:
    """The requests of one side, in order of their end, as arrays."""

    def __init__(self, reports: Sequence[HttpReport], slo: str | None) -> None:
        self.samples: list[Sample] = []
        steps: list[float] = []
        good: list[bool] = []
        under_way = elapsed = 0.0
        for report in reports:
            samples = sorted(report.samples, key=_end)
            ends = [_end(sample) for sample in samples]
            steps += np.diff(ends, prepend=0.0).tolist()
            if slo is not None:
                good += good_ones(samples, slo, stream=report.load.stream)
            self.samples += samples
            under_way += sum(sample.e2e_ms for sample in samples) / 1e3
            elapsed += report.elapsed_s
        self.steps = np.array(steps)
        self.good = np.array(good, dtype=np.float64)
        self.tokens = np.array([sample.tokens or 0 for sample in self.samples], dtype=np.float64)
        self.block = block_length(len(self.samples), under_way / elapsed if elapsed else 1.0)

    def statistics(self) -> dict[tuple[str, str, Literal["more", "less"]], Statistic]:
        """Each takes how often every request was drawn."""
        time = self.steps
        found: dict[tuple[str, str, Literal["more", "less"]], Statistic] = {
            ("requests/s", "", "more"): lambda counts: _rate(counts, np.ones_like(time), time),
            ("tokens/s out", "", "more"): lambda counts: _rate(counts, self.tokens, time),
        }
        if len(self.good):
            found["goodput", "requests/s", "more"] = lambda counts: _rate(counts, self.good, time)
        for name, values in (
            ("TTFT", [[] if sample.ttft_ms is None else [sample.ttft_ms] for sample in self.samples]),
            ("TPOT", [[] if sample.tpot_ms is None else [sample.tpot_ms] for sample in self.samples]),
            ("ITL", [sample.gaps_ms for sample in self.samples]),
            ("e2e", [[sample.e2e_ms] for sample in self.samples]),
        ):
            if any(values):
                pool = _Pool(values)
                found[f"{name} mean", "ms", "less"] = pool.mean
                for percent in (50, 90, 99):
                    found[f"{name} p{percent}", "ms", "less"] = pool.percentile(percent / 100)
        return found

    def draws(self, resamples: int, seed: int) -> Iterator[Counts]:
        """How often each request is drawn, once a resample."""
        count = len(self.samples)
        source = np.random.default_rng(seed)
        for _ in range(resamples):
            starts = source.integers(0, count, size=(math.ceil(count / self.block), 1))
            chosen = (starts + np.arange(self.block)) % count
            yield np.bincount(chosen.reshape(-1)[:count], minlength=count)


class _Pool:
    """Values of one kind of all requests, of which a request may have none or many."""

    def __init__(self, values: Sequence[Sequence[float]]) -> None:
        flat = np.array([value for request in values for value in request])
        owner = np.repeat(np.arange(len(values)), [len(request) for request in values])
        order = np.argsort(flat, kind="stable")
        self._values = flat[order]
        self._owner = owner[order]
        self._sums = np.array([math.fsum(request) for request in values])
        self._sizes = np.array([len(request) for request in values], dtype=np.float64)

    def mean(self, counts: Counts) -> float:
        return _rate(counts, self._sums, self._sizes)

    def percentile(self, share: float) -> Statistic:
        """As report.percentiles.percentile, of values that are there as often as their request was drawn."""

        def value(counts: Counts) -> float:
            upto = np.cumsum(counts[self._owner])
            if upto[-1] == 0:
                return 0.0
            rank = math.ceil(round(share * float(upto[-1]), 9))
            return float(self._values[np.searchsorted(upto, rank)])

        return value


def compare(
    a: Sequence[HttpReport], b: Sequence[HttpReport], *, slo: str | None = None, resamples: int = 1000
) -> Comparison:
    """B against a; each side one run or several of the same load. ConfigError: a side has too few requests."""
    slo = slo or _common_slo([*a, *b])
    sides = _Side(a, slo), _Side(b, slo)
    for side, name in zip(sides, ("first", "second"), strict=True):
        if len(side.samples) < _LEAST_REQUESTS:
            raise ConfigError(
                f"the {name} side has {len(side.samples)} answered requests, and {_LEAST_REQUESTS} are needed for an "
                "interval; measure longer"
            )
    ours, theirs = (side.statistics() for side in sides)
    keys = [key for key in ours if key in theirs]
    whole, drawn = [], []
    for index, (side, kinds) in enumerate(zip(sides, (ours, theirs), strict=True)):
        once = np.ones(len(side.samples), dtype=np.int64)
        whole.append([kinds[key](once) for key in keys])
        rows = [[kinds[key](counts) for key in keys] for counts in side.draws(resamples, SEED + index)]
        drawn.append(np.array(rows).T)
    figures = [
        _figure(key, [values[index] for values in whole], [values[index] for values in drawn])
        for index, key in enumerate(keys)
    ]
    return Comparison(
        confidence=CONFIDENCE,
        resamples=resamples,
        seed=SEED,
        requests=(len(sides[0].samples), len(sides[1].samples)),
        block=(sides[0].block, sides[1].block),
        warnings=[*_differences(a, b), *_short(sides)],
        figures=figures,
    )


def block_length(count: int, under_way: float) -> int:
    """Requests that are drawn together: twice those that run together, or the usual root; at least some blocks of them."""
    return max(1, min(math.ceil(max(2 * under_way, math.cbrt(count))), count // _LEAST_BLOCKS))


def _figure(key: tuple[str, str, Literal["more", "less"]], whole: Sequence[float], drawn: Sequence[Floats]) -> Figure:
    name, unit, better = key
    ratio = low = high = None
    usable = drawn[0] > 0
    if whole[0] > 0 and usable.mean() > CONFIDENCE:
        ratio = whole[1] / whole[0]
        ratios = drawn[1][usable] / drawn[0][usable]
        tail = (1 - CONFIDENCE) / 2
        low, high = (float(edge) for edge in np.quantile(ratios, (tail, 1 - tail)))
    return Figure(name=name, unit=unit, better=better, a=whole[0], b=whole[1], ratio=ratio, low=low, high=high)


def _end(sample: Sample) -> float:
    return sample.at + sample.e2e_ms / 1e3


def _rate(counts: Counts, values: Floats, times: Floats) -> float:
    below = float(counts @ times)
    return float(counts @ values) / below if below > 0 else 0.0


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
    lost = sum(report.failed for report in (*a, *b))
    if lost:
        found.append(f"{lost} requests failed, and times are of the others only")
    return found


def _short(sides: Sequence[_Side]) -> list[str]:
    found = []
    for side, name in zip(sides, ("first", "second"), strict=True):
        if len(side.samples) < 200:
            found.append(f"the {name} side has {len(side.samples)} requests: a p99 needs some hundred")
    return found
