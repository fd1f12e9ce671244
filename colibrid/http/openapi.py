"""The OpenAPI document, made from the route table and the types of bodies and answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

import colibrid
from colibrid.http.answers import Error

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from colibrid.http.routes import Route
    from colibrid.http.types import Refused

_REFERENCES = "#/components/schemas/{name}"
_STATUSES = {
    "400": "A field is wrong, or not implemented: named in `param`",
    "401": "No key, or a wrong one",
    "403": "The key is not for this route, or Host or Origin is not allowed",
    "404": "No such model",
    "408": "The body did not arrive in time",
    "413": "The body is larger than server.max_body_bytes",
    "415": "The body is not plain JSON",
    "429": "The key has used up what it may: try again after Retry-After",
    "500": "The engine or the server failed",
    "504": "The answer took longer than timeout_s",
    "503": "Overloaded, loading or draining: try again after Retry-After",
}
_EVENT = {
    "type": "object",
    "description": "each event, with stream: true",
    "properties": {"data": {"type": "string", "description": "a chunk of the answer as JSON, an error, or [DONE]"}},
    "required": ["data"],
}
_BODY_STATUSES = frozenset({"400", "408", "413", "415", "500", "503"})


def document(routes: Iterable[Route]) -> dict[str, Any]:
    """The document that describes `routes`, as JSON values."""
    known = list(routes)
    kinds = {kind for route in known for kind in (route.body, route.answer) if kind is not None} | {Error}
    ordered = sorted(kinds, key=lambda kind: kind.__name__)
    _, schemas = msgspec.json.schema_components(ordered, ref_template=_REFERENCES)
    paths: dict[str, dict[str, Any]] = {}
    for route in known:
        if route.body is not None:
            schemas[route.body.__name__]["properties"] |= _refused(route.refused)
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "colibrid",
            "version": colibrid.__version__,
            "description": "An OpenAI-compatible server of Mixture-of-Experts language models. Null means absent."
            " Fields that no schema lists are accepted and named in the header x-colibri-ignored.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "where the server has keys"}
            },
        },
        "security": [{}, {"key": []}],
    }


def _refused(refused: Mapping[str, Refused]) -> dict[str, Any]:
    """Fields that are known and not implemented: only what means that they are off is taken."""
    return {
        name: {"enum": [None, *rule.harmless], "description": f"not implemented; {rule.instead}"}
        for name, rule in sorted(refused.items())
    }


def _operation(route: Route) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _reference(route.answer)}}
    if route.streams:
        content["text/event-stream"] = {"schema": _EVENT}
    responses: dict[str, Any] = {"200": {"description": "The answer", "content": content}}
    for status in _statuses(route):
        responses[status] = {"description": _STATUSES[status], "content": _error_content()}
    if route.path in ("/readyz", "/health"):
        responses["503"] = {"description": "Not ready", "content": content}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.method.lower()}{route.path.replace('/', '_').replace('{', '').replace('}', '')}",
        "responses": responses,
    }
    if route.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _reference(route.body)}},
        }
    if "{id}" in route.path:
        operation["parameters"] = [
            {
                "name": "id",
                "in": "path",
                "required": True,
                "schema": {"type": "string", "minLength": 1},
                "description": "may hold slashes",
            }
        ]
    if not route.needs_key:
        operation["security"] = []
    return operation


def _statuses(route: Route) -> list[str]:
    found = _BODY_STATUSES if route.body is not None else frozenset()
    if route.body is not None and "timeout_s" in route.body.__struct_fields__:
        found |= {"504"}
    if route.needs_key:
        found |= {"401", "403"}
    if route.body is not None and route.needs_key:
        found |= {"429"}
    if route.body is not None or "{id}" in route.path:
        found |= {"404"}
    return sorted(found)


def _reference(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _REFERENCES.format(name=kind.__name__)}


def _error_content() -> dict[str, Any]:
    return {"application/json": {"schema": _reference(Error)}}
