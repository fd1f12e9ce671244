"""Limits that a request has to keep to count as good, as in `ttft_ms<200, itl_ms<30`. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from colibrid.errors import ConfigError
from colibrid.tune.slo import Limit, parse_limits

if TYPE_CHECKING:
    from colibrid.cli.bench_result import Sample

_STREAMED = ("ttft_ms", "tpot_ms", "itl_ms")
_NAMES = (*_STREAMED, "e2e_ms")


def parse_slo(text: str, *, stream: bool) -> tuple[Limit, ...]:
    """ConfigError: a name, an operator or a number is wrong, or whole answers cannot have that figure."""
    limits = parse_limits(text, _NAMES, "--slo")
    for limit in limits:
        if limit.name in _STREAMED and not stream:
            raise ConfigError(f"--slo {limit}: whole answers have no times of tokens; leave --no-stream out")
    return limits


def keeps(sample: Sample, limit: Limit) -> bool:
    """Of `itl_ms` every wait between two events has to keep it."""
    values: list[float]
    match limit.name:
        case "ttft_ms":
            if sample.ttft_ms is None:  # no answer comes without a first token
                return False
            values = [sample.ttft_ms]
        case "tpot_ms":
            values = [] if sample.tpot_ms is None else [sample.tpot_ms]
        case "itl_ms":
            values = sample.gaps_ms
        case _:
            values = [sample.e2e_ms]
    return all(map(limit.holds, values))
