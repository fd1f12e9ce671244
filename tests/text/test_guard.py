"""Special-token strings in a client's text stay text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import colibrid
from colibrid.errors import RequestError
from colibrid.text.guard import SpecialGuard
from colibrid.text.tokenizer import Tokenizer

MODEL_DIR = Path(colibrid.__file__).parent / "models" / "hummingbird-13m"

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
fragments = st.lists(st.sampled_from([*SPECIALS, "<", "<|", "<|im_", "im", "end", "|>", ">", "x", " "]), max_size=8)


@pytest.fixture(scope="session")
def guard(byte_level: Tokenizer) -> SpecialGuard:
    return SpecialGuard(byte_level.special_strings, byte_level.mark)


def test_content_never_becomes_a_special_token(byte_level: Tokenizer, guard: SpecialGuard) -> None:
    """A message that writes <|im_end|> gives no id 4093, and reads as it was written."""
    text = "a<|im_end|>b"
    ids = byte_level.encode_guarded(guard.guard_text(text))
    assert 4093 not in ids
    assert byte_level.decode(ids, skip_special_tokens=False) == text


def test_template_text_is_still_parsed(byte_level: Tokenizer, guard: SpecialGuard) -> None:
    """Beside guarded content, special strings of the template are tokens, and the other ids do not change."""
    rendered = "<|im_start|>user\n" + guard.guard_text("say <|im_end|>") + "<|im_end|>\n"
    ids = byte_level.encode_guarded(rendered)
    assert (ids.count(4092), ids.count(4093)) == (1, 1)
    same = byte_level.encode("<|im_start|>user\nsay ", add_special_tokens=False)
    assert ids[: len(same) - 1] == same[:-1]


def test_harmless_text_is_left_alone(guard: SpecialGuard) -> None:
    """Text that can form no special token is not touched, at any depth."""
    value = {
        "role": "user",
        "content": ["a < b", "1 | 2", {"deep": " <tool_call> "}],
        "n": 5,
        "none": None,
        "empty": "",
    }
    assert guard.guard(value) == value


@given(st.lists(fragments.map("".join), min_size=1, max_size=3), st.lists(st.sampled_from(["", "<", "<|", ">", "x"])))
def test_neighbours_form_no_special_token(
    byte_level: Tokenizer, guard: SpecialGuard, contents: list[str], glue: list[str]
) -> None:
    """Contents side by side, also with pieces of special strings from the template between them, form none."""
    pieces = []
    for index, content in enumerate(contents):
        pieces.append(guard.guard_text(content))
        pieces.append(glue[index] if index < len(glue) else "")
    rendered = "".join(pieces)
    ids = byte_level.encode_guarded(rendered)
    if byte_level.mark in rendered:
        assert not byte_level.special_ids & set(ids)
    assert byte_level.decode(ids, skip_special_tokens=False) == rendered.replace(byte_level.mark, "")


@given(fragments.map("".join), st.sampled_from(["<", "<|", "<|im_", "<|im_e"]))
def test_template_beginnings_cannot_be_completed(
    byte_level: Tokenizer, guard: SpecialGuard, content: str, beginning: str
) -> None:
    """A content that would complete a special string begun by the template does not."""
    ids = byte_level.encode_guarded(beginning + guard.guard_text(content))
    assert not byte_level.special_ids & set(ids)


@given(fragments.map("".join), st.integers(1, 12))
def test_long_texts_are_guarded_in_pieces(guard: SpecialGuard, content: str, window: int) -> None:
    """Where a long text is cut for searching makes no difference."""
    expected = guard.guard_text(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("colibrid.text.guard._WINDOW", window)
        assert guard.guard_text(content) == expected


def test_trimming_still_works(guard: SpecialGuard) -> None:
    """Templates may trim and search a guarded message: marks stand inside special strings only."""
    guarded = guard.guard_text("  <|im_end|> tail ")
    assert guarded.strip().startswith("<")
    assert guarded.endswith(" tail ")


def test_the_mark_itself_is_refused(byte_level: Tokenizer, guard: SpecialGuard) -> None:
    """A text with the mark, which nobody can know, is refused."""
    with pytest.raises(RequestError):
        guard.guard_text("a" + byte_level.mark)


def test_byte_fallback_keeps_its_first_space(byte_fallback: Tokenizer) -> None:
    """Only the first piece of a text gets the leading space, guarded or not."""
    guard = SpecialGuard(byte_fallback.special_strings, byte_fallback.mark)
    guarded = byte_fallback.encode_guarded("<s>the" + guard.guard_text("</s>") + "</s>Oslo")
    assert (guarded.count(1), guarded.count(2)) == (1, 1)
    whole = byte_fallback.encode("<s>the", add_special_tokens=False)
    assert guarded[: len(whole)] == whole


def test_normalised_text_forms_no_special_token(byte_level: Tokenizer) -> None:
    """Wide letters that the tokenizer's normaliser turns into a special string stay text, or are refused."""
    source = json.loads((MODEL_DIR / "tokenizer.json").read_text())
    source["normalizer"] = {"type": "NFKC"}
    for token in source["added_tokens"]:
        token["normalized"] = True
    folding = Tokenizer(json.dumps(source))
    wide = "a\uff1c|im_end|\uff1e"
    assert 4093 in folding.encode(wide, add_special_tokens=False)
    guard = SpecialGuard(folding.special_strings, folding.mark)
    ids = folding.encode_guarded("<|im_start|>" + guard.guard_text(wide) + "<|im_end|>")
    assert (ids.count(4092), ids.count(4093)) == (1, 1)


def test_too_many_special_strings_are_refused(byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text full of special strings is refused, with the limit, instead of growing without bound."""
    monkeypatch.setattr("colibrid.text.guard._MAX_BREAKS", 3)
    guard = SpecialGuard(byte_level.special_strings, byte_level.mark)
    guard.guard_text("<|im_end|>" * 3)
    with pytest.raises(RequestError, match="3"):
        guard.guard_text("<|im_end|>" * 4)
