"""Limits that a request has to keep to count as good, as in `ttft_ms<200, itl_ms<30`. Pure."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

import msgspec

from colibrid.errors import ConfigError

if TYPE_CHECKING:
    from colibrid.cli.bench_result import Sample

NAMES = {
    "ttft_ms": "until its first token",
    "tpot_ms": "a token after the first, on average",
    "itl_ms": "its longest wait between two events",
    "e2e_ms": "until its last token",
}
_STREAMED = NAMES.keys() - {"e2e_ms"}


class Limit(msgspec.Struct, frozen=True):
    """One figure of a request, and what it has to stay below."""

    name: str
    below: float
    inclusive: bool

    def kept(self, sample: Sample) -> bool:
        value = _figure(self.name, sample)
        if value is None:  # one event has no waits between events, and no answer comes without a first
            return self.name != "ttft_ms"
        return value <= self.below if self.inclusive else value < self.below


def parse_slo(text: str, *, stream: bool) -> tuple[Limit, ...]:
    """ConfigError: a name, an operator or a number is wrong, or whole answers cannot have that figure."""
    limits = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\w+)\s*(<=?)\s*(\d+(?:\.\d+)?)\s*", part)
        if found is None:
            raise ConfigError(f"--slo {part.strip()!r}: write limits like 'ttft_ms<200, itl_ms<30'")
        name = found[1]
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, 1, 0.0)[0]
            raise ConfigError(f"--slo: there is no figure {name!r}; did you mean {near}? There are {', '.join(NAMES)}")
        if name in _STREAMED and not stream:
            raise ConfigError(f"--slo {name}: whole answers have no times of tokens; leave --no-stream out")
        limits.append(Limit(name, float(found[3]), found[2] == "<="))
    return tuple(limits)


def _figure(name: str, sample: Sample) -> float | None:
    match name:
        case "ttft_ms":
            return sample.ttft_ms
        case "tpot_ms":
            return sample.tpot_ms
        case "itl_ms":
            return max(sample.gaps_ms, default=None)
    return sample.e2e_ms
