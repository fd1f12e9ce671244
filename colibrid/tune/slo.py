"""Limits that a point has to keep: 'p99_itl_ms<30, kl<0.02'. Pure.

A limit names a figure of Quality (loss, kl, top1 …) or of Cost (tokens_per_s …); those that Cost has as a spread are
named with their quantile: p50_itl_ms, p99_ttft_ms.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
from typing import TYPE_CHECKING, Any

import msgspec

from colibrid.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from colibrid.tune.result import Cost, Quality, Task, Tried

MAX_LIMITS = 32
_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_LIMIT = re.compile(r"\s*([A-Za-z0-9_]+)\s*(<=|>=|<|>)\s*([^\s<>=]+)\s*")
_GENERATED = ("loss", "kl", "top1", "divergence", "same", "exact")
_QUALITY: Mapping[Task, tuple[str, ...]] = {
    "generate": _GENERATED,
    "score": ("loss", "kl", "top1"),
    "embed": ("cosine", "neighbours"),
}
_SPREADS: Mapping[Task, tuple[str, ...]] = {
    "generate": ("ttft_ms", "itl_ms", "e2e_ms"),
    "score": ("e2e_ms",),
    "embed": ("e2e_ms",),
}
_COST = ("tokens_per_s", "bytes_per_token", "distinct_experts", "experts_per_token")
_QUANTILES = ("p50", "p99")
_RISING = frozenset({"top1", "divergence", "same", "exact", "cosine", "neighbours", "tokens_per_s"})  # more is better


class Limit(msgspec.Struct, frozen=True):
    """One figure that must keep to one bound."""

    name: str
    sign: str
    bound: float

    def __str__(self) -> str:
        return f"{self.name}{self.sign}{self.bound:g}"

    def holds(self, value: float) -> bool:
        return _OPERATORS[self.sign](value, self.bound)

    def miss(self, value: float) -> str:
        """That this value is beyond it, in words."""
        return f"{self}: {self.name} is {value:.4g}"


def figures(task: Task) -> tuple[str, ...]:
    """Every name that a limit may have."""
    return (*_QUALITY[task], *(f"{part}_{name}" for name in _SPREADS[task] for part in _QUANTILES), *_COST)


def parse_slo(text: str, task: Task) -> tuple[Limit, ...]:
    """ConfigError names what is wrong, with the nearest name that there is."""
    return parse_limits(text, figures(task), "--slo")


def parse_limits(text: str, names: Sequence[str], option: str) -> tuple[Limit, ...]:
    """The same of any names."""
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _LIMIT.fullmatch(part)
        if match is None:
            raise ConfigError(
                f"{option}: {part!r} is no limit; write a figure, one of < <= > >=, and a number, as kl<0.02"
            )
        name, sign, number = match.groups()
        if name not in names:
            raise ConfigError(f"{option}: no figure {name!r}{_nearest(name, names)}")
        try:
            bound = float(number)
        except ValueError:
            bound = math.nan
        if not math.isfinite(bound):
            raise ConfigError(f"{option}: {name} must be compared with a number, without a unit (given: {number!r})")
        found.append(Limit(name, sign, bound))
    if not found:
        raise ConfigError(f"{option} {text!r}: no limit in it; write one as kl<0.02, several with commas between")
    if len(found) > MAX_LIMITS:
        raise ConfigError(f"{option}: {len(found)} limits, at most {MAX_LIMITS}; leave some out")
    return tuple(found)


def _nearest(name: str, names: Sequence[str]) -> str:
    inside = [known for known in names if name and name in known]  # itl_ms: which quantile?
    near = inside or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {' or '.join(near)}?" if near else f"; there are {', '.join(names)}"


def read_figure(name: str, quality: Quality, cost: Cost | None) -> float | None:
    """The figure of this name; None: not measured."""
    if name in _GENERATED or name in _QUALITY["embed"]:
        value = getattr(quality, name)
    elif cost is None:
        return None
    elif name in _COST:
        value = getattr(cost, name)
    else:
        part, _, spread_name = name.partition("_")
        spread: Any = getattr(cost, spread_name)
        value = None if spread is None else getattr(spread, part)
    return None if value is None else float(value)


def misses(limits: Sequence[Limit], tried: Tried) -> list[str]:
    """What is beyond a limit or was not measured, in words; nothing: all are kept."""
    found = []
    for limit in limits:
        value = read_figure(limit.name, tried.quality, tried.cost)
        if value is None:
            found.append(f"{limit}: not measured")
        elif not limit.holds(value):
            found.append(limit.miss(value))
    return found


def quality_misses(limits: Sequence[Limit], quality: Quality) -> list[str]:
    """The same of quality alone, where it was measured."""
    found = []
    for limit in limits:
        value = read_figure(limit.name, quality, None)
        if value is not None and not limit.holds(value):
            found.append(limit.miss(value))
    return found


def excess(limits: Sequence[Limit], tried: Tried) -> float:
    """How far a point is from keeping all of them: the sum of what each is beyond its bound, as a share of the bound."""
    total = 0.0
    for limit in limits:
        value = read_figure(limit.name, tried.quality, tried.cost)
        if value is None:
            return math.inf
        if not limit.holds(value):
            total += abs(value - limit.bound) / max(abs(limit.bound), 1e-9)
    return total


def rises(name: str) -> bool:
    """Whether more of this figure is better."""
    return name in _RISING
