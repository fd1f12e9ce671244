"""What `colibrid bench http` saw: every request, and the numbers that sum them up. Pure."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from colibrid import __version__
from colibrid.cli.bench_load import HttpLoad
from colibrid.cli.bench_slo import keeps, parse_slo
from colibrid.errors import ConfigError
from colibrid.paths import read_bounded
from colibrid.report.percentiles import Spread, spread

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

FORMAT = 1
MOST_PROBLEMS = 5  # that a report tells
_MAX_REPORT_BYTES = 512 << 20


# Of a file that is read: what no run could have seen is refused.
_Time = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """How requests are written so that the server takes them."""

    ids: bool  # prompts are token ids, else words
    ignore_eos: bool
    ask_usage: bool  # stream_options.include_usage
    words_per_token: float = 1.0  # of prompts that are words


class Sample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request that was answered whole. Times are from when it was to be sent, which in an open loop is its arrival."""

    at: _Time  # seconds from the beginning of the load
    e2e_ms: _Time
    late_ms: float = 0.0  # how long after `at` it was sent: what the generator itself, or its limit, held back
    ttft_ms: _Time | None = None  # None: not a stream, or a stream without text
    tokens: _Tokens | None = None  # None: the server does not say, and it is not a stream
    prompt_tokens: _Tokens | None = None  # None: the server does not say
    gaps_ms: list[_Time] = []  # between the events that brought text

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first."""
        if self.tokens is None or self.tokens < 2 or self.ttft_ms is None:
            return None
        return math.fsum(self.gaps_ms) / (self.tokens - 1)


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that kept all limits."""

    slo: str
    good: int
    share: float  # of those that were to be answered
    requests_per_s: float


class CutShort(msgspec.Struct, frozen=True, kw_only=True):
    """A run that somebody interrupted."""

    after_s: _Time  # from the beginning of the load
    under_way: int  # requests that were then, and are not in the report


class HttpReport(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run. Times only of requests that were answered whole."""

    format: int = FORMAT
    version: str = __version__
    made: str  # ISO date and time, UTC
    load: HttpLoad  # without the key
    form: Form
    model: str
    elapsed_s: _Time  # from the beginning of the load to the last answer
    ok: int
    refused: int  # 503 or 429 with Retry-After; a closed loop sends another request then, an open one does not
    failed: int
    problems: list[str]  # the first different ones
    in_flight: int  # at most
    requests_per_s: float
    output_tokens_per_s: float
    tokens_per_request: float
    prompt_tokens_per_request: float | None  # as the server counts
    tokens_from: Literal["usage", "events"]  # events: of a server that does not say usage, one token an event
    e2e_ms: Spread | None  # None: nothing was answered, or the number is of streams only
    ttft_ms: Spread | None
    tpot_ms: Spread | None  # of each request: (last - first event) / (tokens - 1)
    itl_ms: Spread | None  # between events of all requests; one may hold several tokens
    late_ms: Spread | None  # None: a closed loop has no times to keep
    goodput: Goodput | None
    cut_short: CutShort | None = None
    samples: list[Sample]  # in order of their end


class Outcome:
    """Counts up while a load runs."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.refused = 0
        self.failed = 0
        self.counted_events = False
        self.in_flight = 0
        self.most_in_flight = 0
        self.elapsed_s = 0.0
        self.cancelled = 0
        self.cut_short: CutShort | None = None
        self._problems: Counter[str] = Counter()

    @property
    def problems(self) -> list[str]:
        """The first different ones, and how often each was seen."""
        return [text if count == 1 else f"{text} ({count} times)" for text, count in self._problems.items()]

    def fail(self, problem: str) -> None:
        self.failed += 1
        if problem in self._problems or len(self._problems) < MOST_PROBLEMS:
            self._problems[problem] += 1

    def begin(self) -> None:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)

    def end(self) -> None:
        self.in_flight -= 1


def summarise(load: HttpLoad, form: Form, model: str, outcome: Outcome, made: str) -> HttpReport:
    """The numbers of a run that is over."""
    samples, elapsed = outcome.samples, outcome.elapsed_s
    ok = len(samples)
    tokens = sum(sample.tokens or 0 for sample in samples)
    prompts = [sample.prompt_tokens for sample in samples if sample.prompt_tokens is not None]
    return HttpReport(
        made=made,
        load=msgspec.structs.replace(load, api_key=None),
        form=form,
        model=model,
        elapsed_s=elapsed,
        ok=ok,
        refused=outcome.refused,
        failed=outcome.failed,
        problems=outcome.problems,
        in_flight=outcome.most_in_flight,
        requests_per_s=ok / elapsed if elapsed else 0.0,
        output_tokens_per_s=tokens / elapsed if elapsed else 0.0,
        tokens_per_request=tokens / ok if ok else 0.0,
        prompt_tokens_per_request=sum(prompts) / len(prompts) if prompts else None,
        tokens_from="events" if outcome.counted_events else "usage",
        e2e_ms=spread([sample.e2e_ms for sample in samples]),
        ttft_ms=_spread(sample.ttft_ms for sample in samples),
        tpot_ms=_spread(sample.tpot_ms for sample in samples),
        itl_ms=spread([gap for sample in samples for gap in sample.gaps_ms]),
        late_ms=spread([sample.late_ms for sample in samples]) if load.open else None,
        goodput=_goodput(load, outcome) if load.slo is not None else None,
        cut_short=outcome.cut_short,
        samples=samples,
    )


def good_ones(samples: Sequence[Sample], slo: str, *, stream: bool) -> list[bool]:
    """Of each request, whether it kept all limits."""
    limits = parse_slo(slo, stream=stream)
    return [all(keeps(sample, limit) for limit in limits) for sample in samples]


def read_report(path: Path) -> HttpReport:
    """ConfigError: no report, or one of another version."""
    data = read_bounded(path, _MAX_REPORT_BYTES, str(path), "give a report of `bench http`")
    try:
        report = msgspec.json.decode(data, type=HttpReport)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"{path} is no report of `bench http` ({error}); make one with --out or --json") from None
    if report.format != FORMAT:
        raise ConfigError(f"{path} is of format {report.format}, and this is {FORMAT}; make it again with this version")
    return report


def _spread(values: Iterable[float | None]) -> Spread | None:
    return spread([value for value in values if value is not None])


def _goodput(load: HttpLoad, outcome: Outcome) -> Goodput:
    assert load.slo is not None, "a limit"
    good = sum(good_ones(outcome.samples, load.slo, stream=load.stream))
    # What a closed loop is refused it sends again.
    asked = len(outcome.samples) + outcome.failed + (outcome.refused if load.open else 0)
    elapsed = outcome.elapsed_s
    return Goodput(
        slo=load.slo,
        good=good,
        share=good / asked if asked else 0.0,
        requests_per_s=good / elapsed if elapsed else 0.0,
    )
