"""The printed API reference."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from colibrid.http.reference import render
from colibrid.http.types import CHAT_REFUSED, COMPLETION_REFUSED, ChatBody, CompletionBody

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "api.md"


def test_page_is_current():
    """docs/reference/api.md is what the types say; print it again after changing them."""
    assert PAGE.read_text(encoding="utf-8") == render()


@pytest.mark.parametrize(("kind", "refused"), [(CompletionBody, COMPLETION_REFUSED), (ChatBody, CHAT_REFUSED)])
def test_no_field_is_both_honoured_and_refused(kind, refused):
    """Each field of a route is either honoured or refused, and every honoured one of the route itself has a note."""
    names = {field.encode_name for field in msgspec.structs.fields(kind)}
    assert not names & refused.keys()
