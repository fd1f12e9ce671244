"""What `colibrid bench http` sends and when: lengths, arrivals, traces. Everything drawn repeats with its seed."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import re
from codecs import BOM_UTF8
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from colibrid.config.values import shorten
from colibrid.errors import ConfigError
from colibrid.paths import read_bounded

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_PROMPT = 1 << 20
_MAX_TRACE_BYTES = 256 << 20
_WHOLE = "[0-9]{1,18}"
_LATEST = 1e6  # seconds, of a trace
_BELOW_ONE = 1 - 2**-53
_LENGTHS = "a number, uniform:LOW-HIGH, or lognormal:MEDIAN,SIGMA[,MOST]"


class Uniform(msgspec.Struct, frozen=True, tag="uniform", tag_field="kind"):
    """Every whole number from `low` to `high` equally often."""

    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.low} to {self.high}"


class Lognormal(msgspec.Struct, frozen=True, tag="lognormal", tag_field="kind"):
    """The logarithm is normal with deviation `sigma`; cut off at `most`, not heaped up there."""

    median: float
    sigma: float
    most: int

    def __str__(self) -> str:
        return f"about {self.median:g} (lognormal, sigma {self.sigma:g}, at most {self.most})"


Lengths = int | Uniform | Lognormal


def parse_lengths(option: str, text: str, most: int = MAX_PROMPT) -> Lengths:
    """`128`, `uniform:16-512`, `lognormal:128,0.8` or `lognormal:128,0.8,2048`. ConfigError."""
    if re.fullmatch(_WHOLE, text) and 1 <= int(text) <= most:
        return int(text)
    if found := re.fullmatch(f"uniform:({_WHOLE})-({_WHOLE})", text):
        low, high = int(found[1]), int(found[2])
        if 1 <= low <= high <= most:
            return Uniform(low, high)
    if found := re.fullmatch(r"lognormal:([\d.]+),([\d.]+)(?:,([0-9]{1,18}))?", text):
        try:
            median, sigma, limit = float(found[1]), float(found[2]), int(found[3] or most)
        except ValueError:
            median, sigma, limit = 0.0, 0.0, 0
        if 1 <= median <= limit <= most and 0 < sigma <= 10:
            return Lognormal(median, sigma, limit)
    raise ConfigError(
        f"{option} {shorten(text)}: write {_LENGTHS}, in whole tokens from 1 to {most}, LOW <= HIGH, MEDIAN <= MOST, SIGMA to 10"
    )


def draw(lengths: Lengths, source: random.Random) -> int:
    """One length."""
    if isinstance(lengths, int):
        return lengths
    if isinstance(lengths, Uniform):
        return source.randint(lengths.low, lengths.high)
    normal = NormalDist(math.log(lengths.median), lengths.sigma)
    share = (1 - source.random()) * normal.cdf(math.log(lengths.most + 0.5))
    return min(max(1, round(math.exp(normal.inv_cdf(min(share, _BELOW_ONE))))), lengths.most)


class TraceName(msgspec.Struct, frozen=True):
    """Which trace a report is of."""

    file: str
    sha256: str
    lines: int
    timed: bool


class HttpLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What is sent. At most one of `requests` and `seconds` ends it; a timed trace ends by itself."""

    url: str
    clients: int  # of a closed loop, and of every warm-up
    requests: int | None
    seconds: float | None
    warmup: int
    prompt_tokens: Lengths
    max_tokens: Lengths
    vocab_size: int
    rate: float | None = None  # arrivals a second: an open loop
    arrivals: Literal["poisson", "fixed"] = "poisson"
    max_in_flight: int = 1024  # of an open loop; later arrivals wait, and their wait is counted
    trace: TraceName | None = None
    slo: str | None = None
    prompt_form: Literal["auto", "ids", "text"] = "auto"
    chat: bool = False
    seed: int = 0
    stream: bool = True
    ignore_eos: bool = True
    model: str | None = None
    fields: dict[str, Any] = msgspec.field(default_factory=dict)
    api_key: str | None = None
    timeout: float = 120.0

    @property
    def open(self) -> bool:
        """Whether requests come at their own times, whatever the answers do."""
        return self.rate is not None or (self.trace is not None and self.trace.timed)


class TraceLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request of a trace. `at`: seconds from its beginning."""

    at: float | None = None
    prompt_tokens: int | None = None
    prompt: str | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    name: TraceName
    lines: tuple[TraceLine, ...]


_LINE = msgspec.json.Decoder(TraceLine)


def read_trace(path: Path) -> Trace:
    """ConfigError with the number of the line."""
    data = read_bounded(path, _MAX_TRACE_BYTES, f"--trace {path}", "give another file, or a part of it")
    lines: list[TraceLine] = []
    for number, text in enumerate(data.removeprefix(BOM_UTF8).splitlines(), start=1):
        if text.strip():
            try:
                lines.append(_checked(text, lines))
            except (ValueError, RecursionError) as error:
                raise ConfigError(
                    f"--trace {path}, line {number}: {error}; write lines like "
                    '{"at": 0.5, "prompt_tokens": 128, "max_tokens": 64}, or with "prompt" for a text'
                ) from None
    if not lines:
        raise ConfigError(f"--trace {path} has no lines; write one request a line")
    name = TraceName(path.name, hashlib.sha256(data).hexdigest(), len(lines), lines[0].at is not None)
    return Trace(name, tuple(lines))


def _checked(text: bytes, before: list[TraceLine]) -> TraceLine:
    """ValueError says what is wrong with it."""
    line = _LINE.decode(text)
    if (line.prompt is None) == (line.prompt_tokens is None):
        raise ValueError("one of prompt and prompt_tokens is needed")
    for name, value in (("prompt_tokens", line.prompt_tokens), ("max_tokens", line.max_tokens)):
        if value is not None and not 1 <= value <= MAX_PROMPT:
            raise ValueError(f"{name} is {value}, and may be 1 to {MAX_PROMPT}")
    if line.at is not None and not 0 <= line.at <= _LATEST:
        raise ValueError(f"at is {line.at:g}, and is seconds from the beginning, 0 to {_LATEST:g}")
    if before and (before[-1].at is None) != (line.at is None):
        raise ValueError("either all lines have at, or none")
    if before and before[-1].at is not None and line.at is not None and line.at < before[-1].at:
        raise ValueError(f"at is {line.at}, before that of the line above, {before[-1].at}; sort the file")
    return line


@dataclass(frozen=True, slots=True)
class Planned:
    """One request to come. `prompt`: its text, if the trace has one."""

    prompt_tokens: int
    prompt: str | None
    max_tokens: int


def plan(load: HttpLoad, trace: Trace | None, seed: int) -> Iterator[Planned]:
    """Requests without end: drawn, or those of the trace again and again."""
    source = random.Random(f"lengths {seed}")  # noqa: S311 (repeatable, no secret)
    if trace is None:
        while True:
            yield Planned(draw(load.prompt_tokens, source), None, draw(load.max_tokens, source))
    for line in itertools.cycle(trace.lines):
        yield Planned(line.prompt_tokens or 0, line.prompt, line.max_tokens or draw(load.max_tokens, source))


def arrivals(load: HttpLoad, trace: Trace | None) -> Iterator[float]:
    """Seconds from the beginning at which the requests of an open loop are to be sent."""
    times = _times(load, trace)
    if load.requests is not None:
        times = itertools.islice(times, load.requests)
    if load.seconds is not None:
        end = load.seconds
        times = itertools.takewhile(lambda at: at < end, times)
    return times


def _times(load: HttpLoad, trace: Trace | None) -> Iterator[float]:
    if trace is not None and trace.name.timed:
        yield from (line.at or 0.0 for line in trace.lines)
        return
    assert load.rate is not None, "an open loop"
    source = random.Random(f"arrivals {load.seed}")  # noqa: S311 (repeatable, no secret)
    at = 0.0
    while True:
        if load.arrivals == "poisson":
            at += source.expovariate(load.rate)
        yield at
        if load.arrivals == "fixed":
            at += 1 / load.rate
