"""GET /metrics: the table of metrics as Prometheus reads it, and as samples for plugins.

Nothing is done for metrics between two readings.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from colibrid.batch.measures import Histogram
from colibrid.http.errors import NotFoundError
from colibrid.http.metrics_table import METRICS, Snapshot
from colibrid.http.state import STATE
from colibrid.plugins import Sample

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric as Family

    from colibrid.http.metrics_table import Metric, Values
    from colibrid.http.state import AppState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Parts(Collector):
    """Reads all of METRICS."""

    def __init__(self, state: AppState) -> None:
        self._state = state

    def collect(self) -> Iterator[Family]:
        snapshot = Snapshot(self._state)
        return (_family(metric, metric.read(snapshot)) for metric in METRICS)


def _family(metric: Metric, values: Values) -> Family:
    name, about = metric.family, metric.about
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(name, about, labels=metric.labels)
        for labels, value in values:
            assert isinstance(value, Histogram), f"{name} is a histogram"
            sums = accumulate(value.counts)
            buckets = [(str(bound), count) for bound, count in zip((*value.bounds, "+Inf"), sums, strict=True)]
            histogram.add_metric(labels, buckets, sum_value=value.sum)
        return histogram
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(name, about, labels=metric.labels)
    for labels, value in values:
        assert not isinstance(value, Histogram), f"{name} is a number"
        family.add_metric(labels, value)
    return family


def exposition(state: AppState) -> bytes:
    """All metrics as Prometheus reads them, with those of this process."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Parts(state))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


def samples(state: AppState) -> list[Sample]:
    """The same without those of the process, as values."""
    found = (sample for family in _Parts(state).collect() for sample in family.samples)
    return [Sample(one.name, one.labels, one.value) for one in found]


async def metrics(request: web.Request) -> web.Response:
    """For a key of scope metrics, unless metrics.enabled is false."""
    state = request.app[STATE]
    if not state.settings.metrics.enabled:
        raise NotFoundError(
            "Metrics are not answered here; set metrics.enabled, or ask the admin socket.", code="unknown_url"
        )
    return metrics_response(state)


def metrics_response(state: AppState) -> web.Response:
    """All metrics as an answer."""
    return web.Response(body=exposition(state), headers={"Content-Type": CONTENT_TYPE})
