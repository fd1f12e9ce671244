"""What a JSON text holds, told without building it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibrid.errors import RequestError
from colibrid.http import outline
from colibrid.http.limits import (
    MAX_JSON_CONTAINERS,
    MAX_JSON_DEPTH,
    MAX_JSON_KEYS,
    MAX_JSON_STRINGS,
    MAX_JSON_VALUES,
)
from colibrid.http.outline import check_outline

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='[]{},:"\\aé'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='[]{},:"\\aé'), inner),
    max_leaves=30,
)


def depth_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)


@given(values, st.integers(1, 40))
def test_levels_are_those_of_the_structure(value: Any, slice_bytes: int) -> None:
    """Whatever strings hold, and wherever slices end, the deepest level is that of the value itself."""
    raw = json.dumps(value, ensure_ascii=False).encode()
    depth = deepest = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outline, "_SLICE", slice_bytes)
        for structure in outline._structure(raw):
            found, depth = outline._levels(structure, depth)
            deepest = max(deepest, found)
    assert (deepest, depth) == (depth_of(value), 0)


@pytest.mark.parametrize("value", ["[" * 500_000, '\\"' * 300_000, ",:" * 300_000, '"' * 9])
def test_strings_are_no_structure(value: str) -> None:
    """A long text of brackets, commas and quotes is one value."""
    check_outline(json.dumps({"prompt": [value] * 2}).encode())


@pytest.mark.parametrize(
    ("raw", "limit"),
    [
        (b"[" * (MAX_JSON_DEPTH + 1), MAX_JSON_DEPTH),
        (b'{"a":' * 100_000, MAX_JSON_DEPTH),
        (b"[" + b"[]," * MAX_JSON_CONTAINERS, MAX_JSON_CONTAINERS),
        (b"{" + b'"a":1,' * (MAX_JSON_KEYS + 1), MAX_JSON_KEYS),
        (b"[" + b"1," * (MAX_JSON_VALUES + 1), MAX_JSON_VALUES),
        (b"[" + b'"",' * (MAX_JSON_STRINGS + 1), MAX_JSON_STRINGS),
    ],
)
def test_more_than_any_request_needs_is_refused(raw: bytes, limit: int) -> None:
    """Too many levels, lists and objects, keys or values are refused with the limit."""
    with pytest.raises(RequestError, match=str(limit)):
        check_outline(raw)


def test_what_requests_need_passes() -> None:
    """As many ids as the limit, as many lists, and the deepest nesting that is allowed."""
    check_outline(b"[" + b"1," * (MAX_JSON_VALUES - 1) + b"1]")
    check_outline(b"[" + b"[1]," * (MAX_JSON_CONTAINERS - 2) + b"[1]]")
    check_outline(b"[" * MAX_JSON_DEPTH + b"]" * MAX_JSON_DEPTH)


def test_texts_count_together() -> None:
    """What several texts hold is added up; the depth of each is its own."""
    half = b"[" + b"[1]," * (MAX_JSON_CONTAINERS // 2 - 1) + b"1]"
    check_outline(half, half)
    with pytest.raises(RequestError, match=str(MAX_JSON_CONTAINERS)):
        check_outline(half, half, half)
    deep = b"[" * 100
    check_outline(deep, deep, deep)


@given(st.dictionaries(st.text(alphabet='{}:,"ab'), values), st.integers(1, 40))
def test_keys_of_an_object_are_counted(value: Any, slice_bytes: int) -> None:
    """Only its own keys count, whatever stands in strings and inside of it."""
    raw = json.dumps(value, ensure_ascii=False).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outline, "_SLICE", slice_bytes)
        assert outline.keys_of_object(raw) == len(value)


@given(st.binary(max_size=300), st.integers(1, 20))
def test_any_bytes_end(raw: bytes, slice_bytes: int) -> None:
    """Bytes that are no JSON are passed or refused, and slices cover them all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outline, "_SLICE", slice_bytes)
        assert sum(part.count(b"[") for part in outline._structure(raw)) <= raw.count(b"[")
