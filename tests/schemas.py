"""Seeded random JSON Schemas of bounded size: what structured output is tried on."""

from __future__ import annotations

import random
from typing import Any

_WORDS = ["name", "city", "age", "unit", "score", "tags", "ok", "code", "place", "kind", "note", "size"]
_PATTERNS = ["^[a-z]{2,6}$", "^[A-Z]{3}-[0-9]{2}$", "^(red|green|blue)$", "^[0-9]{4}$", "[a-f]{1,3}x"]


def schemas(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Objects of up to four properties, some optional, nested up to three levels."""
    rng = random.Random(seed)
    return [_object(rng, 2) for _ in range(count)]


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_WORDS, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_integer, _number, _string, _pattern, _enum, _simple]
    nested = [_array, _optional, _object, _union] if depth else []
    return rng.choice(kinds + nested)(rng, depth - 1 if depth else 0)


def _integer(rng: random.Random, _depth: int) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, rng.choice(["maximum", "exclusiveMaximum"]): low + rng.randint(1, 5000)}


def _number(rng: random.Random, _depth: int) -> dict[str, Any]:
    # A number has as many digits as the model likes; whole multiples keep it short.
    low = rng.randint(0, 50)
    return {"type": "number", "minimum": low, "maximum": low + rng.randint(1, 100), "multipleOf": 0.25}


def _string(rng: random.Random, _depth: int) -> dict[str, Any]:
    low = rng.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(1, 12)}


def _pattern(rng: random.Random, _depth: int) -> dict[str, Any]:
    return {"type": "string", "pattern": rng.choice(_PATTERNS), "maxLength": 12}


def _enum(rng: random.Random, _depth: int) -> dict[str, Any]:
    return {"enum": rng.sample(["north", "south", 'ea"st', "wé st", 1, 2.5, True, None], rng.randint(1, 5))}


def _simple(rng: random.Random, _depth: int) -> dict[str, Any]:
    return rng.choice([{"type": "boolean"}, {"type": "null"}, {"const": "fixed"}])


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    return {"type": "array", "items": _value(rng, depth), "minItems": low, "maxItems": low + rng.randint(0, 2)}


def _optional(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_value(rng, depth), {"type": "null"}]}


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_value(rng, depth), _value(rng, depth)]}
