"""Routes, headers, and what every request passes through."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import colibrid
from colibrid.engine.state import Readiness
from colibrid.http.answers import Version
from colibrid.http.health import version
from colibrid.http.routes import ROUTES, Route

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.http.conftest import Server

MANUAL = Route(method="GET", path="/docs", handler=version, answer=Version, summary="not in the table")


async def test_models(server: Server) -> None:
    """The served model is listed, found by its id, and nothing else is."""
    listed = (await server.get("/v1/models")).json
    assert [model["id"] for model in listed["data"]] == ["hummingbird-13m"]
    shown = (await server.get("/v1/models/hummingbird-13m")).json
    assert (shown["object"], shown["max_model_len"], shown["status"]) == ("model", 2048, "ready")
    answer = await server.get("/v1/models/org/other")
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")


async def test_model_ids_may_hold_slashes(make_server: Callable[..., Any]) -> None:
    """An id or alias with slashes is found as a path, escaped or not."""
    server = await make_server(model={"aliases": ["org/family/name"]})
    server.service.info = msgspec.structs.replace(server.service.info, model_id="org/name")
    for path in ("/v1/models/org/name", "/v1/models/org%2Fname", "/v1/models/org/family/name"):
        answer = await server.get(path)
        assert (answer.status, answer.json["id"]) == (200, "org/name")
    assert (await server.get("/v1/models/name")).status == 404


async def test_aliases(make_server: Callable[..., Any]) -> None:
    """model.aliases are listed, and requests may use them; answers carry the model's own id."""
    server = await make_server(model={"aliases": ["gpt-4o", "my/model", "gpt-4o"]})
    assert (await server.get("/v1/models")).json["data"][0]["aliases"] == ["gpt-4o", "my/model"]
    for name in ("gpt-4o", "my/model", "hummingbird-13m"):
        answer = await server.post("/v1/completions", {"prompt": "Hi", "model": name})
        assert (answer.status, answer.json["model"]) == (200, "hummingbird-13m")
    assert (await server.post("/v1/completions", {"prompt": "Hi", "model": ""})).status == 404


async def test_version(server: Server) -> None:
    """GET /version names the version of the package."""
    assert (await server.get("/version")).json == {"version": colibrid.__version__}


@pytest.mark.fields("/generate", "prompt", "max_new_tokens")
async def test_generate_short_form(server: Server) -> None:
    """/generate takes prompt and max_new_tokens and gives the text."""
    body = (await server.post("/generate", {"prompt": "Hi", "max_new_tokens": 2, "temperature": 0})).json
    assert (body["text"], body["finish_reason"]) == ("The capital", "length")
    assert body["usage"]["completion_tokens"] == 2
    answer = await server.post("/generate", {"prompt": "Hi", "max_new_tokens": -2})
    assert (answer.status, answer.error["param"]) == (400, "max_new_tokens")
    assert (await server.post("/generate", {"prompt": [5, 6], "max_new_tokens": 2})).json["text"] == "The capital"


@pytest.mark.parametrize("prompt", [["Hi", "Ho"], ["Hi"], [[5], [6]], [[]]])
async def test_generate_takes_one_prompt(server: Server, prompt: Any) -> None:
    """Several prompts are refused and not answered in part, as the short form has room for one text."""
    answer = await server.post("/generate", {"prompt": prompt})
    assert (answer.status, answer.error["param"]) == (400, "prompt")
    assert "/v1/completions" in answer.error["message"]
    assert not server.service.seen


async def test_health_follows_the_engine(server: Server) -> None:
    """/livez is always 200; /readyz and /health are 503 unless the engine is ready and not draining."""
    assert (await server.get("/livez")).status == 200
    for path in ("/readyz", "/health"):
        answer = await server.get(path)
        assert (answer.status, answer.json["status"], answer.json["phase"]) == (200, "ready", "ready")
    server.service.readiness = Readiness(phase="loading", percent=40)
    answer = await server.get("/readyz")
    assert (answer.status, answer.json["percent"]) == (503, 40)
    assert (await server.get("/livez")).status == 200
    server.service.readiness = Readiness(phase="ready")
    server.service.draining = True
    answer = await server.get("/readyz")
    assert (answer.status, answer.json["phase"]) == (503, "draining")


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/v1/responses", "/v1/chat/completions"),
        ("/v1/messages", "/v1/chat/completions"),
        ("/embeddings", "use POST /v1/embeddings."),
        ("/pooling", "use POST /v1/embeddings."),
        ("/infill", "use suffix of POST /v1/completions."),
        ("/ping", "use GET /health."),
        ("/slots", "GET /readyz says"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/nothing", "/v1/completions"),
    ],
)
async def test_other_routes_name_the_one_to_use(server: Server, path: str, named: str) -> None:
    """An unknown route is a JSON 404 that says where to go."""
    answer = await server.post(path, {})
    assert answer.status == 404
    assert named in answer.error["message"]


@pytest.mark.parametrize("route", [*ROUTES, MANUAL], ids=lambda route: route.path)
async def test_wrong_method_is_405(server: Server, route: Any) -> None:
    """Each route asked with another method is a JSON 405 with Allow."""
    allowed = "POST" if route.method == "POST" else "GET, HEAD"
    path = route.path.replace("{id}", "org/name")
    for method in ("DELETE", "PUT", "PATCH", "GET" if route.method == "POST" else "POST"):
        async with server.session.request(method, server.url + path) as response:
            assert (response.status, response.headers["Allow"]) == (405, allowed)
            error = (await response.json())["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert allowed in error["message"]


@pytest.mark.parametrize("route", [route for route in ROUTES if route.body is not None], ids=lambda route: route.path)
async def test_every_body_is_checked(make_server: Callable[..., Any], route: Any) -> None:
    """Each route with a body takes plain JSON objects within the limit only: 415, 413, 400 and 408 elsewhere."""
    server = await make_server(server={"max_body_bytes": 2048})
    assert (await server.raw(route.path, b"{}", Content_Type="text/plain")).status == 415
    assert (await server.raw(route.path, b"{}", Content_Encoding="gzip")).status == 415
    assert (await server.raw(route.path, b'{"a": "' + b"a" * 2048 + b'"}')).status == 413
    for raw in (b"", b"[]", b"{", b'{"model": NaN}', b'{"model": "\\ud800"}'):
        answer = await server.raw(route.path, raw)
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
async def test_keys_guard_every_route(make_server: Callable[..., Any], route: Any) -> None:
    """With keys set each route but the health ones is 401 without one."""
    server = await make_server(keys=["secret-key"])
    async with server.session.request(route.method, server.url + route.path.replace("{id}", "x")) as response:
        assert (response.status == 401) == route.needs_key
    async with server.session.get(server.url + "/openapi.json") as response:
        assert response.status == 401


async def test_request_ids(server: Server) -> None:
    """A sane x-request-id is kept, another replaced; errors and streams carry one too."""
    good = await server.post("/v1/completions", {"prompt": "Hi"}, **{"x-request-id": "abc.DEF-1:2"})
    assert good.headers["x-request-id"] == "abc.DEF-1:2"
    bad = await server.post("/v1/completions", {"prompt": "Hi"}, **{"x-request-id": "a b<script>"})
    assert bad.headers["x-request-id"].startswith("req-")
    assert (await server.post("/nothing", {})).headers["x-request-id"].startswith("req-")
    stream = await server.post("/v1/completions", {"prompt": "Hi", "stream": True}, **{"x-request-id": "s1"})
    assert stream.headers["x-request-id"] == "s1"


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
async def test_headers_of_every_answer(server: Server, route: Route) -> None:
    """Each route, right or wrong, says who answered what in how long."""
    path = route.path.replace("{id}", "x")
    for method in (route.method, "DELETE"):
        async with server.session.request(method, server.url + path) as response:
            assert response.headers["x-request-id"].startswith("req-")
            assert int(response.headers["openai-processing-ms"]) >= 0
            assert response.headers["Server"] == "colibrid"
            assert response.content_type == "application/json"


@pytest.mark.parametrize("route", [route for route in ROUTES if route.body is not None], ids=lambda route: route.path)
async def test_bodies_that_do_not_come(server: Server, monkeypatch: pytest.MonkeyPatch, route: Route) -> None:
    """On each route with a body, one that does not arrive in time is 408 with the contract's error."""
    monkeypatch.setattr("colibrid.http.body.BODY_TIMEOUT_S", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    head = (
        f"POST {route.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n"
    )
    writer.write(head.encode() + b"{")
    assert (await reader.readline()).startswith(b"HTTP/1.1 408")
    answer = await reader.readuntil(b"}}")
    assert b"x-request-id: req-" in answer
    assert b"0.05 s" in answer
    writer.close()


async def test_timing_headers(server: Server) -> None:
    """Answers say how long they took, and where the time went."""
    answer = await server.post("/v1/completions", {"prompt": "Hi"})
    assert int(answer.headers["openai-processing-ms"]) >= 0
    assert answer.headers["Server-Timing"] == "queue;dur=1.0, prefill;dur=2.0, decode;dur=3.0"
