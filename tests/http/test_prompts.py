"""Prompts in all their forms."""

from __future__ import annotations

from typing import Any

import pytest

from colibrid.errors import RequestError
from colibrid.http.prompts import Prompt, check_ids, prompt_entries, truncated


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


@pytest.mark.parametrize(("asked", "kept"), [(None, 10), (3, 3), (10, 10), (11, 10), (-1, 10)])
def test_truncation_keeps_the_end(server: Any, asked: int | None, kept: int) -> None:
    """The last ids are kept; the text is forgotten when not all of it is used."""
    whole = Prompt(tuple(range(10)), "0123456789")
    found = truncated(whole, asked, server.state.scheduler.info.max_seq_len - 16)
    assert found.ids == whole.ids[-kept:]
    assert found.text == (whole.text if kept == 10 else None)
