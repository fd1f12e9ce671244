"""Ids to text, piece by piece."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibrid.text.detokenizer import ByteDetokenizer, WindowDetokenizer, detokenizer
from colibrid.text.tokenizer import Tokenizer

byte_level_ids = st.lists(st.one_of(st.integers(0, 255), st.integers(0, 4095)))
TEXTS = [
    "The capital of Norway is Oslo.",
    "日本語 élan 🇳🇴 👩‍👩‍👧 ñ",
    "a\u0301 Ω≈ç√",
    "  two  spaces\n\n\ttab",
    "\ufffd real",
]


REPLACE = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
FALLBACK, FUSE = {"type": "ByteFallback"}, {"type": "Fuse"}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


def metaspace(scheme: str) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": True}


def sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "decoders": list(parts)}


DECODERS: dict[str, Any] = {
    "Llama's": sequence(REPLACE, FALLBACK, FUSE, STRIP),
    "Gemma's": sequence(REPLACE, FALLBACK, FUSE),
    "Metaspace, always": metaspace("always"),
    "Metaspace, first": metaspace("first"),
    "Metaspace, never": metaspace("never"),
    "bytes before Metaspace": sequence(FALLBACK, metaspace("always")),
    "bytes alone": FALLBACK,
    "replaced and stripped": sequence(REPLACE, FUSE, STRIP),
    "stripped by more": sequence(REPLACE, FALLBACK, FUSE, STRIP | {"start": 2}),
    "BERT's": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    "BERT's, not cleaned": {"type": "WordPiece", "prefix": "##", "cleanup": False},
    "with a suffix": {"type": "BPEDecoder", "suffix": "</w>"},
    "byte-level": BYTE_LEVEL,
    "none": None,
}
PIECES = [
    *("<s>", "</s>", "<unk>"),  # special
    *(f"<0x{byte:02X}>" for byte in (0x00, 0x20, 0x41, 0x97, 0xA5, 0xC3, 0xE6, 0xF0, 0x9F, 0x98, 0xFF)),
    *(
        "\u2581",
        "\u2581\u2581",
        "\u2581the",
        "the",
        "Oslo",
        "\u2581Oslo\u2581",
        "a\u2581b",
        "日",
        "\u2581é",
        "\ufffd",
        " ",
    ),
    *("##", "##ing", "##s", ".", "n't", "do", "</w>", "lo</w>", "w</w>", ",", "<0x4>", "<0xGG>"),
    *("\u0120the", "\u0120", "\u00e6", "\u0139", "\u00a5", "\u00c3"),  # of the byte-level alphabet: parts of characters
]
AROUND = len(PIECES)  # the first id that no piece has


def tokenizer_with(decoder: dict[str, Any] | None) -> Tokenizer:
    added = [{"id": index, "content": content, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False} for index, content in enumerate(PIECES[:3])]  # fmt: skip
    model = {"type": "WordLevel", "vocab": {piece: index for index, piece in enumerate(PIECES)}, "unk_token": "<unk>"}
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"))
    return Tokenizer(json.dumps({"version": "1.0", **empty, "added_tokens": added, "decoder": decoder, "model": model}))


TOKENIZERS = {name: tokenizer_with(decoder) for name, decoder in DECODERS.items()}


@pytest.mark.parametrize("name", DECODERS)
@given(ids=st.lists(st.integers(0, AROUND), max_size=60), skip=st.booleans())
def test_pieces_of_any_ids_join_to_the_whole(name: str, ids: list[int], skip: bool) -> None:
    """Whatever the decoder and the ids, the pieces join to what the library makes of all ids at once."""
    tokenizer = TOKENIZERS[name]
    found = pieces(tokenizer, ids, skip=skip)
    assert "".join(found) == tokenizer.decode(ids, skip_special_tokens=skip)


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
    assert kind == "byte_fallback" or found[-1] == ""  # a run of bytes may end the text


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


def test_runs_of_bytes_are_given_when_they_end(byte_fallback: Tokenizer) -> None:
    """Bytes wait for the id that ends their run; a run that is no UTF-8 reads as one U+FFFD a byte."""
    decoder = detokenizer(byte_fallback, skip_special_tokens=False)
    ids = byte_fallback.encode("x😀a", add_special_tokens=False)
    found = [decoder.push(token) for token in ids]
    assert found[-1] == "x😀a"[found[:-1].count("x") :]
    broken = [ids[2], byte_fallback.encode("a", add_special_tokens=False)[-1]]
    assert pieces(byte_fallback, broken)[:2] == ["", "\ufffda"]
