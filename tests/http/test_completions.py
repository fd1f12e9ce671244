"""Behaviour of POST /v1/completions, on a scripted engine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import colibrid
from colibrid.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from colibrid.text.model_text import ModelText
    from tests.http.conftest import Server

MODEL_DIR = Path(colibrid.__file__).parent / "models" / "hummingbird-13m"
REPLY = "The capital of Norway is Oslo."
IDS = [568, 572, 281, 3210, 1031, 303, 2827, 13, 4093]


async def test_answer_has_the_openai_shape(server: Server) -> None:
    """A completion carries id, object, model, one choice with text and finish reason, and exact usage."""
    answer = await server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 50})
    assert answer.status == 200
    body = answer.json
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["model"]) == ("text_completion", "hummingbird-13m")
    assert body["system_fingerprint"] == "fp_0123456789ab"
    assert body["choices"] == [{"index": 0, "text": REPLY, "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 9,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
        "experts": {"per_token": 2, "assignments": 108, "trimmed": 0, "dropped": 0},
    }


async def test_max_tokens_ends_with_length(server: Server) -> None:
    """The text ends after max_tokens tokens, and says so."""
    choice = (await server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 2})).json["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("The capital", "length")


@pytest.mark.fields("/v1/completions", "max_tokens")
async def test_max_tokens_defaults_to_16_or_what_is_left(server: Server) -> None:
    """Without max_tokens a completion may have 16 tokens, fewer where the context ends."""
    await server.post("/v1/completions", {"prompt": [5]})
    assert server.service.last.max_tokens == 16
    await server.post("/v1/completions", {"prompt": [5] * 2040})
    assert server.service.last.max_tokens == 8


@pytest.mark.fields("/v1/completions", "prompt")
@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hi", ["Hi"]),
        ([1, 2, 3], [(1, 2, 3)]),
        (["Hi", "Hi"], ["Hi", "Hi"]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
        (["Hi", [7]], ["Hi", (7,)]),
    ],
)
async def test_prompt_in_all_forms(server: Server, prompt: Any, expected: Any) -> None:
    """Strings, ids and lists of both become one sequence each, in order."""
    body = (await server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})).json
    hi = tuple(server.state.text.tokenizer.encode("Hi", add_special_tokens=True))
    assert [request.prompt_ids for request in server.service.seen] == [hi if ids == "Hi" else ids for ids in expected]
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    assert body["usage"]["completion_tokens"] == len(expected)


async def test_special_tokens_in_prompts_are_parsed(server: Server) -> None:
    """In a raw prompt the string of a special token is the token."""
    await server.post("/v1/completions", {"prompt": "<|im_start|>user"})
    assert server.service.last.prompt_ids[0] == 4092


async def test_stream_joins_to_the_whole_text(server: Server) -> None:
    """Chunks carry the same id, their texts join to the answer, and the last one has the finish reason."""
    answer = await server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 50, "stream": True})
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    assert answer.headers["X-Accel-Buffering"] == "no"
    assert answer.headers["Cache-Control"] == "no-cache"
    *chunks, done = answer.events
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == REPLY
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)


async def test_stream_with_usage(server: Server) -> None:
    """include_usage adds null to each chunk and a last chunk with the usage and no choices."""
    request = {"prompt": "Hi", "max_tokens": 50, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, _done = (await server.post("/v1/completions", request)).events
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 9


async def test_several_streams_share_one_connection(server: Server) -> None:
    """Chunks of several prompts carry their index; each index has its own text and end."""
    request = {"prompt": ["Hi", "Ho"], "max_tokens": 50, "stream": True}
    *chunks, _done = (await server.post("/v1/completions", request)).events
    for index in (0, 1):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in own) == REPLY
        assert own[-1]["finish_reason"] == "stop"


async def test_several_tokens_at_once_are_one_event(make_server: Callable[..., Any]) -> None:
    """Tokens that arrived together leave in one event."""
    server = await make_server()
    server.service.batch = 100
    events = (await server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 50, "stream": True})).events
    assert [event if isinstance(event, str) else event["choices"][0]["text"] for event in events] == [
        REPLY,
        "",
        "[DONE]",
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_ends_the_text(server: Server, stream: bool) -> None:
    """A stop string over a token border ends the text before it, cancels the generation and says stop."""
    request = {"prompt": "Hi", "max_tokens": 50, "stop": ["way is", "zzz"], "stream": stream}
    answer = await server.post("/v1/completions", request)
    if stream:
        text = "".join(chunk["choices"][0]["text"] for chunk in answer.events[:-1])
        reason = answer.events[-2]["choices"][0]["finish_reason"]
    else:
        text, reason = (answer.json["choices"][0][key] for key in ("text", "finish_reason"))
        assert answer.json["usage"]["completion_tokens"] == 6
    assert (text, reason) == ("The capital of Nor", "stop")
    assert not server.service.live


async def test_stop_string_leaves_usage_whole(server: Server) -> None:
    """Tokens of the text are counted, experts are those of all that was computed, and times are told."""
    server.service.batch = 100  # all tokens arrive at once: more than the text needs
    answer = await server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 50, "stop": "way is"})
    usage = answer.json["usage"]
    assert usage["completion_tokens"] == 6
    assert usage["experts"] == {
        "per_token": 2,
        "assignments": 12 * len(server.service.reply),
        "trimmed": 0,
        "dropped": 0,
    }
    assert answer.headers["Server-Timing"] == "queue;dur=1.0, prefill;dur=2.0, decode;dur=3.0"


async def test_stop_string_just_before_the_engine_died(server: Server) -> None:
    """A text that is complete is answered, without what only the engine knew."""
    server.service.knows_stopped = False
    answer = await server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 50, "stop": "way is"})
    usage = answer.json["usage"]
    assert (answer.status, usage["completion_tokens"]) == (200, 6)
    assert "experts" not in usage
    assert "Server-Timing" not in answer.headers


async def test_stop_string_waits_for_min_tokens(server: Server) -> None:
    """A stop string that is complete before min_tokens does not end the text."""
    request = {"prompt": "Hi", "max_tokens": 50, "stop": "capital", "min_tokens": 4}
    assert (await server.post("/v1/completions", request)).json["choices"][0]["text"] == REPLY


@pytest.mark.fields("/v1/completions", "logprobs")
async def test_logprobs_have_the_older_shape(server: Server) -> None:
    """Four lists of equal length; offsets point into the text; the sampled token is always in the top list."""
    request = {"prompt": "Hi", "max_tokens": 50, "logprobs": 2}
    choice = (await server.post("/v1/completions", request)).json["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == REPLY + "<|im_end|>"
    assert logprobs["token_logprobs"] == [-0.5] * 9
    assert [len(top) for top in logprobs["top_logprobs"]] == [2] * 9
    for token, offset in zip(logprobs["tokens"][:-1], logprobs["text_offset"], strict=False):
        assert choice["text"][offset:].startswith(token)


async def test_logprobs_zero_lists_the_sampled_token(server: Server) -> None:
    """logprobs: 0 gives the sampled token's log-probability only."""
    request = {"prompt": "Hi", "max_tokens": 1, "logprobs": 0}
    logprobs = (await server.post("/v1/completions", request)).json["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"The": -0.5}]


@pytest.mark.fields("/v1/completions", "echo")
@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs_scores_the_prompt(server: Server, stream: bool) -> None:
    """echo puts the prompt first; with logprobs its tokens come first too, the very first without a value."""
    request = {"prompt": "Norway is", "max_tokens": 1, "echo": True, "logprobs": 1, "stream": stream}
    answer = await server.post("/v1/completions", request)
    if stream:
        chunks = [chunk["choices"][0] for chunk in answer.events[:-1]]
        text = "".join(chunk["text"] for chunk in chunks)
        logprobs = {
            key: [value for chunk in chunks if chunk["logprobs"] for value in chunk["logprobs"][key]]
            for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
    else:
        text, logprobs = answer.json["choices"][0]["text"], answer.json["choices"][0]["logprobs"]
    assert text == "Norway isThe"
    assert "".join(logprobs["tokens"]) == text
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == [-0.5] * (len(logprobs["tokens"]) - 1)
    assert all(
        text[at:].startswith(token) for at, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
    )


async def test_scoring_generates_nothing(server: Server) -> None:
    """echo, logprobs and max_tokens 0 give the prompt's log-probabilities and no token."""
    request = {"prompt": [568, 572], "max_tokens": 0, "echo": True, "logprobs": 3}
    body = (await server.post("/v1/completions", request)).json
    assert body["choices"][0]["text"] == "The capital"
    assert body["choices"][0]["finish_reason"] == "length"
    assert len(body["choices"][0]["logprobs"]["tokens"]) == 2
    assert body["usage"]["completion_tokens"] == 0
    assert server.service.last.max_tokens == 0


INFILL = [
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
]


@pytest.mark.fields("/v1/completions", "suffix")
@pytest.mark.parametrize("marks", INFILL)
async def test_suffix_makes_a_gap(
    make_server: Callable[..., Any], model_text: ModelText, marks: tuple[str, ...]
) -> None:
    """Where the model has tokens for it, prompt and suffix stand around a gap in the model's own form."""
    described = json.loads((MODEL_DIR / "tokenizer.json").read_text())
    for token, content in zip((4091, 4094, 4095), marks, strict=True):
        old = next(entry["content"] for entry in described["added_tokens"] if entry["id"] == token)
        described = json.loads(json.dumps(described, ensure_ascii=False).replace(json.dumps(old), json.dumps(content)))
    text = dataclasses.replace(model_text, tokenizer=Tokenizer(json.dumps(described)))
    server = await make_server(text=text)
    for prompt in ("The capital", [568, 572]):
        answer = await server.post("/v1/completions", {"prompt": [prompt, [5]], "suffix": " Oslo"})
        assert answer.status == 200
        first, second = server.service.seen[-2:]
        assert first.prompt_ids == (4091, 568, 572, 4094, 2827, 4095)
        assert second.prompt_ids == (4091, 5, 4094, 2827, 4095)
    for fields in ({"echo": True}, {"truncate_prompt_tokens": 3}):
        answer = await server.post("/v1/completions", {"prompt": "a", "suffix": "b"} | fields)
        assert (answer.status, answer.error["param"]) == (400, *fields)


async def test_prompt_logprobs_are_streamed_once(server: Server) -> None:
    """In a stream each choice's first event has its prompt's log-probabilities, as the whole answer has them."""
    request = {"prompt": [[568, 572], [5]], "max_tokens": 3, "prompt_logprobs": 1}
    whole = (await server.post("/v1/completions", request)).json["choices"]
    *events, _done = (await server.post("/v1/completions", request | {"stream": True})).events
    for choice in whole:
        own = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
        assert own[0]["prompt_logprobs"] == choice["prompt_logprobs"]
        assert not [later for later in own[1:] if "prompt_logprobs" in later]
