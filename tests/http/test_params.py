"""Bounds that need the model."""

from __future__ import annotations

import pytest

from colibrid.errors import RequestError
from colibrid.http.params import token_limit


@pytest.mark.parametrize(
    ("prompt", "asked", "expected"),
    [(1, None, 16), (2040, None, 8), (2047, None, 1), (2048, 0, 0), (1, 2047, 2047), (5, 3, 3)],
)
def test_token_limit(prompt: int, asked: int | None, expected: int) -> None:
    """What was asked for, else the default, else what the context leaves."""
    assert token_limit(prompt, ("max_tokens", asked), 16, 2048) == expected


@pytest.mark.parametrize(("prompt", "asked"), [(2048, None), (2049, 0), (1, 2048), (2048, 1), (4000, 5)])
def test_token_limit_beyond_the_context(prompt: int, asked: int | None) -> None:
    """What does not fit the context is refused with the numbers."""
    with pytest.raises(RequestError, match="2048") as caught:
        token_limit(prompt, ("max_tokens", asked), 16, 2048)
    assert caught.value.code == "context_length_exceeded"
    assert str(prompt) in caught.value.message
