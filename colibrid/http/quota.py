"""What one key may use: requests and tokens a minute, tokens a day, requests at once, and how early it is served.

A request first pays for what it could use at most (its prompts and max_tokens of each choice); what it did not use is
given back when it ends. So a key's budget holds at every moment, whatever runs. Budgets live in memory: they begin anew
with the daemon, and outlive a reload of the keys.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, NamedTuple, Self

import msgspec

from colibrid.config.settings import KeyLimits
from colibrid.errors import RequestError
from colibrid.http.auth import limits_of
from colibrid.http.errors import RateLimitError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from colibrid.batch.request import GenerateRequest
    from colibrid.http.credentials import Key

_MINUTE_S = 60.0
_DAY_S = 86400.0
_BUSY_RETRY_S = 1.0  # when requests end is not known


class Level(NamedTuple):
    """A budget at a moment, as headers tell it."""

    limit: int
    remaining: int
    reset_s: float  # until all of it is there again


class Bucket:
    """A budget that fills up steadily; full, it holds what one period gives."""

    def __init__(self, limit: int, period_s: float, now: float) -> None:
        self.limit = limit
        self._period_s = period_s
        self._left = float(limit)
        self._at = now

    def resize(self, limit: int) -> None:
        """Another limit from now on; what has been used stays used."""
        self._left += limit - self.limit
        self.limit = limit

    def wait_s(self, amount: int, now: float) -> float:
        """Until `amount` is there; 0 if it is."""
        self._fill(now)
        return max(0.0, (amount - self._left) * self._period_s / self.limit)

    def take(self, amount: int) -> None:
        """Use `amount`, which may be less than nothing: what is given back."""
        self._left = min(self._left - amount, float(self.limit))

    def level(self, now: float) -> Level:
        self._fill(now)
        return Level(self.limit, max(0, int(self._left)), (self.limit - self._left) * self._period_s / self.limit)

    def _fill(self, now: float) -> None:
        self._left = min(self._left + (now - self._at) * self.limit / self._period_s, float(self.limit))
        self._at = now


class Window:
    """A budget that is there again, as a whole, a period after it was first used."""

    def __init__(self, limit: int, period_s: float) -> None:
        self.limit = limit
        self._period_s = period_s
        self._used = 0
        self.until = 0.0  # end of the period

    def resize(self, limit: int) -> None:
        """Another limit from now on; what has been used stays used."""
        self.limit = limit

    def wait_s(self, amount: int, now: float) -> float:
        """Until `amount` is there; 0 if it is."""
        if now >= self.until:
            self._used, self.until = 0, now + self._period_s
        return 0.0 if self._used + amount <= self.limit else self.until - now

    def take(self, amount: int) -> None:
        """Use `amount`."""
        self._used += amount

    def give_back(self, amount: int, until: float) -> None:
        """What was taken and not used, in the period that ended or ends at `until`; a later one never had it."""
        if until == self.until:
            self._used = max(0, self._used - amount)

    def level(self, now: float) -> Level:
        self.wait_s(0, now)
        return Level(self.limit, max(0, self.limit - self._used), self.until - now)


class Meter:
    """Owner of one key's budgets."""

    def __init__(self, limits: KeyLimits, clock: Callable[[], float]) -> None:
        self.limits = KeyLimits()
        self.running = 0
        self._clock = clock
        self._requests: Bucket | None = None
        self._minute: Bucket | None = None
        self._day: Window | None = None
        self.set_limits(limits)

    def set_limits(self, limits: KeyLimits) -> None:
        """Those of a key that was read anew."""
        if limits == self.limits:
            return
        self.limits = limits
        self._requests = self._bucket(self._requests, limits.requests_per_minute)
        self._minute = self._bucket(self._minute, limits.tokens_per_minute)
        if limits.tokens_per_day is None:
            self._day = None
        elif self._day is None:
            self._day = Window(limits.tokens_per_day, _DAY_S)
        else:
            self._day.resize(limits.tokens_per_day)

    def _bucket(self, old: Bucket | None, limit: int | None) -> Bucket | None:
        if limit is None:
            return None
        if old is None:
            return Bucket(limit, _MINUTE_S, self._clock())
        old.resize(limit)
        return old

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """One request, from its head to the end of its answer. RateLimitError if the key may not send it now."""
        most = self.limits.requests_at_once
        if most is not None and self.running >= most:
            raise RateLimitError(
                f"{self.running} requests of this key are under way, and it may have {most} at once; wait for one.",
                retry_after_s=_BUSY_RETRY_S,
            )
        if self._requests is not None:
            wait_s = self._requests.wait_s(1, self._clock())
            if wait_s > 0:
                raise RateLimitError(
                    f"This key may send {self._requests.limit} requests a minute; try again in {wait_s:.1f} s.",
                    retry_after_s=wait_s,
                )
            self._requests.take(1)
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def pay(self, tokens: int) -> float:
        """Charge `tokens`; the result is for give_back. RateLimitError if they are not there now, RequestError if they never can be."""
        now = self._clock()
        budgets = [("minute", self._minute), ("day", self._day)]
        for name, budget in budgets:
            if budget is not None and tokens > budget.limit:
                raise RequestError(
                    f"Prompt and max_tokens are {tokens} tokens together, and this key has {budget.limit} a {name};"
                    " shorten the prompt or lower max_tokens.",
                    param="max_tokens",
                    code="rate_limit_exceeded",
                )
            wait_s = 0.0 if budget is None else budget.wait_s(tokens, now)
            if budget is not None and wait_s > 0:
                raise RateLimitError(
                    f"This key may use {budget.limit} tokens a {name}, and {budget.level(now).remaining} are left;"
                    f" this request could use {tokens}. Try again in {wait_s:.1f} s, or lower max_tokens.",
                    retry_after_s=wait_s,
                )
        for _, budget in budgets:
            if budget is not None:
                budget.take(tokens)
        return 0.0 if self._day is None else self._day.until

    def give_back(self, tokens: int, paid: float) -> None:
        """What was paid for and not used; `paid`: what pay has returned."""
        if self._minute is not None:
            self._minute.take(-tokens)
        if self._day is not None:
            self._day.give_back(tokens, paid)

    def levels(self) -> tuple[Level | None, Level | None]:
        """Of requests, and of tokens: of the budget that has less."""
        now = self._clock()
        tokens = [budget.level(now) for budget in (self._minute, self._day) if budget is not None]
        return (
            None if self._requests is None else self._requests.level(now),
            min(tokens, key=lambda level: level.remaining, default=None),
        )


class Meters:
    """Owner of all keys' meters; as many as there are keys."""

    def __init__(self, general: KeyLimits, clock: Callable[[], float] = time.monotonic) -> None:
        """`general`: of keys that say nothing of their own."""
        self._general = general
        self._clock = clock
        self._meters: dict[str, Meter] = {}

    def of(self, key: Key) -> Meter:
        """The meter of a key, by its id: a key that replaces another goes on with its budgets."""
        limits = limits_of(key, self._general)
        meter = self._meters.get(key.id)
        if meter is None:
            meter = self._meters[key.id] = Meter(limits, self._clock)
        meter.set_limits(limits)
        return meter

    def renew(self, keys: Iterable[Key], general: KeyLimits) -> None:
        """Keys and general limits were read anew: forget the meters of those that are gone."""
        self._general = general
        ids = {key.id for key in keys}
        self._meters = {name: meter for name, meter in self._meters.items() if name in ids}


class Spending:
    """One request's tokens: paid in advance, settled at its end. Use as a context manager."""

    def __init__(self, meter: Meter | None, requests: Sequence[GenerateRequest]) -> None:
        """Raises as Meter.pay; nothing is counted without a meter."""
        self.used = 0
        self._paid = sum(len(one.prompt_ids) + one.n * one.max_tokens for one in requests)
        self._meter = meter
        self._until = 0.0 if meter is None else meter.pay(self._paid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._meter is not None:
            self._meter.give_back(self._paid - self.used, self._until)


def served_as(meter: Meter | None, requests: Sequence[GenerateRequest], tenant: str) -> list[GenerateRequest]:
    """The requests with whose they are and how early the key lets them be served.

    Priority 0, which is also that of requests that name none, becomes the best that the key has, if that is higher.
    RequestError for another number below it.
    """
    least = None if meter is None else meter.limits.priority
    found = []
    for one in requests:
        priority = one.priority
        if least is not None and priority < least:
            if priority != 0:
                raise RequestError(
                    f"priority = {priority} is below {least}, the lowest of this key; send {least} or more.",
                    param="priority",
                    code="invalid_value",
                )
            priority = least
        found.append(msgspec.structs.replace(one, tenant=tenant, priority=priority))
    return found


def limit_headers(meter: Meter) -> Iterator[tuple[str, str]]:
    """x-ratelimit-* as OpenAI's servers send them; none where the key has no such limit."""
    for name, level in zip(("requests", "tokens"), meter.levels(), strict=True):
        if level is not None:
            yield f"x-ratelimit-limit-{name}", str(level.limit)
            yield f"x-ratelimit-remaining-{name}", str(level.remaining)
            yield f"x-ratelimit-reset-{name}", _duration(level.reset_s)


def _duration(seconds: float) -> str:
    """As 6m0s, 1.5s or 17ms."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds, 1), 60)
    hours, minutes = divmod(int(minutes), 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{rest:g}s"
