"""Loads and reports of `colibrid bench http` without a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from colibrid.cli.bench_load import HttpLoad
from colibrid.cli.bench_result import Form, HttpReport, Outcome, Sample, summarise

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

FORM = Form(ids=True, ignore_eos=True, ask_usage=True)


def make_load(**changes: Any) -> HttpLoad:
    """Four prompts of 8 tokens, unless something else is asked for."""
    given: dict[str, Any] = {
        "url": "http://x", "clients": 1, "requests": 4, "seconds": None, "warmup": 0, "prompt_tokens": 8, "max_tokens": 2,
        "vocab_size": 9,
    }  # fmt: skip
    return HttpLoad(**(given | changes))


def make_report(samples: Sequence[Sample], elapsed: float = 10.0, **load: Any) -> HttpReport:
    """As of a run that saw these."""
    outcome = Outcome()
    outcome.samples = list(samples)
    outcome.elapsed_s = elapsed
    return summarise(make_load(**load), FORM, "m", outcome, "2026-01-02T03:04:05+00:00")


def run_of(source: random.Random, count: int, *, mean_ms: float = 100.0, together: int = 1, **load: Any) -> HttpReport:
    """Groups of `together` requests that begin together and share most of their time, as those of a batch do."""
    samples, at = [], 0.0
    for _ in range(count // together):
        shared = mean_ms * source.lognormvariate(0, 0.5)
        times = [shared * source.uniform(0.98, 1.02) for _ in range(together)]
        samples += [Sample(at=at, e2e_ms=time, ttft_ms=time / 2, tokens=6, gaps_ms=[time / 10] * 5) for time in times]
        at += max(times) / 1e3
    return make_report(samples, elapsed=at, **load)
