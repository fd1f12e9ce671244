"""The OpenAPI document, and that answers keep to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from colibrid.http.openapi import document
from colibrid.http.routes import ROUTES

if TYPE_CHECKING:
    from tests.http.conftest import Server

DOCUMENT = document(ROUTES)
ASK = [{"role": "user", "content": "Hi"}]
FULL = {"logprobs": 2, "prompt_logprobs": 1, "return_token_ids": True, "echo": True, "prompt": ["Hi", [5, 6]]}


def check(value: Any, kind: str) -> None:
    schema = {"$ref": f"#/components/schemas/{kind}", "components": DOCUMENT["components"]}
    jsonschema.validate(value, schema, cls=jsonschema.Draft202012Validator)


async def test_document_is_served(server: Server) -> None:
    """GET /openapi.json is the document of the route table."""
    answer = await server.get("/openapi.json")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")
    assert answer.json == DOCUMENT


def test_every_schema_is_valid_and_every_route_described() -> None:
    """All schemas are JSON schemas, all references lead somewhere, all routes are there."""
    for kind, schema in DOCUMENT["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{kind}", **DOCUMENT}).is_valid({})
    described = {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert described == {(route.method, route.path) for route in ROUTES}


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/completions", {"prompt": "Hi"}, "Completion"),
        ("/v1/completions", FULL, "Completion"),
        ("/v1/chat/completions", {"messages": ASK}, "ChatCompletion"),
        (
            "/v1/chat/completions",
            {"messages": ASK, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1, "return_token_ids": True},
            "ChatCompletion",
        ),
        ("/generate", {"prompt": "Hi"}, "Generated"),
        ("/tokenize", {"prompt": "Hi", "return_token_strs": True}, "Tokenized"),
        ("/detokenize", {"tokens": [5]}, "Detokenized"),
        ("/v1/completions", {"prompt": ""}, "Error"),
    ],
)
async def test_answers_are_as_described(server: Server, path: str, body: dict[str, Any], kind: str) -> None:
    """What routes answer, with everything that can be asked for, keeps to the schema, and so does what they take."""
    answer = await server.post(path, body)
    check(answer.json, kind)
    if answer.status == 200:
        check(body, next(route.body.__name__ for route in ROUTES if route.path == path and route.body))


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/models", "ModelList"),
        ("/v1/models/hummingbird-13m", "Model"),
        ("/version", "Version"),
        ("/livez", "Live"),
        ("/readyz", "Ready"),
        ("/nothing", "Error"),
    ],
)
async def test_small_routes_are_as_described(server: Server, path: str, kind: str) -> None:
    """The routes without a body keep to their schemas."""
    check((await server.get(path)).json, kind)


async def test_stream_events_are_as_described(server: Server) -> None:
    """Each event of a completion's stream is a completion."""
    *events, _done = (await server.post("/v1/completions", {"prompt": "Hi", "stream": True, "logprobs": 1})).events
    for event in events:
        check(event, "Completion")


def test_refused_fields_take_only_what_is_off() -> None:
    """A field that is not implemented is described by the values that mean it is off."""
    for route in ROUTES:
        for name, rule in route.refused.items():
            assert route.body is not None
            field = DOCUMENT["components"]["schemas"][route.body.__name__]["properties"][name]
            assert field["enum"] == [None, *rule.harmless]
