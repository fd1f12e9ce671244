"""colibrid.http.metrics: what Prometheus reads."""

from __future__ import annotations

import json
import random
import re
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from colibrid.http.auth import KeyRing
from colibrid.http.credentials import read_keys
from colibrid.http.metrics import exposition
from colibrid.http.metrics_reference import render
from colibrid.http.metrics_table import METRICS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.http.conftest import Server

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "conf" / "grafana" / "colibrid.json"
ALERTS = ROOT / "conf" / "prometheus" / "colibrid-alerts.yaml"


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample, by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float:
    return found[f"colibrid_{name}", frozenset(labels.items())]


async def test_all_of_the_table_is_answered(make_server: Callable[..., Any]) -> None:
    """The text parses, and holds every series of the table with its labels, those of the process, and nothing else."""
    server: Server = await make_server(metrics={"bandwidth_gb_s": 100.0})
    answer = await server.get("/metrics")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    found = samples(answer.raw.decode())
    ours = {name for name, _ in found if not name.startswith("process_")}
    assert ours == {series for metric in METRICS for series in metric.series}
    for metric in METRICS:
        labels = {label for name, labels in found if name in metric.series for label, _ in labels} - {"le"}
        assert labels == set(metric.labels), metric.name


async def test_values(server: Server) -> None:
    """What parts have counted is what is shown: engine counters, measures, experts, answers and refusals."""
    measures = server.service.measures
    measures.first_token_s.add(0.03)
    measures.first_token_s.add(1e9)
    measures.endings["stop"] = 3
    measures.load.add(array("I", [1, 0, 3, 0, 0, 0, 4, 4, 0]).tobytes())
    assert (await server.post("/v1/completions", {"prompt": 5})).status == 400
    assert (await server.get("/v1/models/hummingbird-13m")).status == 200
    found = samples((await server.get("/metrics")).raw.decode())
    assert value(found, "request_success_total", engine="0", finished_reason="stop") == 3
    bucket = {
        bound: value(found, "time_to_first_token_seconds_bucket", engine="0", le=bound)
        for bound in ("0.025", "0.05", "300.0", "+Inf")
    }
    assert bucket == {"0.025": 0, "0.05": 1, "300.0": 1, "+Inf": 2}
    assert value(found, "expert_imbalance", layer="0") == 2.25
    assert value(found, "expert_unused", layer="0") == 1
    assert value(found, "expert_swaps_total") == 2
    counters = server.service.reports[0].counters
    assert counters is not None
    assert value(found, "engine_steps_total", engine="0", phase="decode") == counters["steps_decode"]
    assert value(found, "pool_bytes", engine="0", tier="temp") == counters["temp_bytes"]
    assert value(found, "kv_cache_usage_perc", engine="0") == counters["kv_bytes_used"] / counters["kv_bytes"]
    steps = counters["steps_prefill"] + counters["steps_decode"]
    assert value(found, "engine_step_weight_bytes_total", engine="0") == 1000 * steps + 10 * counters["expert_launches"]
    assert value(found, "http_requests_total", route="/v1/completions", status="4xx") == 1
    assert value(found, "http_requests_total", route="/v1/models/{id}", status="2xx") == 1
    assert value(found, "refusals_total", reason="invalid") == 1


async def test_no_series_grows_with_input(make_server: Callable[..., Any]) -> None:
    """Whatever clients send, the same series are there afterwards."""
    server: Server = await make_server(model={"aliases": ["alias"]})
    before = samples(exposition(server.state).decode()).keys()
    picked = random.Random(7)
    for number in range(60):
        word = "".join(picked.choices('abz/{}%"\\\n_é', k=picked.randrange(1, 20)))
        await server.get(f"/{number}/{word}".replace("\n", "%0A"))
        await server.post(f"/v1/models/{number}", {})
        body = {"prompt": word, "model": picked.choice(["alias", word]), "user": word, "seed": number, word: 1}
        await server.post(
            "/v1/completions",
            body | {"priority": number, "stream": number % 2 == 0},
            **{"x-request-id": f"id-{number}"},
        )
        await server.raw("/v1/chat/completions", word.encode())
        async with server.session.request(picked.choice(["PUT", "BREW", "OPTIONS"]), server.url + "/v1/models"):
            pass
    assert samples(exposition(server.state).decode()).keys() == before


async def test_scope(make_server: Callable[..., Any]) -> None:
    """Where keys are set, one of scope metrics is needed and enough."""
    file = "\n".join(
        f"{scope} sha256:{__import__('hashlib').sha256(scope.encode()).hexdigest()} scopes={scope}"
        for scope in ("metrics", "inference")
    )
    server: Server = await make_server(ring=KeyRing(read_keys(file, "test")))
    assert (await server.get("/metrics")).status == 401
    assert (await server.get("/metrics", Authorization="Bearer inference")).status == 403
    assert (await server.get("/metrics", Authorization="Bearer metrics")).status == 200


async def test_switched_off(make_server: Callable[..., Any]) -> None:
    """metrics.enabled: false makes the route unknown, with what to do."""
    server: Server = await make_server(metrics={"enabled": False})
    answer = await server.get("/metrics")
    assert (answer.status, answer.error["code"]) == (404, "unknown_url")
    assert "metrics.enabled" in answer.error["message"]


def test_page_is_current() -> None:
    """docs/reference/metrics.md is what the table says; print it again after changing it."""
    assert (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8") == render()


def test_names_are_told_apart() -> None:
    """No two metrics share a name or a series, and each is explained."""
    series = [name for metric in METRICS for name in metric.series]
    assert len(series) == len(set(series))
    assert all(metric.about and metric.vllm != "" for metric in METRICS)


# -------------------------------------------------------- dashboard and alerts

SERIES = {name for metric in METRICS for name in metric.series} | {
    "process_resident_memory_bytes",
    "process_cpu_seconds_total",
    "process_open_fds",
}
LABELS = {label for metric in METRICS for label in metric.labels} | {"le", "instance", "job"}


def queries() -> list[Any]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    found = [pytest.param(one["expr"], id=panel["title"]) for panel in panels for one in panel.get("targets", ())]
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return found + [pytest.param(rule["expr"], id=rule["alert"]) for group in groups for rule in group["rules"]]


def unknown_names(expression: str) -> set[str]:
    """Names of series and labels in a PromQL expression that we do not have."""
    names = set(re.findall(r"\b(?:colibrid|process)_\w+", expression))
    labels = {
        label.strip()
        for inside in re.findall(r"(?:by|without|on|ignoring|group_left)\s*\(([^)]*)\)", expression)
        for label in inside.split(",")
        if label.strip()
    } | set(re.findall(r"[{,]\s*(\w+)\s*[=!]", expression))
    return (names - SERIES) | (labels - LABELS)


@pytest.mark.parametrize("expression", queries())
def test_queries_name_existing_series(expression: str) -> None:
    """Each query of dashboard and alerts asks for series and labels that exist, and for at least one of them."""
    assert re.search(r"\b(?:colibrid|process)_\w+", expression)
    assert not unknown_names(expression)


def test_the_check_can_fail() -> None:
    """A series or a label that does not exist is found."""
    assert unknown_names('rate(colibrid_requests_total{reasn="x"}[5m])') == {"colibrid_requests_total", "reasn"}
    assert unknown_names("sum by (enginee) (colibrid_engine_up)") == {"enginee"}


def test_dashboard_is_whole() -> None:
    """Panels have titles, places that do not overlap, and the data source that an import asks for."""
    dashboard = json.loads(DASHBOARD.read_text())
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert panel["title"]
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
        assert panel["type"] == "row" or panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_alerts_say_what_to_do() -> None:
    """Each alert has a severity, a summary and a description with what to do."""
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("critical", "warning")
            assert {"summary", "description"} <= rule["annotations"].keys()
