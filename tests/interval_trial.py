"""How often `bench compare` tells equal runs apart, and finds a difference: runs of a simulated server, no clock.

`python tests/interval_trial.py` prints the table of docs/LOAD.md.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter, deque
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from bench_runs import make_report

from colibrid.cli.bench_intervals import compare
from colibrid.cli.bench_result import HttpReport, Sample

if TYPE_CHECKING:
    from collections.abc import Iterator

_STEP_MS = 10.0
_MOST_TOKENS = 320


@dataclass(frozen=True)
class Server:
    """Computes a token of up to `slots` requests a step; the rest wait in order."""

    name: str
    clients: int = 0  # of a closed loop; 0: requests arrive at random
    share: float = 0.0  # of what the slots can do, that arrives
    slots: int = 8
    spread: float = 0.0  # sigma of the logarithm of the lengths
    drift: float = 0.0  # sigma of the machine's slowness, which is another one after some 40 steps
    stall: float = 0.0  # mean length in steps of a stall, of which one comes every 400 steps
    good: float = 5  # steps to the first token, at most, of a good request
    tail: float = 0.0  # exponent of the steps' Pareto distribution; 0: nearly even steps


SERVERS = (
    Server("8 clients in step", clients=8, good=9),
    Server("16 clients, 8 slots", clients=16, spread=0.8, good=22),
    Server("8 clients, machine drifts", clients=8, spread=0.5, drift=0.3),
    Server("1 client, heavy tail", clients=1, slots=1, spread=0.8, tail=2.5),
    Server("arrivals at half load", share=0.5, spread=0.8),
    Server("half load, rare stalls", share=0.5, spread=0.5, stall=40),
    Server("arrivals at 80 %", share=0.8, spread=1.0),
    Server("arrivals at 90 %", share=0.9, spread=0.5),
)


@dataclass(slots=True)
class _Request:
    at: float
    left: int
    times: list[float]


class _Run:
    """One run of a server."""

    def __init__(self, server: Server, count: int, seed: int) -> None:
        self._server, self._count = server, count
        self._random = random.Random(seed)
        self._sent = 0
        self._now = self._slow = 0.0
        each = 8 * math.exp(server.spread**2 / 2) / server.slots  # steps that a request costs, but for its prompt
        self._rate = server.share / (each + 1)
        self._waiting: deque[_Request] = deque(self._new(0.0) for _ in range(server.clients))
        self._due = self._random.expovariate(self._rate) if server.share else math.inf

    def samples(self, slower: float) -> Iterator[Sample]:
        """In order of their end, all times longer by `slower`."""
        active: list[_Request] = []
        unit = slower * _STEP_MS
        while self._waiting or active or self._sent < self._count:
            if not self._waiting and not active:
                self._now = max(self._now, self._due)
            self._arrive()
            fresh = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._server.slots - len(active)))]
            active += fresh
            self._now += self._step(len(fresh))
            for request in active:
                request.times.append(self._now)
                request.left -= 1
            for request in (request for request in active if not request.left):
                times = request.times
                yield Sample(
                    at=request.at * unit / 1e3,
                    e2e_ms=(times[-1] - request.at) * unit,
                    ttft_ms=(times[0] - request.at) * unit,
                    tokens=len(times),
                    gaps_ms=[(later - earlier) * unit for earlier, later in pairwise(times)],
                )
                if self._server.clients and self._sent < self._count:
                    self._waiting.append(self._new(self._now))
            active = [request for request in active if request.left]

    def _arrive(self) -> None:
        while self._due <= self._now and self._sent < self._count:
            self._waiting.append(self._new(self._due))
            self._due += self._random.expovariate(self._rate)

    def _new(self, at: float) -> _Request:
        self._sent += 1
        length = 8 * math.exp(self._random.gauss(0, self._server.spread))
        return _Request(at, min(max(1, round(length)), _MOST_TOKENS), [])

    def _step(self, prompts: int) -> float:
        server, source = self._server, self._random
        stays = math.exp(-1 / 40)
        self._slow = stays * self._slow + math.sqrt(1 - stays**2) * source.gauss(0, 1)
        time = (1 + prompts) * math.exp(0.1 * source.gauss(0, 1) + server.drift * self._slow)
        if server.tail:
            time *= source.paretovariate(server.tail)
        if server.stall and source.random() < 1 / 400:
            time += source.expovariate(1 / server.stall)
        return time


def run_on(server: Server, count: int, seed: int, *, slower: float = 1.0) -> HttpReport:
    """A report of `count` requests."""
    samples = list(_Run(server, count, seed).samples(slower))
    ends = [sample.at + sample.e2e_ms / 1e3 for sample in samples]
    return make_report(samples, elapsed=max(ends), slo=f"ttft_ms<{server.good * _STEP_MS:g}")


def verdicts(server: Server, count: int, pairs: int, *, slower: float = 1.0, seed: int = 0) -> dict[str, Counter[str]]:
    """Of each figure, how often the second runs, slower or equal to the first ones, were called what."""
    found: dict[str, Counter[str]] = {}
    for pair in range(pairs):
        first = run_on(server, count, seed + 2 * pair)
        second = run_on(server, count, seed + 2 * pair + 1, slower=slower)
        for figure in compare([first], [second]).figures:
            found.setdefault(figure.name, Counter())[figure.verdict] += 1
    return found


def told_apart(counts: Counter[str]) -> int:
    return counts["better"] + counts["worse"]


def decided(counts: Counter[str]) -> int:
    """Pairs with enough data."""
    return told_apart(counts) + counts["unclear"]


GROUPS = {
    "rates": ("requests/s", "tokens/s out"),
    "goodput": ("goodput",),
    **{part: tuple(f"{kind} {part}" for kind in ("TTFT", "TPOT", "ITL", "e2e")) for part in ("mean", "p50", "p90", "p99")},
}  # fmt: skip


def grouped(found: dict[str, Counter[str]]) -> dict[str, Counter[str]]:
    return {group: sum((found[name] for name in names), Counter()) for group, names in GROUPS.items()}


def _cell(counts: Counter[str], *, equal: bool) -> str:
    """Told apart of those with enough data, and those; or, of different runs, found of all."""
    if equal and not decided(counts):
        return "- (0)"
    share = told_apart(counts) / (decided(counts) if equal else counts.total())
    return f"{100 * share:.0f}" + (f" ({100 * decided(counts) / counts.total():.0f})" if equal else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--requests", type=int, nargs="+", default=[200, 1000, 5000])
    parser.add_argument("--slower", type=float, default=1.0)
    given = parser.parse_args()
    print(f"| | requests | {' | '.join(GROUPS)} |\n{'|---' * (2 + len(GROUPS))}|")  # noqa: T201  # what a script is for
    for server in SERVERS:
        for count in given.requests:
            found = grouped(verdicts(server, count, given.pairs, slower=given.slower))
            cells = " | ".join(_cell(counts, equal=given.slower == 1) for counts in found.values())
            print(f"| {server.name} | {count:,} | {cells} |", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
