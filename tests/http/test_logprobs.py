"""Log-probabilities in the shapes of the API."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from colibrid.batch.request import TokenRecord
from colibrid.http.logprobs import LegacyLogprobs, chat_logprobs, prompt_logprobs, text_and_offsets

if TYPE_CHECKING:
    from colibrid.text.model_text import ModelText
    from colibrid.text.tokenizer import Tokenizer
    from tests.http.conftest import Answer, Server

MINUS_INFINITY = float("-inf")


def test_minus_infinity_is_a_number(model_text: ModelText) -> None:
    """JSON has no infinity: minus infinity reads -9999 in every shape."""
    record = TokenRecord(572, MINUS_INFINITY, ((573, MINUS_INFINITY),))
    legacy = LegacyLogprobs(model_text.tokenizer)
    legacy.add(record, 0)
    shapes = [
        legacy.take(),
        chat_logprobs(model_text.tokenizer, [record]),
        prompt_logprobs(model_text.tokenizer, [record]),
    ]
    for shape in shapes:
        text = msgspec.json.encode(shape).decode()
        assert json.loads(text) == shape
        assert "-9999.0" in text


def test_parts_of_characters_keep_their_own_names(model_text: ModelText) -> None:
    """Tokens that are parts of characters do not fall together in the top list."""
    parts = model_text.tokenizer.encode("日本", add_special_tokens=False)
    assert len(set(parts)) >= 3
    legacy = LegacyLogprobs(model_text.tokenizer)
    legacy.add(TokenRecord(parts[0], -1.0, tuple((token, -1.0) for token in set(parts))), 0)
    top = legacy.take()["top_logprobs"][0]
    assert len(top) == len(set(parts))
    entry = chat_logprobs(model_text.tokenizer, [TokenRecord(parts[0], -1.0)])["content"][0]
    assert bytes(entry["bytes"]) == "日".encode()[: len(entry["bytes"])]


def test_take_gives_each_token_once(model_text: ModelText) -> None:
    """What was taken is not given again."""
    legacy = LegacyLogprobs(model_text.tokenizer)
    assert not legacy
    legacy.add(TokenRecord(572, -1.0), 3)
    assert legacy
    assert legacy.take()["text_offset"] == [3]
    assert legacy.take() == {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def test_prompt_own_token_outside_the_top(model_text: ModelText) -> None:
    """A prompt token that is not among the likeliest is listed without a rank."""
    found = prompt_logprobs(model_text.tokenizer, [TokenRecord(1), TokenRecord(572, -5.0, ((573, -1.0),))])
    assert found[0] is None
    assert found[1] is not None
    assert (found[1]["572"]["rank"], found[1]["573"]["rank"]) == (None, 1)


def test_offsets_of_a_prompt(model_text: ModelText) -> None:
    """Each id begins where the text of those before it ends; parts of a character begin where it begins."""
    ids = model_text.tokenizer.encode("The 日<|im_end|>x", add_special_tokens=True)
    text, offsets = text_and_offsets(model_text.tokenizer, ids, None)
    assert text == "The 日<|im_end|>x"
    assert offsets[0] == 0
    assert text[offsets[ids.index(4093)] :] == "<|im_end|>x"
    assert offsets == sorted(offsets)


def test_offsets_are_those_of_what_was_sent(model_text: ModelText) -> None:
    """A text that its ids spell otherwise is echoed as it was sent, and offsets point into that."""
    sent = "a\u0301 The\u0301 a capital"  # a tokenizer that composes characters
    ids = model_text.tokenizer.encode(sent, add_special_tokens=True)
    text, offsets = text_and_offsets(model_text.tokenizer, ids, sent)
    assert text == sent
    assert model_text.tokenizer.decode(ids, skip_special_tokens=False) != sent
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    assert text[offsets[-1] :].strip() == "capital"


def test_added_tokens_have_no_length(with_start: Tokenizer) -> None:
    """A token that the tokenizer puts first is no part of the text that was sent, and moves no offset."""
    ids = with_start.encode("The capital", add_special_tokens=True)
    assert ids == [4091, 568, 572]
    text, offsets = text_and_offsets(with_start, ids, "The capital")
    assert (text, offsets[:2], text[offsets[2] :].strip()) == ("The capital", [0, 0], "capital")


@pytest.mark.parametrize("inline", [0, 1 << 30])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": ["Hi", [5, 6]], "logprobs": 2, "echo": True, "return_token_ids": True}),
        ("/v1/completions", {"prompt": "Hi", "prompt_logprobs": 3}),
        ("/v1/completions", {"prompt": "Hi", "echo": True, "stop": "way"}),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 2}),
        ("/v1/chat/completions", {"prompt_logprobs": 1, "return_token_ids": True}),
        ("/generate", {"prompt": "Hi"}),
    ],
)
async def test_large_answers_are_written_off_the_loop(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any], stream: bool, inline: int
) -> None:
    """Who writes an answer down makes no difference to it; only one with log-probabilities can be large."""
    if stream and ("prompt_logprobs" in fields or path == "/generate"):
        return
    request = {"max_tokens": 20, "messages": [{"role": "user", "content": "Hi"}], "stream": stream} | fields
    if path == "/generate":
        del request["max_tokens"], request["messages"], request["stream"]
    expected = await server.post(path, request)
    used = []
    submit = server.state.scribe.submit
    monkeypatch.setattr(server.state.scribe, "submit", lambda work, *more: used.append(work) or submit(work, *more))
    monkeypatch.setattr("colibrid.http.answer._INLINE_LOGPROBS", inline)
    answer = await server.post(path, request)
    assert bool(used) == (inline == 0 and any("logprobs" in name for name in fields))
    assert comparable(answer, stream=stream) == comparable(expected, stream=stream)


def comparable(answer: Answer, *, stream: bool) -> list[Any]:
    """An answer without what is new in each, its events by choice."""
    parts: list[Any] = [event for event in answer.events if event != "[DONE]"] if stream else [answer.json]
    for part in parts:
        part.pop("id")
        part.pop("created", None)
    return sorted(parts, key=lambda part: part["choices"][0]["index"]) if stream else parts
