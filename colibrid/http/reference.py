"""Prints docs/reference/api.md from routes, types and tests: python -m colibrid.http.reference tests > docs/reference/api.md

A test says which fields it shows with `@pytest.mark.fields("/v1/completions", "echo", …)`; the first name is a route, or
an object that several routes have (`messages`, `stream_options`). With `"refused"` alone it shows all refused fields.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin, get_type_hints

import msgspec

from colibrid.http.routes import ROUTES
from colibrid.http.schema_text import as_json, in_words
from colibrid.http.types import Experts, JsonSchema, Message, ResponseFormat, StreamOptions, StructuredOutputs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from colibrid.http.routes import Route
    from colibrid.http.types import Refused

OBJECTS: Mapping[str, type[msgspec.Struct]] = {  # of bodies, by the name that they have there
    "messages": Message,
    "stream_options": StreamOptions,
    "experts": Experts,
    "response_format": ResponseFormat,
    "response_format.json_schema": JsonSchema,
    "structured_outputs": StructuredOutputs,
}
_INTRODUCTION = """\
# API reference

Printed from `colibrid/http/routes.py`, `types.py` and the tests by `python -m colibrid.http.reference tests`; do not
edit. The server describes itself as well, at `/docs` and `/openapi.json`.

Every field is honoured, or refused by name with status 400. Null means absent. Fields that are not listed are
accepted and named in the response header `x-colibri-ignored`; with `server.strict: true` they are 400. The last column
names a test that shows the field at work.

"""
_HEADERS = """\
## Headers

| header | of | |
|---|---|---|
| `x-request-id` | every answer | the client's own if it has only letters, digits and `._:-` and at most 128 of them |
| `openai-processing-ms` | every answer but a refusal of a full queue | milliseconds from the head of the request to that of the answer |
| `Server-Timing` | whole answers | `queue`, `prefill`, `decode`: the longest of each over the choices, in milliseconds |
| `x-colibri-ignored` | answers | fields that the API does not know, at most 20 names |
| `Retry-After`, `retry-after-ms` | 429, 503 | when to try again |
| `x-ratelimit-limit-…`, `-remaining-…`, `-reset-…` | answers to keys with limits | of `requests` a minute, and of `tokens` a minute or a day, whichever has less left ([keys](keys.md)) |
| `Allow` | 405 | the methods of the route |
| `WWW-Authenticate` | 401 | `Bearer` |
| `X-Accel-Buffering: no`, `Cache-Control: no-cache` | streams | a comment line comes every `server.sse_ping_s` seconds |

Errors are in [errors.md](errors.md).

"""
_DEVIATIONS = """\
## Deviations

- Sampling values that a request leaves out come from the model's `generation_config.json` (as in vLLM), then from
  OpenAI's defaults.
- A prompt of several entries gives one choice for each; all have the same seed, so each equals its solo run.
- `logprobs` are those of the model itself, before temperature, penalties and bias; minus infinity reads -9999.
- Tokens that hold part of a character read `bytes:\\\\x..` in `logprobs`, as OpenAI writes them.
- `stop`: the first stop string to be complete ends the text; of two complete at the same character the longer.
- `usage.experts` counts what the engine has computed: when a stop string ended a choice, also tokens behind it.
- Embeddings are the hidden state after the final norm, mean or last position as the setting `embeddings.pooling` says,
  of length 1.
- A body may be large in `prompt`, `messages`, `input` or `tokens` only: all its other fields together have at most 256 KiB. It
  has at most 128 levels, 65,536 lists and objects, 65,536 keys, 262,144 strings and 524,288 values, and each field once.
- One answer holds at most 1,048,576 log-probabilities, the likeliest ones of each token among them; those of the text
  of a stream do not count.
- Special-token strings are parsed in `/v1/completions` and are plain text in the contents of chat messages.
- The role `developer` reads as `system` for templates that do not know it; text parts are joined by a newline.
"""
Shown = dict[tuple[str, str], str]  # (route or object, field) -> test
REFUSED = ("refused", "")


def render(shown: Mapping[tuple[str, str], str]) -> str:
    """The whole page. `shown` names a test for each field, as `shown_fields` finds them."""
    bodies = [route for route in ROUTES if route.body is not None]
    return "".join(
        [
            _INTRODUCTION,
            _routes(ROUTES),
            *(_section(f"{route.method} {route.path}", _rows(route, shown)) for route in bodies),
            *(_section(f"`{name}`", _honoured(name, kind, shown)) for name, kind in OBJECTS.items()),
            _HEADERS,
            _DEVIATIONS,
        ]
    )


def shown_fields(folder: Path) -> Shown:
    """The first test of each field, in order of files and lines, found by their marks."""
    shown: Shown = {}
    for path in sorted(folder.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for place, *fields in _marks(node):
                    for field in fields or [""]:
                        shown.setdefault((place, field), f"{path.stem}: {node.name}")
    return shown


def _marks(test: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[list[str]]:
    for mark in test.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fields":
            yield [str(ast.literal_eval(argument)) for argument in mark.args]


def _routes(routes: Iterable[Route]) -> str:
    head = "## Routes\n\n| route | | key |\n|---|---|---|\n"
    rows = [
        f"| `{route.method} {route.path}` | {route.summary} | {'where keys are set' if route.needs_key else 'none'} |\n"
        for route in routes
    ]
    rows.append("| `GET /openapi.json` | This description for programs | where keys are set |\n")
    rows.append("| `GET /docs` | This description as a page | none |\n")
    return f"{head}{''.join(rows)}\n"


_Row = tuple[str, str, str, str, str]


def _section(title: str, rows: Iterable[_Row]) -> str:
    head = f"## {title}\n\n| field | | bounds | notes | test |\n|---|---|---|---|---|\n"
    return head + "".join(f"| `{row[0]}` | {' | '.join(row[1:])} |\n" for row in rows) + "\n"


def _rows(route: Route, shown: Mapping[tuple[str, str], str]) -> Iterator[_Row]:
    assert route.body is not None, "only routes with a body have a table"
    yield from _honoured(route.path, route.body, shown)
    yield from _refused(route.refused, shown)


def _honoured(place: str, kind: type[msgspec.Struct], shown: Mapping[tuple[str, str], str]) -> Iterator[_Row]:
    hints = get_type_hints(kind, include_extras=True)
    own = list(kind.__annotations__)  # fields of the route itself come first
    fields = sorted(msgspec.structs.fields(kind), key=lambda field: own.index(field.name) if field.name in own else 99)
    for field in fields:
        hint, name = hints[field.name], field.encode_name
        yield name, "implemented", _bounds(hint), _notes(hint), shown.get((place, name), "")


def _refused(refused: Mapping[str, Refused], shown: Mapping[tuple[str, str], str]) -> Iterator[_Row]:
    for name, rule in sorted(refused.items()):
        taken = ", ".join(f"`{as_json(value)}`" for value in rule.harmless)
        test = shown.get(REFUSED, "")
        yield name, "not implemented: 400", f"only {taken}" if taken else "", rule.instead, test


def _notes(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        for extra in hint.__metadata__:
            if isinstance(extra, msgspec.Meta) and extra.description:
                return extra.description
    return ""


def _bounds(hint: Any) -> str:
    """The type and its limits, as `number, >= 0` or `list of string, at most 16`."""
    schema = msgspec.json.schema(hint)
    schema = schema.get("$defs", {}).get(re.sub(r".*/", "", schema.get("$ref", "")), schema)
    return in_words(schema)


if __name__ == "__main__":
    sys.stdout.write(render(shown_fields(Path(sys.argv[1]))))
