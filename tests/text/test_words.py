"""Many words as one pattern."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibrid.text.words import longest_of

LETTERS = st.text(alphabet="ab<|.", max_size=6)


@given(words=st.lists(LETTERS, max_size=8), text=st.text(alphabet="ab<|.", max_size=30))
def test_the_longest_word_at_each_place(words: list[str], text: str) -> None:
    """At every place the pattern matches the longest word that begins there, and nothing where none does."""
    pattern = longest_of(words)
    for place in range(len(text) + 1):
        expected = max((word for word in words if word and text.startswith(word, place)), key=len, default=None)
        found = pattern.match(text, place)
        assert (None if found is None else found.group()) == expected


@pytest.mark.parametrize("words", [[], [""]])
def test_no_words_match_nothing(words: list[str]) -> None:
    """Without words nothing is found, not even the empty string."""
    assert longest_of(words).search("abc") is None


def test_common_beginnings_are_shared() -> None:
    """Words that begin alike are tried together, which keeps a search through their beginnings cheap."""
    words = [f"<|reserved_{index}|>" for index in range(1000)]
    assert len(longest_of(words).pattern) < 10 * len(words)


def test_what_words_hold_is_literal() -> None:
    """Characters that mean something in patterns stand for themselves."""
    assert longest_of(["a.c", "[x]", "^$"]).findall("abc a.c x [x] ^$") == ["a.c", "[x]", "^$"]


def test_very_long_words() -> None:
    """A word of any length makes no deep nesting."""
    word = "ab" * 5000
    assert longest_of([word, word[:-1]]).fullmatch(word) is not None
