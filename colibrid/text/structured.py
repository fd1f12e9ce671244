"""From what a client asks for (a JSON Schema, a regex, choices, a grammar) to a grammar for llguidance. Pure.

Bounds of size and depth are checked here, cheaply and with messages that name the field; what remains is tried out in
another process (structured_check.py).
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import msgspec

from colibrid.errors import RequestError
from colibrid.text.structured_limits import (
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    MAX_NESTING,
    MAX_REGEX_BYTES,
    MAX_SCHEMA_DEPTH,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# JSON is written as json.dumps writes it: room for white space is room to ramble.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_STYLE_KEY = "x-guidance"
_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"|\\.')
# Keywords under which an object may get properties from more than one schema.
_MIXING = frozenset({"allOf", "not", "if", "then", "else", "dependentSchemas", "dependencies", "$dynamicRef"})
_OPEN = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties", "anyOf",
                   "oneOf", "$ref"})  # fmt: skip
_SCHEMAS_BY_NAME = ("properties", "$defs", "definitions")
_SCHEMA_LISTS = ("anyOf", "oneOf", "prefixItems")


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer must be: a grammar in llguidance's words."""

    param: str  # the field that asked for it
    lark: str = ""  # either this
    schema: str = ""  # or a JSON Schema
    outer: tuple[str, ...] = ()  # Lark around it: in the first line of each @body stands for what is inside

    @property
    def text(self) -> str:
        """As LLMatcher takes it."""
        body = {"lark_grammar": self.lark} if self.lark else {"json_schema": msgspec.Raw(self.schema.encode())}
        grammars: list[dict[str, Any]] = []
        for index, lark in enumerate(self.outer):
            first, line, rest = lark.partition("\n")
            inside = first.replace("@body", f"@g{index + 1}")
            grammars.append({"name": f"g{index}", "lark_grammar": inside + line + rest})
        grammars.append({"name": f"g{len(self.outer)}"} | body)
        return msgspec.json.encode({"grammars": grammars}).decode()


def any_object(param: str) -> Grammar:
    """Any JSON object."""
    return json_schema({"type": "object"}, param)


def json_schema(schema: object, param: str) -> Grammar:
    """JSON that a schema allows, in the order of its properties. Raises RequestError naming `param`."""
    return Grammar(param=param, schema=schema_text(schema, param))


def schema_text(schema: object, param: str) -> str:
    """The schema as llguidance shall read it, as one line of JSON. Raises RequestError naming `param`."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise RequestError(f"{param}: expected a JSON Schema, which is an object; send one.", param=param)
    _check_depth(schema, param)
    closed = schema if _mixes(schema) else _closed(schema)
    # The standard library's encoder, since keys and values are what the client's decoder made of them.
    text = json.dumps(closed | {_STYLE_KEY: _STYLE}, ensure_ascii=False, allow_nan=False)
    _check_bytes(text, MAX_GRAMMAR_BYTES, param)
    return text


def regex(pattern: str, param: str) -> Grammar:
    """Text that the whole pattern matches."""
    _check_bytes(pattern, MAX_REGEX_BYTES, param)
    _check_nesting(pattern, param)
    if not pattern:
        raise RequestError(f"{param} is empty; send a regular expression.", param=param)
    return Grammar(param=param, lark=f"start: {lark_regex(pattern)}\n")


def choice(choices: Sequence[str], param: str) -> Grammar:
    """One of several texts."""
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise RequestError(f"{param} has {len(choices)} entries; send 1 to {MAX_CHOICES}.", param=param)
    for index, text in enumerate(choices):
        if not text:
            raise RequestError(f"{param}[{index}] is empty; send some text.", param=f"{param}[{index}]")
    lark = "start: " + " | ".join(map(lark_string, dict.fromkeys(choices))) + "\n"
    _check_bytes(lark, MAX_GRAMMAR_BYTES, param)
    return Grammar(param=param, lark=lark)


def grammar(text: str, param: str) -> Grammar:
    """A grammar in Lark's form, as llguidance reads it, whose rule `start` is the answer."""
    _check_bytes(text, MAX_GRAMMAR_BYTES, param)
    _check_nesting(_QUOTED.sub("", text), param)
    if not text.strip():
        raise RequestError(f"{param} is empty; send a grammar with a rule named start.", param=param)
    if "::=" in text:
        raise RequestError(
            f'{param}: this is GBNF or EBNF; write it in Lark\'s form, as rule: "text" other_rule | /regex/.',
            param=param,
        )
    return Grammar(param=param, lark=text)


def both(answer: Grammar, other: Grammar) -> Grammar:
    """What one of two grammars allows, of which the other is Lark with the rule start on its first line."""
    first, line, rest = other.lark.partition("\n")
    return msgspec.structs.replace(answer, outer=(f"{first} | @body{line}{rest}", *answer.outer))


def lark_string(text: str) -> str:
    """`text` as a literal of a grammar."""
    return json.dumps(text, ensure_ascii=False)


def lark_terms(text: str, words: re.Pattern[str], added: Mapping[str, int]) -> str:
    """`text` as terms of a grammar one after another; added tokens, which `words` finds, by their ids."""
    terms, start = [], 0
    for found in words.finditer(text):
        if found.start() > start:
            terms.append(lark_string(text[start : found.start()]))
        terms.append(f"<[{added[found.group()]}]>")
        start = found.end()
    if start < len(text):
        terms.append(lark_string(text[start:]))
    return " ".join(terms)


def lark_regex(pattern: str) -> str:
    """`pattern` as a regex of a grammar."""
    changed = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    return (
        "/"
        + re.sub(r"\\.|[/\n]", lambda found: changed.get(found.group(), found.group()), pattern, flags=re.DOTALL)
        + "/"
    )


# ------------------------------------------------------------------ bounds


def _check_bytes(text: str, most: int, param: str) -> None:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > most:
        raise RequestError(
            f"{param} has {size} bytes, more than the {most} allowed; send less.",
            param=param,
            code="string_above_max_length",
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{param} holds a lone surrogate (half a character); send valid Unicode.", param=param
        ) from error


def _check_nesting(text: str, param: str) -> None:
    depth = deepest = 0
    for found in re.finditer(r"\\.|[(\[{)\]}]", text, flags=re.DOTALL):
        if found.group() in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif depth and len(found.group()) == 1:
            depth -= 1
    if deepest > MAX_NESTING:
        raise RequestError(
            f"{param} has brackets {deepest} levels deep, more than the {MAX_NESTING} allowed; make it flatter.",
            param=param,
        )


def _check_depth(schema: dict[str, Any], param: str) -> None:
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [child for value in level for child in _containers(value)]
        if not level:
            return
    raise RequestError(
        f"{param} is nested more than {MAX_SCHEMA_DEPTH} levels deep; make it flatter, with $defs and $ref.",
        param=param,
    )


def _containers(value: dict[str, Any] | list[Any]) -> Iterator[dict[str, Any] | list[Any]]:
    for child in value.values() if isinstance(value, dict) else value:
        if isinstance(child, dict | list):
            yield child


# ------------------------------------------------------------ closed objects


def _mixes(value: object) -> bool:
    """True iff some keyword may put several schemas on one object. Depth is bounded."""
    if isinstance(value, dict):
        return not _MIXING.isdisjoint(value) or any(map(_mixes, value.values()))
    return isinstance(value, list) and any(map(_mixes, value))


def _closed(schema: Any) -> Any:
    """The schema with only the listed properties in objects that list some and say nothing of others.

    What it allows, the original allows, too; and a model that may add properties adds them without end.
    """
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for name in _SCHEMAS_BY_NAME:
        if isinstance(schema.get(name), dict):
            closed[name] = {key: _closed(value) for key, value in schema[name].items()}
    if isinstance(schema.get("items"), dict):
        closed["items"] = _closed(schema["items"])
    if "properties" in schema:
        if _OPEN.isdisjoint(schema):
            closed["additionalProperties"] = False
        return closed
    for name in _SCHEMA_LISTS:
        if isinstance(schema.get(name), list):
            closed[name] = [_closed(value) for value in schema[name]]
    return closed
