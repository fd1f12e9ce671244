"""What one scheduler has seen of its requests, as plain numbers: counted here, shown by http/metrics.

Each has a fixed number of places, whatever requests hold. Lives on the scheduler's event loop.
"""

from __future__ import annotations

import bisect
import operator
from array import array
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from colibrid.batch.request import GenerateResult

Ending = Literal["stop", "length", "abort", "error"]

SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
LONG_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
_COUNT_BITS = 32  # of a count in a result block


class Histogram:
    """How many values lie at or below each bound, as Prometheus counts them, but not summed up yet."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """Bounds: rising."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)  # the last: above all bounds
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """`value` was seen `times`."""
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.sum += value * times


class LayerLoad(NamedTuple):
    """What the experts of one layer have done."""

    layer: int
    assignments: array[int]  # of each expert

    @property
    def imbalance(self) -> float:
        """The most loaded expert against the mean; 1: all alike, or nothing was done."""
        total = sum(self.assignments)
        return max(self.assignments) * len(self.assignments) / total if total else 1.0

    @property
    def unused(self) -> int:
        """Experts that have done nothing."""
        return self.assignments.count(0)


class ExpertLoad:
    """Assignments by layer and expert, summed over requests.

    Blocks of counts are added as two large numbers: a count is at most the tokens of a request, so that many fit into 32
    bits before one could carry into the next. Only then, and when somebody looks, they are taken apart.
    """

    def __init__(self, layer_sizes: Sequence[int], row: int, max_seq_len: int) -> None:
        """layer_sizes: experts of each layer, 0 = dense; row: counts of a layer in a block."""
        assert row >= max(layer_sizes, default=0), "a row holds all experts of its layer"
        self._sizes = tuple(layer_sizes)
        self._row = row
        self._most = ((1 << _COUNT_BITS) - 1) // max(max_seq_len, 1)  # blocks that may be pending
        self._pending = 0
        self._blocks = 0
        self._totals = array("Q", bytes(8 * row * len(layer_sizes)))

    def add(self, block: bytes | memoryview) -> None:
        """The counts of one request: 32 bits of this machine each, layers x row."""
        self._pending += int.from_bytes(block, "little")  # this machine is little-endian, as the engine demands
        self._blocks += 1
        if self._blocks >= self._most:
            self._settle()

    def layers(self) -> list[LayerLoad]:
        """Of each layer that has experts."""
        self._settle()
        starts = ((layer, layer * self._row, size) for layer, size in enumerate(self._sizes) if size)
        return [LayerLoad(layer, self._totals[start : start + size]) for layer, start, size in starts]

    def _settle(self) -> None:
        if self._blocks:
            counts = array("I", self._pending.to_bytes(4 * len(self._totals), "little"))
            self._totals = array("Q", map(operator.add, self._totals, counts))
            self._pending = self._blocks = 0


class Measures:
    """See the module's docstring."""

    def __init__(self, load: ExpertLoad) -> None:
        self.load = load
        self.first_token_s = Histogram(LONG_S)
        self.between_tokens_s = Histogram(SHORT_S)
        self.whole_s = Histogram(LONG_S)
        self.queue_s = Histogram(LONG_S)
        self.prefill_s = Histogram(LONG_S)
        self.decode_s = Histogram(LONG_S)
        self.prompt_sizes = Histogram(TOKENS)
        self.output_sizes = Histogram(TOKENS)
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.endings: dict[Ending, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}

    def prompt(self, tokens: int, cached: int) -> None:
        """A prompt is complete; each once, however many choices it has."""
        self.prompt_tokens += tokens
        self.cached_tokens += cached

    def finished(self, result: GenerateResult) -> None:
        """A request has ended normally."""
        self.endings[result.finish_reason] += 1
        self.queue_s.add(result.queue_ms / 1000)
        self.prefill_s.add(result.prefill_ms / 1000)
        self.decode_s.add(result.decode_ms / 1000)
        self.whole_s.add((result.queue_ms + result.prefill_ms + result.decode_ms) / 1000)
        self.prompt_sizes.add(result.prompt_tokens)
        self.output_sizes.add(result.completion_tokens)


class Receiver(Protocol):
    """A request, as far as times between its tokens go."""

    last_token: float  # when it got its last token, on time.monotonic; 0: none yet


class Gaps:
    """Counts tokens, and times between those of a request, of one turn of the event loop at a time.

    Requests that share a step share their times too, so a token costs a sum, and a turn a search for each time that is
    different.
    """

    def __init__(self, measures: Measures) -> None:
        self._measures = measures
        self._since: dict[float, int] = {}
        self._now = 0.0

    def begin_turn(self, now: float) -> None:
        """`now`: on time.monotonic."""
        self._now = now

    def token(self, receiver: Receiver) -> None:
        """A request has got a token in this turn."""
        self._measures.output_tokens += 1
        before = receiver.last_token
        if before != self._now:
            receiver.last_token = self._now
            if before:
                self._since[before] = self._since.get(before, 0) + 1

    def end_turn(self) -> None:
        """There are no more tokens in this turn."""
        for before, times in self._since.items():
            self._measures.between_tokens_s.add(self._now - before, times)
        self._since.clear()
