r"""How many values a JSON text holds and how deep they are nested, told without building them. Pure.

JSON's decoder holds the interpreter's lock until it is done: 8 MB of empty lists are half a second in which no other
request moves. Counting characters is a hundred times cheaper, and enough for most texts; only where strings are full of
brackets and commas must they be told apart from the structure. That is done in slices, so that the lock is let go.

    {"prompt": ["a, b [c", [1, 2]]}   ->   {"":["",[,]]}   3 containers, 1 key, 2 strings, 3 levels
"""

from __future__ import annotations

import re
from itertools import accumulate
from typing import TYPE_CHECKING

from colibrid.errors import RequestError
from colibrid.http.limits import MAX_JSON_CONTAINERS, MAX_JSON_DEPTH, MAX_JSON_KEYS, MAX_JSON_STRINGS, MAX_JSON_VALUES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SLICE = 1 << 16  # bytes, about a millisecond
# A string, also one that the text breaks off in; possessive, so that no text takes more than one pass.
_REST = rb'(?:[^"\\]++|\\.)*+(")?'
_STRINGS = re.compile(b'"' + _REST, re.DOTALL)
_REST_OF_STRING = re.compile(_REST, re.DOTALL)
_STEPS = bytes(2 if byte in b"[{" else 0 if byte in b"]}" else 1 for byte in range(256))  # depth change + 1
_COUNTED = (b"[", b"{", b",", b":", b'"')
_MARKS = b'[]{},:"'
_PARTS = re.compile(rb"[\[\]{}]|[,:]+")
_OTHERS = bytes(byte for byte in range(256) if byte not in _MARKS)


def check_outline(*texts: bytes, what: str = "The body", param: str | None = None) -> None:
    """Raises RequestError if JSON texts together have more values, keys or strings, or one more levels, than requests need.

    A text that is not JSON may pass or be refused: the decoder judges it next.
    """
    bounds = [sum(text.count(mark) for text in texts) for mark in _COUNTED]
    if _excess(bounds) is None and bounds[0] + bounds[1] <= MAX_JSON_DEPTH:
        return
    found = [0] * len(_COUNTED)
    for text in texts:
        depth = 0
        for structure in _structure(text):
            found = [count + structure.count(mark) for count, mark in zip(found, _COUNTED, strict=True)]
            deepest, depth = _levels(structure, depth)
            excess = f"{MAX_JSON_DEPTH} levels" if deepest > MAX_JSON_DEPTH else _excess(found)
            if excess is not None:
                raise RequestError(
                    f"{what} holds more than {excess}, which no request needs; send fewer, flatter values.",
                    param=param,
                    code="invalid_json",
                )


def keys_of_object(text: bytes) -> int:
    """How many keys the JSON object `text` is written with, not counting those of objects inside of it."""
    depth = keys = 0
    for structure in _structure(text):
        for part in _PARTS.findall(structure):
            if part in (b"[", b"{"):
                depth += 1
            elif part in (b"]", b"}"):
                depth -= 1
            elif depth == 1:
                keys += part.count(b":")
    return keys


def _excess(counts: Sequence[int]) -> str | None:
    """What there is too much of."""
    lists, objects, commas, colons, quotes = counts
    if lists + objects > MAX_JSON_CONTAINERS:
        return f"{MAX_JSON_CONTAINERS} lists and objects"
    if colons > MAX_JSON_KEYS:
        return f"{MAX_JSON_KEYS} keys"
    if quotes > 2 * MAX_JSON_STRINGS:
        return f"{MAX_JSON_STRINGS} strings"
    return f"{MAX_JSON_VALUES} values" if commas > MAX_JSON_VALUES else None


def _structure(text: bytes) -> Iterator[bytes]:
    """Brackets, commas, colons and the quotes of strings, without what is in them, slice by slice."""
    start, inside = 0, False  # of a string that began in an earlier slice
    while start < len(text):
        end = _slice_end(text, start)
        part = text[start:end]
        if inside:
            rest = _REST_OF_STRING.match(part)
            assert rest is not None, "it matches nothing as well"
            inside, part = rest.group(1) is None, part[rest.end() :]
        for string in _STRINGS.finditer(part):
            inside = string.group(1) is None
        yield _STRINGS.sub(b'""', part).translate(None, _OTHERS)
        start = end


def _slice_end(text: bytes, start: int) -> int:
    """Where the slice from `start` ends: never between a backslash and what it escapes."""
    end = min(start + _SLICE, len(text))
    slashes = end - start - len(text[start:end].rstrip(b"\\"))
    return min(end + slashes % 2, len(text))


def _levels(structure: bytes, depth: int) -> tuple[int, int]:
    """The deepest level in `structure`, which begins at level `depth`, and the level at its end."""
    brackets = structure.translate(None, b',:"')
    if not brackets:
        return depth, depth
    levels = [depth, *accumulate(brackets.translate(_STEPS), lambda level, step: level + step - 1, initial=depth)]
    return max(levels), levels[-1]
