"""Text to ids and back."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import colibrid
from colibrid.errors import ModelError, OverloadedError, RequestError
from colibrid.text import tokenizer as module
from colibrid.text.tokenizer import IdsOnly, Tokenizer, TooManyTokensError

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "hummingbird-13m.golden.json").read_text())["cases"]
MODEL_DIR = Path(colibrid.__file__).parent / "models" / "hummingbird-13m"


def test_ids_are_those_of_the_reference(byte_level: Tokenizer) -> None:
    """Every golden prompt has the reference's ids."""
    for case in GOLDEN:
        assert byte_level.encode(case["prompt"], add_special_tokens=True) == case["prompt_ids"]


def test_special_strings_are_parsed(byte_level: Tokenizer) -> None:
    """The string of a special token is the token."""
    assert byte_level.encode("a<|im_end|>", add_special_tokens=False) == [64, 4093]
    assert byte_level.special_ids == {4091, 4092, 4093}
    assert byte_level.vocab_size == 4096


def test_long_text_leaves_the_event_loop_free(byte_level: Tokenizer) -> None:
    """While a long text is tokenized the loop turns, and the ids are the same."""
    text = "The capital of Norway is Oslo. " * 20_000

    async def measure() -> tuple[list[int], int]:
        turns = 0
        work = asyncio.create_task(byte_level.encode_async(text, add_special_tokens=True))
        while not work.done():
            await asyncio.sleep(0.001)
            turns += 1
        return work.result(), turns

    found = []  # the most turns count: other processes may hold the processor
    while len(found) < 5 and max(found, default=0) <= 10:
        ids, turns = asyncio.run(measure())
        found.append(turns)
    assert ids == byte_level.encode(text, add_special_tokens=True)
    assert max(found) > 10


async def test_waiting_text_is_bounded(byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """More text than may wait for the worker is refused as overload."""
    monkeypatch.setattr(module, "PENDING_CHARS", 10_000)
    first = asyncio.create_task(byte_level.encode_async("a b" * 3000, add_special_tokens=True))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await byte_level.encode_async("a b" * 3000, add_special_tokens=True)
    await first
    assert await byte_level.encode_async("a b" * 3000, add_special_tokens=True)


def test_lone_surrogates_are_refused(byte_level: Tokenizer) -> None:
    """Half a character is a client's error, not a crash."""
    with pytest.raises(RequestError, match="position 1"):
        byte_level.encode("a\ud800", add_special_tokens=True)


def test_token_text(byte_level: Tokenizer) -> None:
    """A whole piece reads as its text, a part of a character as its bytes; unknown ids have none."""
    assert byte_level.token_text(572) == " capital"
    assert byte_level.token_text(4093) == "<|im_end|>"
    part = byte_level.encode("日", add_special_tokens=False)[0]
    assert byte_level.token_text(part).startswith("bytes:\\x")
    assert byte_level.token_bytes(99_999) == b""


@given(st.text())
def test_bytes_join_to_the_text(byte_level: Tokenizer, text: str) -> None:
    """The bytes of the ids of a text, joined, are its decoding (the text in NFC)."""
    ids = byte_level.encode(text, add_special_tokens=False)
    assert b"".join(map(byte_level.token_bytes, ids)).decode() == byte_level.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff", b'{"model": 5}'])
def test_broken_file_is_named(tmp_path: Path, content: Any) -> None:
    """A tokenizer file that is missing or broken is a ModelError that names it."""
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError, match=str(path)):
        Tokenizer.load(path)


def test_model_without_tokenizer() -> None:
    """Without a tokenizer, text is refused and ids have no text."""
    ids_only = IdsOnly()
    with pytest.raises(RequestError, match="token ids"):
        ids_only.encode("a", add_special_tokens=True)
    assert ids_only.decode([1, 2], skip_special_tokens=True) == ""
    assert ids_only.token_text(1) == ""


def test_too_many_tokens_are_counted_not_listed(byte_level: Tokenizer) -> None:
    """Beyond the number of tokens that can be used only their count is told."""
    assert len(byte_level.encode("a b c", add_special_tokens=False, most=3)) == 3
    with pytest.raises(TooManyTokensError) as caught:
        byte_level.encode("a b c", add_special_tokens=False, most=2)
    assert (caught.value.count, caught.value.exact) == (3, True)


async def test_hopeless_text_is_not_tokenized(byte_level: Tokenizer) -> None:
    """A text that must have too many tokens, whatever they are, is refused without work."""
    with pytest.raises(TooManyTokensError) as caught:
        await byte_level.encode_async("a" * 10_000_000, add_special_tokens=False, most=2048)
    assert caught.value.exact is False
    assert caught.value.count <= 10_000_000


@given(st.text())
def test_least_tokens_is_a_lower_bound(byte_level: Tokenizer, text: str) -> None:
    """No text has fewer tokens than least_tokens says."""
    assert byte_level.least_tokens(len(text)) <= len(byte_level.encode(text, add_special_tokens=False))


def test_least_tokens_needs_a_tokenizer_that_keeps_text(byte_fallback: Tokenizer) -> None:
    """Where one token may stand for any amount of text, nothing is promised."""
    assert byte_fallback.least_tokens(1 << 30) == 0
