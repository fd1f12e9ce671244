"""JSON schemas in words: `number, >= 0, <= 2`, `list of string, at most 16`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

_LIMITS = (
    ("minimum", ">= {}"),
    ("exclusiveMinimum", "> {}"),
    ("maximum", "<= {}"),
    ("exclusiveMaximum", "< {}"),
    ("minLength", "at least {} characters"),
    ("maxLength", "at most {} characters"),
    ("minItems", "at least {}"),
    ("maxItems", "at most {}"),
    ("maxProperties", "at most {}"),
)


def in_words(schema: Mapping[str, Any]) -> str:
    """The type and its limits; null, which means absent everywhere, is left out."""
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", maxsplit=1)[-1]
    if "anyOf" in schema:
        return " or ".join(in_words(part) for part in schema["anyOf"] if part.get("type") != "null")
    if "enum" in schema:
        return ", ".join(f"`{as_json(value)}`" for value in schema["enum"] if value is not None)
    kind = str(schema.get("type", "any"))
    if kind == "array":
        items = in_words(schema["items"])
        kind = f"list of ({items})" if "anyOf" in schema["items"] else f"list of {items}"
    elif kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        kind = f"object of {in_words(schema['additionalProperties'])}"
    limits = [words.format(schema[key]) for key, words in _LIMITS if key in schema]
    return ", ".join([kind, *limits])


def as_json(value: object) -> str:
    """`value` as one writes it in a request."""
    return msgspec.json.encode(value).decode()
