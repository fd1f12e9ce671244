"""The table of metrics: what each means, and how it is read from what the parts have counted.

Names are those of vLLM with another prefix wherever they mean the same, so that a dashboard moves by replacing
`vllm:`. docs/reference/metrics.md is printed from the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import colibrid
from colibrid.http.load import expert_load

if TYPE_CHECKING:
    from colibrid.batch.measures import Histogram, Measures
    from colibrid.batch.reports import EngineReport
    from colibrid.http.state import AppState

PREFIX = "colibrid_"


class Snapshot:
    """What one reading is made of."""

    def __init__(self, state: AppState) -> None:
        self.state = state
        self.reports = state.scheduler.reports
        self.load = expert_load(self.reports)


Values = Iterable[tuple[tuple[str, ...], "float | Histogram"]]
Read = Callable[[Snapshot], Values]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric; `name` is without prefix and ending."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    about: str
    read: Read
    labels: tuple[str, ...] = ("engine",)
    vllm: str | None = None  # vLLM's metric of the same meaning, by its whole name

    @property
    def family(self) -> str:
        """Its whole name, as it is asked for."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"

    @property
    def series(self) -> tuple[str, ...]:
        """The names of its samples."""
        endings = ("_bucket", "_sum", "_count") if self.kind == "histogram" else ("",)
        return tuple(self.family + ending for ending in endings)


# ------------------------------------------------------------------ readers


def _engine(value: Callable[[EngineReport], float | Histogram]) -> Read:
    return lambda of: [((str(one.status.index),), value(one)) for one in of.reports]


def _measure(value: Callable[[Measures], float | Histogram]) -> Read:
    return _engine(lambda one: value(one.measures))


def _counted(value: Callable[[dict[str, int]], float]) -> Read:
    """Of the counters of each engine that is there."""
    return lambda of: [
        ((str(one.status.index),), value(one.counters)) for one in of.reports if one.counters is not None
    ]


def _by(names: dict[str, str]) -> Read:
    """One counter of the engine for each value of a second label."""
    return lambda of: [
        ((str(one.status.index), label), one.counters[name])
        for one in of.reports
        if one.counters is not None
        for label, name in names.items()
    ]


def _one(value: Callable[[Snapshot], float | Histogram]) -> Read:
    return lambda of: [((), value(of))]


def _endings(of: Snapshot) -> Values:
    for one in of.reports:
        for reason, count in one.measures.endings.items():
            yield (str(one.status.index), reason), count


def _weight_bytes(one: EngineReport) -> float:
    counters = one.counters or {}
    steps = counters.get("steps_prefill", 0) + counters.get("steps_decode", 0)
    return steps * one.traffic.step + counters.get("expert_launches", 0) * one.traffic.expert


def _bandwidth(of: Snapshot) -> Values:
    known = of.state.settings.metrics.bandwidth_gb_s
    return [] if known is None else [((), known * 1e9)]


def _kv_usage(counters: dict[str, int]) -> float:
    return counters["kv_bytes_used"] / max(counters["kv_bytes"], 1)


METRICS: tuple[Metric, ...] = (
    Metric(
        name="num_requests_running",
        kind="gauge",
        about="Requests in a slot; each choice counts",
        read=_engine(lambda one: one.status.running),
        vllm="vllm:num_requests_running",
    ),
    Metric(
        name="num_requests_waiting",
        kind="gauge",
        about="Requests that wait for a slot or for KV memory",
        read=_engine(lambda one: one.status.queued),
        vllm="vllm:num_requests_waiting",
    ),
    Metric(
        name="kv_cache_usage_perc",
        kind="gauge",
        about="Share of the KV memory in use, 0 to 1, with prompts that are kept for later requests",
        read=_counted(_kv_usage),
        vllm="vllm:kv_cache_usage_perc",
    ),
    Metric(
        name="prefix_cache_queries",
        kind="counter",
        about="Prompt tokens of complete prompts, which could have been computed before",
        read=_measure(lambda one: one.prompt_tokens),
        vllm="vllm:prefix_cache_queries_total",
    ),
    Metric(
        name="prefix_cache_hits",
        kind="counter",
        about="Of them, those that had been computed for an earlier request",
        read=_measure(lambda one: one.cached_tokens),
        vllm="vllm:prefix_cache_hits_total",
    ),
    Metric(
        name="prompt_tokens",
        kind="counter",
        about="Prompt tokens, counted when a prompt is complete, once for all choices",
        read=_measure(lambda one: one.prompt_tokens),
        vllm="vllm:prompt_tokens_total",
    ),
    Metric(
        name="generation_tokens",
        kind="counter",
        about="Generated tokens, counted when they arrive",
        read=_measure(lambda one: one.output_tokens),
        vllm="vllm:generation_tokens_total",
    ),
    Metric(
        name="request_success",
        kind="counter",
        about="Ended requests by reason: stop, length, abort (the client left or had enough), error",
        read=_endings,
        labels=("engine", "finished_reason"),
        vllm="vllm:request_success_total",
    ),
    Metric(
        name="time_to_first_token_seconds",
        kind="histogram",
        about="From submission to the first token",
        read=_measure(lambda one: one.first_token_s),
        vllm="vllm:time_to_first_token_seconds",
    ),
    Metric(
        name="inter_token_latency_seconds",
        kind="histogram",
        about="Between arrivals of a request's tokens; tokens that arrive together count once",
        read=_measure(lambda one: one.between_tokens_s),
        vllm="vllm:inter_token_latency_seconds",
    ),
    Metric(
        name="e2e_request_latency_seconds",
        kind="histogram",
        about="From submission to the end of a request that ended by stop or length",
        read=_measure(lambda one: one.whole_s),
        vllm="vllm:e2e_request_latency_seconds",
    ),
    Metric(
        name="request_queue_time_seconds",
        kind="histogram",
        about="Of it, until the request had a slot",
        read=_measure(lambda one: one.queue_s),
        vllm="vllm:request_queue_time_seconds",
    ),
    Metric(
        name="request_prefill_time_seconds",
        kind="histogram",
        about="Of it, until the first token",
        read=_measure(lambda one: one.prefill_s),
        vllm="vllm:request_prefill_time_seconds",
    ),
    Metric(
        name="request_decode_time_seconds",
        kind="histogram",
        about="Of it, from the first token on",
        read=_measure(lambda one: one.decode_s),
        vllm="vllm:request_decode_time_seconds",
    ),
    Metric(
        name="request_prompt_tokens",
        kind="histogram",
        about="Prompt tokens of a request that ended by stop or length",
        read=_measure(lambda one: one.prompt_sizes),
        vllm="vllm:request_prompt_tokens",
    ),
    Metric(
        name="request_generation_tokens",
        kind="histogram",
        about="Generated tokens of a request that ended by stop or length",
        read=_measure(lambda one: one.output_sizes),
        vllm="vllm:request_generation_tokens",
    ),
    Metric(
        name="engine_up",
        kind="gauge",
        about="1 while the engine serves",
        read=_engine(lambda one: float(one.status.phase == "ready")),
    ),
    Metric(
        name="engine_restarts",
        kind="counter",
        about="Engines that died or stalled and were replaced",
        read=_engine(lambda one: one.status.restarts),
    ),
    Metric(
        name="engine_progress_age_seconds",
        kind="gauge",
        about="Since the engine's progress counter last moved; 0 while it does not serve",
        read=_engine(lambda one: one.status.last_step_age_s or 0.0),
    ),
    Metric(
        name="engine_slots", kind="gauge", about="Requests that can run", read=_engine(lambda one: one.status.slots)
    ),
    Metric(
        name="engine_steps",
        kind="counter",
        about="Steps of the engine since it was opened, by phase: prefill, decode",
        read=_by({"prefill": "steps_prefill", "decode": "steps_decode"}),
        labels=("engine", "phase"),
    ),
    Metric(
        name="engine_tokens",
        kind="counter",
        about="Tokens computed by these steps; prompt tokens that were computed before are not among them",
        read=_by({"prefill": "tokens_prefill", "decode": "tokens_decode"}),
        labels=("engine", "phase"),
    ),
    Metric(
        name="engine_step_weight_bytes",
        kind="counter",
        about="Weights that these steps had to read at least: dense ones once a step, an expert once where it had a token",
        read=_engine(_weight_bytes),
    ),
    Metric(
        name="engine_memory_bandwidth_bytes",
        kind="gauge",
        about="metrics.bandwidth_gb_s in bytes a second, where it is set: with the former, the least time of a step",
        read=_bandwidth,
        labels=(),
    ),
    Metric(
        name="engine_allocations_after_ready",
        kind="counter",
        about="Allocations of the engine while serving: 0, or there is a bug",
        read=_counted(lambda counters: counters["allocations_after_open"]),
    ),
    Metric(
        name="pool_bytes",
        kind="gauge",
        about="Size of each memory pool, by tier: weights, kv, temp",
        read=_by({"weights": "weights_bytes", "kv": "kv_bytes", "temp": "temp_bytes"}),
        labels=("engine", "tier"),
    ),
    Metric(
        name="pool_used_bytes",
        kind="gauge",
        about="What is taken of a pool, where that changes while serving: tier kv",
        read=_by({"kv": "kv_bytes_used"}),
        labels=("engine", "tier"),
    ),
    Metric(
        name="expert_launches",
        kind="counter",
        about="Runs of an expert: once a step and layer for each expert that has tokens",
        read=_counted(lambda counters: counters["expert_launches"]),
    ),
    Metric(
        name="expert_relaunches",
        kind="counter",
        about="Runs of an expert beyond the first in one step and layer: 0, or there is a bug",
        read=_counted(lambda counters: counters["expert_relaunches"]),
    ),
    Metric(
        name="expert_assignments",
        kind="counter",
        about="Tokens given to experts; over expert_launches: how full an expert's bucket is",
        read=_counted(lambda counters: counters["expert_assignments"]),
    ),
    Metric(
        name="expert_trimmed",
        kind="counter",
        about="Assignments left out by per_token or threshold of a request",
        read=_counted(lambda counters: counters["expert_trimmed"]),
    ),
    Metric(
        name="expert_dropped",
        kind="counter",
        about="Assignments left out by experts.max_tokens_per_expert",
        read=_counted(lambda counters: counters["expert_dropped"]),
    ),
    Metric(
        name="expert_imbalance",
        kind="gauge",
        about="Of each layer with experts: the most loaded one against the mean, since the daemon was started. 1: all alike",
        read=lambda of: [((str(layer.layer),), layer.imbalance) for layer in of.load],
        labels=("layer",),
    ),
    Metric(
        name="expert_unused",
        kind="gauge",
        about="Of each layer with experts: those without any token since the daemon was started",
        read=lambda of: [((str(layer.layer),), layer.unused) for layer in of.load],
        labels=("layer",),
    ),
    Metric(
        name="expert_swaps",
        kind="counter",
        about="Experts that were replaced while serving",
        read=_one(lambda of: of.state.scheduler.expert_swaps),
        labels=(),
    ),
    Metric(
        name="http_requests",
        kind="counter",
        about="Answers by route of the table and kind of status; a client that left counts as 4xx",
        read=lambda of: of.state.served.answers.items(),
        labels=("route", "status"),
    ),
    Metric(
        name="refusals",
        kind="counter",
        about="Requests that were not answered as asked, by reason",
        read=lambda of: [((reason,), count) for reason, count in of.state.served.refusals.items()],
        labels=("reason",),
    ),
    Metric(
        name="http_connections",
        kind="gauge",
        about="Connections of clients that are open, of at most limits.connections",
        read=_one(lambda of: of.state.gate.open),
        labels=(),
    ),
    Metric(
        name="http_connections_refused",
        kind="counter",
        about="Connections that were closed with 503 or 429 for being too many, in all or of one address",
        read=_one(lambda of: of.state.gate.refused),
        labels=(),
    ),
    Metric(
        name="http_incoming_bytes",
        kind="gauge",
        about="Bodies that are on their way in",
        read=_one(lambda of: of.state.incoming.bytes),
        labels=(),
    ),
    Metric(
        name="event_loop_lag_seconds",
        kind="histogram",
        about="How much later than asked the event loop came back to a task, four times a second",
        read=_one(lambda of: of.state.served.lag_s),
        labels=(),
    ),
    Metric(
        name="plugin_failures",
        kind="counter",
        about="Calls of plugins that failed; the log names the plugin",
        read=lambda of: [((), of.state.plugins.health.failures)],
        labels=(),
    ),
    Metric(
        name="plugin_slow_calls",
        kind="counter",
        about="Calls of plugins that took more than 10 ms; the log names the plugin",
        read=lambda of: [((), of.state.plugins.health.slow)],
        labels=(),
    ),
    Metric(
        name="build_info",
        kind="gauge",
        about="Always 1; what is served",
        read=lambda of: [((colibrid.__version__, of.state.scheduler.info.model_id), 1.0)],
        labels=("version", "model_name"),
    ),
)
