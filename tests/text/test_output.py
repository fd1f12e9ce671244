"""The text of one generation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from colibrid.text.output import OutputOptions, OutputText

if TYPE_CHECKING:
    from colibrid.text.tokenizer import Tokenizer


def run(tokenizer: Tokenizer, ids: list[int], **options: Any) -> tuple[str, OutputText]:
    text = OutputText(tokenizer, OutputOptions(**options))
    pieces = []
    for token in ids:
        pieces.append(text.push(token))
        if text.stopped:
            break
    pieces.append(text.finish())
    return "".join(pieces), text


def test_stop_ids_have_no_text(byte_level: Tokenizer) -> None:
    """A stop id, special or not, is no part of the text unless it is asked for."""
    ids = [568, 572, 64]
    assert run(byte_level, ids, stop_token_ids=frozenset({64}))[0] == "The capital"
    assert run(byte_level, ids, stop_token_ids=frozenset({64}), include_stop=True)[0] == "The capitala"
    assert run(byte_level, [568, 4093], stop_token_ids=frozenset({4093}), include_stop=True)[0] == "The"


def test_stop_string_counts_its_tokens(byte_level: Tokenizer) -> None:
    """After a stop string the count holds the token that completed it."""
    text, output = run(byte_level, [568, 572, 281], stops=("cap",))
    assert (text, output.stopped, output.tokens) == ("The ", True, 2)


def test_stop_string_in_the_last_character(byte_level: Tokenizer) -> None:
    """A stop string that only the replacement of a broken character completes ends the text too."""
    broken = byte_level.encode("日", add_special_tokens=False)[0]
    text, output = run(byte_level, [568, broken], stops=("e\ufffd",))
    assert (text, output.stopped) == ("Th", True)


def test_held_text_comes_at_the_end(byte_level: Tokenizer) -> None:
    """Text held back for a stop string that never came is given out at the end."""
    assert run(byte_level, [568, 572], stops=("capitalist",))[0] == "The capital"


def test_offsets_count_characters(byte_level: Tokenizer) -> None:
    """chars is where the next token begins, whatever is held back."""
    output = OutputText(byte_level, OutputOptions(stops=("The capital of",)))
    starts = []
    for token in (568, 572, 303):
        starts.append(output.chars)
        output.push(token)
    assert starts == [0, 3, 11]


@given(
    st.lists(st.one_of(st.integers(0, 255), st.integers(0, 4095)), max_size=30),
    st.lists(st.sampled_from(["a", "e", " t", "th", "\n", "\ufffd", "capital"]), max_size=3),
    st.integers(0, 5),
)
def test_pieces_are_the_text_up_to_the_stop(
    byte_level: Tokenizer, ids: list[int], stops: list[str], min_tokens: int
) -> None:
    """Whatever ids and stop strings, pieces join to the whole text, or to what stands before the stop string found."""
    text, output = run(byte_level, ids, stops=tuple(stops), min_tokens=min_tokens)
    whole = byte_level.decode(ids, skip_special_tokens=True)
    assert whole.startswith(text)
    if output.stopped:
        assert any(whole.startswith(stop, len(text)) for stop in stops)
    else:
        assert text == whole
        if not min_tokens:
            assert not any(stop in whole for stop in stops)


@given(st.lists(st.lists(st.one_of(st.integers(0, 255), st.integers(0, 4095)), max_size=9), max_size=5), st.booleans())
def test_ids_together_are_as_ids_one_by_one(
    byte_level: Tokenizer, batches: list[list[int]], include_stop: bool
) -> None:
    """However ids are gathered, text, characters and count are those of pushing each; stop ids stay silent."""
    options = OutputOptions(stop_token_ids=frozenset({64, 568}), include_stop=include_stop)
    one, other = OutputText(byte_level, options), OutputText(byte_level, options)
    for batch in batches:
        assert "".join(map(one.push, batch)) == other.push_all(batch)
        assert (one.tokens, one.chars) == (other.tokens, other.chars)
    assert one.finish() == other.finish()
