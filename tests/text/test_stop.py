"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from colibrid.text.stop import StopMatcher

ALPHABET = "abc"
texts = st.text(alphabet=ALPHABET, max_size=40)
stop_lists = st.lists(st.text(alphabet=ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4)


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The rule, letter by letter: the first stop string to be complete, of two the longer."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def cut(text: str, places: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(borders)]


@given(texts, stop_lists, st.lists(st.integers(0, 100)), st.booleans())
def test_outcome_follows_the_rule_however_text_is_cut(
    text: str, stops: list[str], places: list[int], include: bool
) -> None:
    """Whatever the pieces, the text given out is the text before the first complete stop string."""
    matcher = StopMatcher(stops, include=include)
    out = ""
    for piece in cut(text, places):
        out += matcher.push(piece)
        if matcher.matched is not None:
            break
    else:
        out += matcher.flush()
    assert (out, matcher.matched) == expected(text, stops, include)


@given(texts, stop_lists, st.lists(st.integers(0, 100)))
def test_nothing_leaks(text: str, stops: list[str], places: list[int]) -> None:
    """At no time has any part of the stop string that will be found been given out."""
    final, _stop = expected(text, stops, include=False)
    matcher = StopMatcher(stops)
    out = ""
    for piece in cut(text, places):
        out += matcher.push(piece)
        assert final.startswith(out)
        if matcher.matched is not None:
            break


@given(texts, stop_lists)
def test_as_little_as_possible_is_held_back(text: str, stops: list[str]) -> None:
    """What is held back is the beginning of a stop string, never more."""
    matcher = StopMatcher(stops)
    seen = out = ""
    for letter in text:
        seen += letter
        out += matcher.push(letter)
        if matcher.matched is not None:
            break
        held = seen[len(out) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_unarmed_text_ends_nothing() -> None:
    """A stop string that ends while unarmed is text; one that only begins there still counts."""
    matcher = StopMatcher(["ab"])
    assert matcher.push("xab", armed=False) == "xab"
    assert matcher.push("ya", armed=False) == "y"
    assert matcher.push("bz") == ""
    assert matcher.matched == "ab"


def test_without_stop_strings_text_passes() -> None:
    """Nothing is held back when there is nothing to find."""
    matcher = StopMatcher([])
    assert matcher.push("abc") == "abc"
    assert matcher.flush() == ""
