"""Limits of single requests."""

from __future__ import annotations

from typing import Any

import pytest

from colibrid.cli.bench_result import Sample
from colibrid.cli.bench_slo import keeps, parse_slo
from colibrid.errors import ConfigError


def kept(slo: str, **changes: Any) -> bool:
    given: dict[str, Any] = {"at": 0.0, "e2e_ms": 100.0, "ttft_ms": 30.0, "tokens": 5, "gaps_ms": [10.0, 30.0]}
    sample = Sample(**(given | changes))
    return all(keeps(sample, limit) for limit in parse_slo(slo, stream=True))


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        ("ttft_ms<30.1, itl_ms<30.5,tpot_ms<11 ,e2e_ms < 101", True),
        ("ttft_ms<30", False),
        ("ttft_ms<=30", True),
        ("itl_ms<30", False),  # its longest wait
        ("tpot_ms<10", False),  # (10 + 30) / 4
        ("tpot_ms<=10", True),
        ("e2e_ms<100", False),
        ("ttft_ms<1000, e2e_ms<1", False),
    ],
)
def test_limits(slo: str, good: bool) -> None:
    """A request is good if it keeps all of them."""
    assert kept(slo) is good


def test_figures_that_a_request_does_not_have() -> None:
    """One token has no wait between tokens, which keeps every limit; an answer without a first token keeps none."""
    assert kept("itl_ms<1, tpot_ms<1, ttft_ms<31", tokens=1, gaps_ms=[])
    assert not kept("ttft_ms<1000", ttft_ms=None, gaps_ms=[])


@pytest.mark.parametrize(
    ("slo", "message"),
    [
        ("ttft_ms=3", "--slo.*'ttft_ms=3'"),
        ("", "--slo"),
        ("ttft_ms<3,itl<4", "itl_ms"),
        ("ttft_ms<fast", "ttft_ms"),
    ],
)
def test_mistakes_are_named(slo: str, message: str) -> None:
    """The part that is wrong is in the message, with the nearest name that there is."""
    with pytest.raises(ConfigError, match=message):
        parse_slo(slo, stream=True)


def test_whole_answers_have_no_times_of_tokens() -> None:
    """Without streams only the whole time can be limited."""
    assert parse_slo("e2e_ms<4", stream=False)
    with pytest.raises(ConfigError, match="leave --no-stream out"):
        parse_slo("e2e_ms<4, ttft_ms<3", stream=False)
