"""Prints docs/reference/api.md from the request types: python -m colibrid.http.reference > docs/reference/api.md"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Annotated, Any, get_origin, get_type_hints

import msgspec

from colibrid.http.schema_text import as_json, in_words
from colibrid.http.types import (
    CHAT_REFUSED,
    COMPLETION_REFUSED,
    GENERATE_REFUSED,
    ChatBody,
    CompletionBody,
    Experts,
    GenerateBody,
    Message,
    Refused,
    StreamOptions,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_INTRODUCTION = """\
# API reference

Printed from `colibrid/http/types.py` by `python -m colibrid.http.reference`; do not edit.

Every field is honoured, or refused by name with status 400. Null means absent. Fields that are not listed are
accepted and named in the response header `x-colibri-ignored`; with `server.strict: true` they are 400.

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
- A body may be large in `prompt` or `messages` only: all its other fields together have at most 256 KiB.
- Special-token strings are parsed in `/v1/completions` and are plain text in the contents of chat messages.
- The role `developer` reads as `system` for templates that do not know it; text parts are joined by a newline.
"""


def render() -> str:
    """The whole page."""
    parts = [
        _INTRODUCTION,
        _section("POST /v1/completions", CompletionBody, COMPLETION_REFUSED),
        _section("POST /v1/chat/completions", ChatBody, CHAT_REFUSED),
        _section("POST /generate", GenerateBody, GENERATE_REFUSED),
        _section("Entries of `messages`", Message, {}),
        _section("`stream_options`", StreamOptions, {}),
        _section("`experts`", Experts, {}),
        _DEVIATIONS,
    ]
    return "".join(parts)


def _section(title: str, kind: type[msgspec.Struct], refused: Mapping[str, Refused]) -> str:
    rows = [*_honoured(kind), *_refused(refused)]
    head = f"## {title}\n\n| field | | bounds | notes |\n|---|---|---|---|\n"
    return (
        head + "".join(f"| `{name}` | {state} | {bounds} | {notes} |\n" for name, state, bounds, notes in rows) + "\n"
    )


def _honoured(kind: type[msgspec.Struct]) -> Iterator[tuple[str, str, str, str]]:
    hints = get_type_hints(kind, include_extras=True)
    own = list(kind.__annotations__)  # fields of the route itself come first
    fields = sorted(msgspec.structs.fields(kind), key=lambda field: own.index(field.name) if field.name in own else 99)
    for field in fields:
        yield field.encode_name, "implemented", _bounds(hints[field.name]), _notes(hints[field.name])


def _refused(refused: Mapping[str, Refused]) -> Iterator[tuple[str, str, str, str]]:
    for name, rule in sorted(refused.items()):
        taken = ", ".join(f"`{as_json(value)}`" for value in rule.harmless)
        yield name, "not implemented: 400", f"only {taken}" if taken else "", rule.instead


def _notes(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        for extra in hint.__metadata__:
            if isinstance(extra, msgspec.Meta) and extra.description:
                return extra.description
    return ""


def _bounds(hint: Any) -> str:
    """The type and its limits, as `float 0..2` or `list of str, at most 16`."""
    schema = msgspec.json.schema(hint)
    schema = schema.get("$defs", {}).get(re.sub(r".*/", "", schema.get("$ref", "")), schema)
    return in_words(schema)


if __name__ == "__main__":
    sys.stdout.write(render())
