"""Counts and times that answers report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from colibrid.batch.request import ExpertUsage
    from colibrid.http.run import Outcome

LOGGED_EXPERTS = ("per_token", "assignments", "trimmed", "dropped")  # of usage.experts


def usage_of(outcomes: Sequence[Outcome], *, moe: bool, profile: str | None) -> dict[str, Any]:
    """`usage` of all choices of one request together. profile: that it named."""
    prompt = sum(outcome.prompt_tokens for outcome in outcomes)
    completion = sum(outcome.completion_tokens for outcome in outcomes)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(outcome.cached_tokens for outcome in outcomes)},
        "completion_tokens_details": {"reasoning_tokens": sum(outcome.reasoning_tokens for outcome in outcomes)},
    }
    experts = [outcome.experts for outcome in outcomes if outcome.experts is not None]
    if moe and len(experts) == len(outcomes):
        usage["experts"] = expert_usage(experts, profile)
    return usage


def expert_usage(experts: Sequence[ExpertUsage], profile: str | None) -> dict[str, Any]:
    """`usage.experts` of all sequences of one request together. profile: that it named."""
    found: dict[str, Any] = {
        "per_token": max(entry.per_token for entry in experts),
        "assignments": sum(entry.assignments for entry in experts),
        "trimmed": sum(entry.trimmed for entry in experts),
        "dropped": sum(entry.dropped for entry in experts),
    }
    if profile is not None:
        found["profile"] = profile
    if any(entry.batch_dependent for entry in experts):
        found["batch_dependent"] = True
    if any(entry.weights_generation or entry.switches for entry in experts):
        found["weights_generation"] = min(entry.weights_generation for entry in experts)
        found["switches"] = [
            {"choice": choice, **switch._asdict()} for choice, entry in enumerate(experts) for switch in entry.switches
        ]
    return found


def named(profile: str | None) -> dict[str, str]:
    """For the log line: the profile that a request named."""
    return {} if profile is None else {"profile": profile}


def times(timed: Sequence[tuple[float, float, float]]) -> dict[str, float]:
    """For the log line, from (queue, prefill, decode) of each sequence: the longest wait, and when the first token came."""
    if not timed:
        return {}
    return {
        "queue_ms": round(max(queue for queue, _, _ in timed), 1),
        "ttft_ms": round(min(queue + prefill for queue, prefill, _ in timed), 1),
    }


def server_timing(outcomes: Sequence[Outcome]) -> str | None:
    """The Server-Timing header: the longest of each phase, in milliseconds."""
    return timing_header([outcome.timing_ms for outcome in outcomes if outcome.timing_ms is not None])


def timing_header(timed: Sequence[tuple[float, float, float]]) -> str | None:
    """The same of (queue, prefill, decode) of each sequence."""
    if not timed:
        return None
    longest = [max(column) for column in zip(*timed, strict=True)]
    names = ("queue", "prefill", "decode")
    return ", ".join(f"{name};dur={value:.1f}" for name, value in zip(names, longest, strict=True))
