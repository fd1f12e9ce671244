"""Grammars made of what clients ask for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from colibrid.errors import RequestError
from colibrid.text import structured

if TYPE_CHECKING:
    from collections.abc import Callable

A = {"a": {"type": "integer"}}
CLOSED = {"properties": A, "additionalProperties": False}


def as_read(schema: object) -> Any:
    """The schema that llguidance gets, without the style of its JSON."""
    read = json.loads(structured.schema_text(schema, "s"))
    assert read.pop("x-guidance")["whitespace_flexible"] is False
    return read


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"properties": A}, CLOSED),
        ({"properties": {"b": {"properties": A}}}, {"properties": {"b": CLOSED}, "additionalProperties": False}),
        ({"items": {"properties": A}}, {"items": CLOSED}),
        ({"anyOf": [{"properties": A}, True]}, {"anyOf": [CLOSED, True]}),
        ({"$defs": {"d": {"properties": A}}, "$ref": "#/$defs/d"}, {"$defs": {"d": CLOSED}, "$ref": "#/$defs/d"}),
        ({"type": "object"}, {"type": "object"}),
        (True, {}),
        (False, {"not": {}}),
    ],
)
def test_objects_that_say_nothing_of_others_are_closed(schema: object, expected: object) -> None:
    """Properties are the listed ones where some are listed and nothing is said of others."""
    assert as_read(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": A, "additionalProperties": {"type": "string"}},
        {"properties": A, "patternProperties": {"^b": {}}},
        {"properties": A, "minProperties": 3},
        {"properties": A, "anyOf": [{"properties": {"b": {}}}]},
        {"allOf": [{"properties": A}, {"properties": {"b": {}}}]},
        {"properties": {"p": {"if": {}, "then": {}}}},
    ],
)
def test_what_may_have_other_properties_stays_open(schema: object) -> None:
    """Where other properties are spoken of, or may come from another schema, nothing is added."""
    assert as_read(schema) == schema


def test_styles_of_clients_are_not_taken() -> None:
    """A client's own x-guidance does not set how schemas are compiled."""
    read = json.loads(structured.schema_text({"x-guidance": {"lenient": True}}, "s"))
    assert "lenient" not in read["x-guidance"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("a/b", r"/a\/b/"), (r"a\/b", r"/a\/b/"), ("a\nb", r"/a\nb/"), (r"\\/", r"/\\\//"), ("[/]", r"/[\/]/")],
)
def test_regexes_are_quoted(pattern: str, expected: str) -> None:
    """A slash does not end a regex, escaped or not."""
    assert structured.lark_regex(pattern) == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda: structured.json_schema([], "p"),
        lambda: structured.json_schema({"a": "\ud800"}, "p"),
        lambda: structured.json_schema({"enum": ["x" * 70_000]}, "p"),
        lambda: structured.regex("[" * 65, "p"),
        lambda: structured.regex("\ud800", "p"),
        lambda: structured.choice([], "p"),
        lambda: structured.choice(["x" * 70_000], "p"),
        lambda: structured.grammar("a ::= b", "p"),
        lambda: structured.grammar("start: " + "[" * 65, "p"),
    ],
)
def test_bounds(make: Callable[[], structured.Grammar]) -> None:
    """What is too large, too deep or no text is refused with the field's name."""
    with pytest.raises(RequestError) as caught:
        make()
    assert caught.value.param == "p"


def test_brackets_in_literals_do_not_count() -> None:
    """Quoted and escaped brackets are not nesting; brackets that close are over."""
    structured.grammar("start: " + '"(((" ' * 100 + "(a) " * 100, "p")
    structured.regex(r"\(" * 200 + "(a)" * 100, "p")


def test_something_may_stand_around() -> None:
    """What is around a grammar names what is inside @body, on its first line only."""
    inner = structured.json_schema({"const": "@body"}, "p")
    around = structured.Grammar(param="p", schema=inner.schema, outer=("start: a @body\na: @body\n", "start: @body\n"))
    first, second, body = json.loads(around.text)["grammars"]
    assert first == {"name": "g0", "lark_grammar": "start: a @g1\na: @body\n"}
    assert second == {"name": "g1", "lark_grammar": "start: @g2\n"}
    assert (body["name"], body["json_schema"]["const"]) == ("g2", "@body")


def test_either_of_two() -> None:
    """An answer or calls: the other grammar's first line gets one more alternative."""
    answer = structured.regex("a", "p")
    calls = structured.Grammar(param="q", lark='start: calls\ncalls: "x"\n')
    assert structured.both(answer, calls) == structured.Grammar(
        param="p", lark=answer.lark, outer=('start: calls | @body\ncalls: "x"\n',)
    )
