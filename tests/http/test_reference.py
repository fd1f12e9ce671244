"""The printed API reference."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from colibrid.http.reference import render
from colibrid.http.types import CHAT_REFUSED, COMPLETION_REFUSED, ChatBody, CompletionBody

if TYPE_CHECKING:
    from collections.abc import Mapping

    from colibrid.http.types import Refused

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "api.md"


def test_page_is_current() -> None:
    """docs/reference/api.md is what the types say; print it again after changing them."""
    assert PAGE.read_text(encoding="utf-8") == render()


@pytest.mark.parametrize(("kind", "refused"), [(CompletionBody, COMPLETION_REFUSED), (ChatBody, CHAT_REFUSED)])
def test_no_field_is_both_honoured_and_refused(kind: type[msgspec.Struct], refused: Mapping[str, Refused]) -> None:
    """Each field of a route is either honoured or refused, and every honoured one of the route itself has a note."""
    names = {field.encode_name for field in msgspec.structs.fields(kind)}
    assert not names & refused.keys()
