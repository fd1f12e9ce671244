"""The bounds that the API's description states, each just beyond."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from colibrid.http.openapi import document
from colibrid.http.routes import ROUTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tests.http.conftest import Server

SCHEMAS = document(ROUTES)["components"]["schemas"]
NEEDED = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/embeddings": {"input": "Hi"},
    "/generate": {"prompt": "Hi"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [5]},
}


def alternatives(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What a value may be, but for null."""
    if "anyOf" in schema:
        return [inner for part in schema["anyOf"] for inner in alternatives(part)]
    if "$ref" in schema:
        return alternatives(SCHEMAS[schema["$ref"].rsplit("/", maxsplit=1)[-1]])
    return [] if schema.get("type") == "null" else [schema]


def beyond(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Values of the right type just outside of the bounds."""
    kind = schema.get("type")
    if kind in ("integer", "number"):
        step = 1 if kind == "integer" else 1e-6
        yield from [schema["minimum"] - step] if "minimum" in schema else []
        yield from [schema["maximum"] + step] if "maximum" in schema else []
        yield from [schema["exclusiveMinimum"]] if "exclusiveMinimum" in schema else []
        yield from [schema["exclusiveMaximum"]] if "exclusiveMaximum" in schema else []
    if kind == "string":
        yield from ["x" * (schema["maxLength"] + 1)] if "maxLength" in schema else []
        yield from ["x" * (schema["minLength"] - 1)] if "minLength" in schema else []
    if kind == "array":
        good = example(schema["items"])
        yield from [[good] * (schema["maxItems"] + 1)] if "maxItems" in schema else []
        yield from [[good] * (schema["minItems"] - 1)] if "minItems" in schema else []
        yield from [[bad] for part in alternatives(schema["items"]) for bad in beyond(part)]
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        yield from [{str(i): 0 for i in range(schema["maxProperties"] + 1)}] if "maxProperties" in schema else []
        yield from [{"5": bad} for part in alternatives(schema["additionalProperties"]) for bad in beyond(part)]


def example(schema: Mapping[str, Any]) -> Any:
    """A value of the schema, as far as those of lists go."""
    (found, *_) = alternatives(schema)
    if "properties" in found:
        return {"role": "user", "content": "Hi"}
    return {"string": "x", "integer": 5}.get(found.get("type", ""), {})


def wrong_types(schemas: list[Mapping[str, Any]]) -> Iterator[Any]:
    """One value of each type that is not among the schemas'."""
    kinds = {schema.get("type") for schema in schemas}
    if None in kinds:  # anything, or one of a few values
        return
    yield from [5] if not kinds & {"integer", "number"} else []
    yield from [1.5] if "number" not in kinds else []
    yield from ["x"] if "string" not in kinds else []
    yield from [True] if "boolean" not in kinds else []
    yield from [[]] if "array" not in kinds else []
    yield from [{}] if "object" not in kinds else []


def cases() -> Iterator[Any]:
    for route in ROUTES:
        for name, schema in SCHEMAS[route.body.__name__]["properties"].items() if route.body else ():
            if name in route.refused:
                continue
            found = alternatives(schema)
            values = [*wrong_types(found), *(value for part in found for value in beyond(part))]
            if values:
                yield pytest.param(route.path, name, values, id=f"{route.path} {name}")


@pytest.mark.parametrize(("path", "name", "values"), list(cases()))
async def test_values_beyond_the_bounds(
    make_server: Callable[..., Any], path: str, name: str, values: list[Any]
) -> None:
    """Each value just beyond a stated bound, and of each wrong type, is 400 that names the field; nothing is submitted."""
    server: Server = await make_server(server={"max_body_bytes": 16 << 20})
    for value in values:
        answer = await server.post(path, NEEDED[path] | {name: value})
        assert answer.status == 400, value
        error = answer.error
        assert (error["param"] or "").split("[")[0].split(".")[0] == name, error
        assert name in error["message"]
    assert not server.service.seen


def test_bounds_are_found() -> None:
    """Fields with bounds of each kind are among the cases."""
    found = {case.id for case in cases()}
    for name in ("temperature", "top_p", "stop", "stop_token_ids", "logit_bias", "max_tokens", "echo", "logprobs"):
        assert f"/v1/completions {name}" in found


def refused_fields() -> Iterator[Any]:
    for route in ROUTES:
        for name in route.refused:
            yield pytest.param(route, name, id=f"{route.path} {name}")


@pytest.mark.fields("refused")
@pytest.mark.parametrize(("route", "name"), list(refused_fields()))
async def test_refused_fields(server: Server, route: Any, name: str) -> None:
    """A field that is not implemented is 400 by name unless its value, of the same type, means that it is off."""
    rule = route.refused[name]
    for value in (None, *rule.harmless):
        answer = await server.post(route.path, NEEDED[route.path] | {name: value})
        assert answer.status == 200, value
        assert "x-colibri-ignored" not in answer.headers
    asked = len(server.service.seen)
    for value in ("x", 2, 0.5, True, ["x"], {"x": 1}):
        if value not in rule.harmless:
            answer = await server.post(route.path, NEEDED[route.path] | {name: value})
            assert (answer.status, answer.error["param"]) == (400, name), value
            assert rule.instead in answer.error["message"]
    assert len(server.service.seen) == asked
