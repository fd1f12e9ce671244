"""Bounds that need the model."""

from __future__ import annotations

from typing import Any

import pytest

from colibrid.errors import RequestError
from colibrid.http.params import check_ids, prompt_entries, token_limit


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


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), ([1], [[1]]), (["a"], ["a"]), ([[1], "a"], [[1], "a"]), (["a", [2]], ["a", [2]])],
)
def test_prompt_forms(prompt: Any, expected: list[Any]) -> None:
    """Every form of a prompt becomes a list of texts and lists of ids."""
    assert prompt_entries(prompt) == expected


def test_ids_are_checked_at_both_ends() -> None:
    """The first and the last id of the vocabulary are fine, their neighbours are not."""
    check_ids([0, 9], 10, "prompt")
    for wrong in (-1, 10):
        with pytest.raises(RequestError, match=rf"prompt\[1\] = {wrong}"):
            check_ids([5, wrong], 10, "prompt")
