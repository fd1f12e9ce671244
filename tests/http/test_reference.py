"""The printed API reference."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from colibrid.http.reference import OBJECTS, REFUSED, render, shown_fields
from colibrid.http.routes import ROUTES, Route

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "reference" / "api.md"
BODIES = [route for route in ROUTES if route.body is not None]
SHOWN = shown_fields(TESTS)


def names_of(kind: type[msgspec.Struct]) -> set[str]:
    return {field.encode_name for field in msgspec.structs.fields(kind)}


def test_page_is_current() -> None:
    """docs/reference/api.md is what types and tests say; print it again after changing them."""
    assert PAGE.read_text(encoding="utf-8") == render(SHOWN)


@pytest.mark.parametrize("route", BODIES, ids=lambda route: route.path)
def test_no_field_is_both_honoured_and_refused(route: Route) -> None:
    """Each field of a route is either honoured or refused."""
    assert route.body is not None
    assert not names_of(route.body) & route.refused.keys()


@pytest.mark.parametrize("route", BODIES, ids=lambda route: route.path)
def test_every_field_has_a_test(route: Route) -> None:
    """Some test is marked with each field that a route honours; mark the new one with pytest.mark.fields."""
    assert route.body is not None
    assert not sorted(name for name in names_of(route.body) if (route.path, name) not in SHOWN)


@pytest.mark.parametrize("name", OBJECTS)
def test_every_field_of_an_object_has_a_test(name: str) -> None:
    """The same for the fields of objects that several routes have."""
    assert not sorted(field for field in names_of(OBJECTS[name]) if (name, field) not in SHOWN)


def test_marks_name_fields_that_exist() -> None:
    """No mark names a field that no route has, and refused fields have their test."""
    known = {(name, field) for name, kind in OBJECTS.items() for field in names_of(kind)} | {REFUSED}
    known |= {(route.path, field) for route in BODIES if route.body is not None for field in names_of(route.body)}
    assert not SHOWN.keys() - known
    assert REFUSED in SHOWN


def test_marks_are_found(tmp_path: Path) -> None:
    """The first test of a field in order of files is named, whether or not it is asynchronous."""
    (tmp_path / "test_b.py").write_text('@pytest.mark.fields("/x", "a", "b")\ndef test_later(): ...\n')
    (tmp_path / "test_a.py").write_text(
        '@pytest.mark.fields("/x", "a")\n@pytest.mark.fields("refused")\nasync def test_first(): ...\n'
    )
    assert shown_fields(tmp_path) == {
        ("/x", "a"): "test_a: test_first",
        ("/x", "b"): "test_b: test_later",
        ("refused", ""): "test_a: test_first",
    }
