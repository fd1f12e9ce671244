"""The chosen point as a profile, with what was found of it as comments."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from colibrid.config.profile import PROFILE_VERSION
from colibrid.config.render import scalar
from colibrid.tune.files import replace_file
from colibrid.tune.points import most_per_token, point_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from colibrid.tune.points import Shape
    from colibrid.tune.result import Cost, Quality, Result, Tried

_WIDTH = 118


def profile_text(result: Result, shape: Shape) -> str:
    """The chosen point. There must be one."""
    assert result.chosen is not None, "nothing was chosen"
    tried = result.tried[result.chosen]
    lines = [*_evidence(result, tried), f"profile: {PROFILE_VERSION}", f"pack: {scalar(result.pack)}"]
    for section, keys in _settings(tried, shape).items():
        lines.append(f"{section}:")
        lines += [f"  {key}: {scalar(value)}" for key, value in keys.items()]
    return "\n".join(lines) + "\n"


def write_profile(result: Result, shape: Shape, path: Path) -> None:
    """In one step, so that nobody reads half a file. ConfigError: it cannot be written."""
    replace_file(path, profile_text(result, shape).encode())


def _settings(tried: Tried, shape: Shape) -> dict[str, dict[str, Any]]:
    point = tried.point
    experts: dict[str, Any] = {"per_token": point.per_token, "threshold": point.threshold}
    if (most := most_per_token([point], shape)) is not None:
        experts["max_per_token"] = most
    experts["max_tokens_per_expert"] = point.max_tokens_per_expert
    batch = {"window_ms": point.window_ms, "slots": point.slots}
    found = {"experts": experts, "batch": {key: value for key, value in batch.items() if value is not None}}
    return {section: keys for section, keys in found.items() if keys}


def _evidence(result: Result, tried: Tried) -> Iterator[str]:
    own = result.tried[0]
    says = [
        f"Chosen by colibrid tune {result.version}, {result.made}: {point_name(tried.point)}.",
        result.reason,
        f"Data: {result.data}, sha256 {result.data_sha256}, task {result.task}. Limits: {result.slo or 'none'}.",
        f"Measured on {result.machine}, {result.device}, model {result.model}.",
        f"Quality: {quality_words(tried.quality)}. The model's own setting: {quality_words(own.quality)}.",
    ]
    if tried.cost is not None:
        says.append(f"Cost: {cost_words(tried.cost)}.")
    if own.cost is not None and own is not tried:
        says.append(f"Cost of the model's own setting: {cost_words(own.cost)}.")
    for text in says:
        words = "".join(one if one.isprintable() else " " for one in text)  # a file's name may hold anything
        for line in textwrap.wrap(words, _WIDTH - 2, break_on_hyphens=False):
            yield f"# {line}"


def quality_words(quality: Quality) -> str:
    """The figures that were measured, with their names."""
    named = ("loss", "kl", "top1", "divergence", "same", "exact", "cosine", "neighbours")
    found = [f"{name} {value:.6g}" for name in named if (value := getattr(quality, name)) is not None]
    return ", ".join(found) + f", of {quality.tokens} tokens"


def cost_words(cost: Cost) -> str:
    """In short."""
    spreads = (("ttft", cost.ttft_ms), ("itl", cost.itl_ms), ("e2e", cost.e2e_ms))
    times = [f"{name} p50 {one.p50:.3g} ms p99 {one.p99:.3g} ms" for name, one in spreads if one is not None]
    return (
        f"{cost.tokens_per_s:.0f} tokens/s at {cost.concurrency} requests under way, {', '.join(times)}, "
        f"{cost.experts_per_token:.2f} experts a token, {cost.bytes_per_token:.0f} bytes a token"
    )
