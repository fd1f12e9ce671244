"""What `colibrid tune` found, as it is kept in result.json and drawn in the report.

A point is one setting that was tried. Its quality is deterministic: the same pack, data and point give the same numbers to
the last digit. Its cost is measured with a clock.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FORMAT = 1  # of result.json

Task = Literal["generate", "embed", "score"]


class Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Unknown fields are refused: the file is of another version, or was edited."""


class Point(Struct, frozen=True, kw_only=True):
    """One setting. None: the model's own, or the default."""

    per_token: int | tuple[int, ...] | None = None  # experts a token; one number for each layer (0: a dense layer)
    threshold: float = 0.0
    max_tokens_per_expert: int | None = None
    window_ms: float | None = None
    slots: int | None = None


class Quality(Struct, frozen=True, kw_only=True):
    """Against the model's own setting, which has KL 0 and agreement 1. None: the data or the task has no such figure."""

    tokens: int  # positions that loss is a mean over
    loss: float | None = None  # mean negative log-likelihood of a token of the data, natural logarithm
    kl: float | None = None  # of the own setting from this one, mean over positions, whole vocabulary, nats
    kl_tokens: int = 0  # positions that kl is a mean over
    top1: float | None = None  # share of positions with the same likeliest token
    divergence: float | None = None  # mean output position where greedy answers part; equal ones count their length
    same: float | None = None  # share of greedy answers that are equal
    exact: float | None = None  # share of greedy answers equal to the data's
    cosine: float | None = None  # of embeddings with those of the own setting, mean
    neighbours: float | None = None  # share of the 10 nearest neighbours that stay


class Spread(Struct, frozen=True, kw_only=True):
    """Milliseconds."""

    p50: float
    p99: float


class Cost(Struct, frozen=True, kw_only=True):
    """At `concurrency` requests under way."""

    concurrency: int
    requests: int
    seconds: float
    tokens_per_s: float  # output tokens; prompt tokens where there is no output
    ttft_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread
    bytes_per_token: float  # weights that a decode step at this concurrency reads, divided by its rows
    distinct_experts: float  # a layer and decode step, mean
    experts_per_token: float  # a MoE layer, mean, after threshold and limits


class Tried(Struct, frozen=True, kw_only=True):
    """A point and what it gave. `hopeless`: why it was stopped early."""

    point: Point
    quality: Quality
    cost: Cost | None = None
    hopeless: str | None = None


class LayerStats(Struct, frozen=True, kw_only=True):
    """One MoE layer under the model's own setting, over the data."""

    layer: int
    experts: int
    per_token: int
    load: tuple[float, ...]  # share of assignments of each expert; sums to 1
    entropy: float  # of the router's whole softmax, mean over tokens, in units of log(experts): 0 one expert, 1 even
    cut: Quality | None = None  # with one expert fewer in this layer alone


class Result(Struct, frozen=True, kw_only=True):
    """A whole run."""

    format: int = FORMAT
    version: str  # colibrid's
    model: str
    pack: str  # what `colibrid.model.identity.pack_identity` says of the pack; a profile is for this one
    device: str
    machine: str
    data: str  # file name
    data_sha256: str
    task: Task
    slo: str | None
    made: str  # ISO date and time, UTC
    tried: tuple[Tried, ...]  # the first is the model's own setting
    front: tuple[int, ...]  # indices into tried: no other point is as good in quality and cost and better in one
    chosen: int | None  # None: nothing meets the limits
    reason: str  # of the choice, one sentence
    layers: tuple[LayerStats, ...]
