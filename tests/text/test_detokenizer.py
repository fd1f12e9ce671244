"""Ids to text, piece by piece."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibrid.text.detokenizer import ByteDetokenizer, WindowDetokenizer, detokenizer

if TYPE_CHECKING:
    from colibrid.text.tokenizer import Tokenizer

byte_level_ids = st.lists(st.one_of(st.integers(0, 255), st.integers(0, 4095)))
TEXTS = [
    "The capital of Norway is Oslo.",
    "日本語 élan 🇳🇴 👩‍👩‍👧 ñ",
    "a\u0301 Ω≈ç√",
    "  two  spaces\n\n\ttab",
    "\ufffd real",
]


def pieces(tokenizer: Tokenizer, ids: list[int], **options: Any) -> list[str]:
    decoder = detokenizer(tokenizer, skip_special_tokens=options.get("skip", False))
    return [*map(decoder.push, ids), decoder.flush()]


@given(byte_level_ids)
def test_pieces_join_to_the_whole(byte_level: Tokenizer, ids: list[int]) -> None:
    """Whatever the ids, even broken characters, the pieces join to the library's own decoding."""
    assert "".join(pieces(byte_level, ids)) == byte_level.decode(ids, skip_special_tokens=False)


@given(byte_level_ids)
def test_special_tokens_can_be_left_out(byte_level: Tokenizer, ids: list[int]) -> None:
    """With skip_special_tokens the pieces join to the decoding without special tokens."""
    assert "".join(pieces(byte_level, ids, skip=True)) == byte_level.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_no_piece_splits_a_character(request: pytest.FixtureRequest, kind: str, text: str) -> None:
    """Pieces of valid text hold whole characters only, and join to it."""
    tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    found = pieces(tokenizer, ids)
    assert "".join(found) == tokenizer.decode(ids, skip_special_tokens=False)
    assert "".join(found).count("\ufffd") == text.count("\ufffd")
    assert found[-1] == ""


@given(st.text())
def test_byte_fallback_joins_to_the_whole(byte_fallback: Tokenizer, text: str) -> None:
    """For byte-fallback tokenizers the pieces of any text join to the library's decoding."""
    ids = byte_fallback.encode(text, add_special_tokens=False)
    assert "".join(pieces(byte_fallback, ids)) == byte_fallback.decode(ids, skip_special_tokens=False)


@given(st.text(alphabet="the Oslo abcé日本."))
def test_own_decoders_join_to_the_whole(own_decoder: Tokenizer, text: str) -> None:
    """For other decoders the window gives pieces that join to the library's decoding."""
    ids = own_decoder.encode(text, add_special_tokens=False)
    assert "".join(pieces(own_decoder, ids)) == own_decoder.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("text", TEXTS)
def test_window_equals_bytes(byte_level: Tokenizer, text: str) -> None:
    """Both ways give the same text."""
    ids = byte_level.encode(text, add_special_tokens=False)
    joined = []
    for kind in (ByteDetokenizer, WindowDetokenizer):
        decoder = kind(byte_level, frozenset())
        joined.append("".join([*map(decoder.push, ids), decoder.flush()]))
    assert joined[0] == joined[1] == text.replace("a\u0301", "á")


def test_unfinished_character_is_replaced_at_the_end(byte_level: Tokenizer) -> None:
    """A character that is never finished is held back, then reads as U+FFFD."""
    first = byte_level.encode("日", add_special_tokens=False)[0]
    decoder = detokenizer(byte_level, skip_special_tokens=False)
    assert decoder.push(first) == ""
    assert decoder.flush() == "\ufffd"


def test_broken_bytes_do_not_hold_text_back(byte_level: Tokenizer) -> None:
    """After a broken character the text goes on with the next good one."""
    broken = byte_level.encode("日", add_special_tokens=False)[0]
    assert pieces(byte_level, [broken, 64]) == ["", "\ufffda", ""]
