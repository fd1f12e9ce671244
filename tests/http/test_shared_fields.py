"""Fields that several routes have, on each of them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from colibrid.text.guard import SpecialGuard

if TYPE_CHECKING:
    from collections.abc import Callable

    from colibrid.text.model_text import ModelText
    from colibrid.text.tokenizer import Tokenizer
    from tests.http.conftest import Answer, Server


COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
ASK: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 50},
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50},
    GENERATE: {"prompt": "Hi", "max_new_tokens": 50},
}
REPLY = "The capital of Norway is Oslo."

each_route = pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE])
both_routes = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
whole_and_streamed = pytest.mark.parametrize("stream", [False, True])


def text_of(answer: Answer, *, stream: bool = False) -> str:
    """The first choice's text, whole or joined."""
    assert answer.status == 200, answer.json
    if stream:
        choices = [event["choices"][0] for event in answer.events[:-1] if event["choices"]]
        return "".join(one["text"] if "text" in one else one["delta"].get("content") or "" for one in choices)
    if "choices" not in answer.json:
        return answer.json["text"]
    choice = answer.json["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.fields("/generate", "temperature", "top_p", "top_k", "seed")
@pytest.mark.fields("/v1/completions", "temperature", "top_p", "top_k", "seed")
@pytest.mark.fields("/v1/chat/completions", "temperature", "top_p", "top_k", "seed")
@each_route
async def test_sampling_reaches_the_scheduler(server: Server, path: str) -> None:
    """Temperature, top_p, top_k and seed are passed on as given; a negative seed is its bits."""
    request = ASK[path] | {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "seed": -1}
    assert (await server.post(path, request)).status == 200
    sampling = server.service.last.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.25, 7, 2**64 - 1)


@pytest.mark.fields(
    "/v1/completions", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"
)
@pytest.mark.fields(
    "/v1/chat/completions", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"
)
@both_routes
async def test_penalties_and_bias_reach_the_scheduler(server: Server, path: str) -> None:
    """min_p, penalties and biases are passed on as given."""
    request = ASK[path] | {
        "min_p": 0.125,
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "repetition_penalty": 1.5,
        "logit_bias": {"5": -100, "4": 1.5},
    }
    assert (await server.post(path, request)).status == 200
    sampling = server.service.last.sampling
    assert (sampling.min_p, sampling.presence_penalty, sampling.frequency_penalty) == (0.125, -2, 2)
    assert (sampling.repetition_penalty, sampling.logit_bias) == (1.5, ((4, 1.5), (5, -100.0)))


@both_routes
async def test_values_of_the_model_hold_where_none_are_named(server: Server, path: str) -> None:
    """Where a request names no sampling, generation_config.json does; null is as absent; seeds are drawn anew."""
    nothing = dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "stop", "experts"))
    for request in (ASK[path], ASK[path] | nothing):
        await server.post(path, request)
    first, second = (request.sampling for request in server.service.seen)
    assert (first.temperature, first.top_p, first.top_k) == (second.temperature, second.top_p, second.top_k)
    assert (first.temperature, first.top_p, first.top_k) == (0.7, 0.9, 0)
    assert first.seed != second.seed


@both_routes
async def test_settings_hold_over_the_model(make_server: Callable[..., Any], path: str) -> None:
    """Where a request names no sampling, the section `sampling` does, and the model where that is silent."""
    server = await make_server(sampling={"temperature": 0.25, "top_k": 7, "min_p": 0.5, "repetition_penalty": 1.25})
    await server.post(path, ASK[path] | {"min_p": 0.125})
    sampling = server.service.last.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.25, 0.9, 7)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.125, 1.25)


@pytest.mark.fields("/v1/completions", "stop_token_ids", "min_tokens", "ignore_eos")
@pytest.mark.fields("/v1/chat/completions", "stop_token_ids", "min_tokens", "ignore_eos")
@both_routes
async def test_ends_reach_the_scheduler(server: Server, path: str) -> None:
    """End ids are the model's own and the request's; with ignore_eos only those; min_tokens holds them off."""
    await server.post(path, ASK[path] | {"stop_token_ids": [9], "min_tokens": 2})
    assert (server.service.last.stop_token_ids, server.service.last.min_tokens) == ((4093, 4091, 9), 2)
    await server.post(path, ASK[path] | {"stop_token_ids": [9], "ignore_eos": True})
    assert server.service.last.stop_token_ids == (9,)


@pytest.mark.fields("experts", "per_token", "threshold")
@pytest.mark.fields("/v1/completions", "experts")
@pytest.mark.fields("/v1/chat/completions", "experts")
@pytest.mark.fields("/generate", "experts")
@each_route
async def test_experts_reach_the_scheduler(server: Server, path: str) -> None:
    """The request's experts are passed on, and usage says how many there were."""
    answer = await server.post(path, ASK[path] | {"experts": {"per_token": 1, "threshold": 0.25}})
    policy = server.service.last.experts
    assert (policy.per_token, policy.threshold) == (1, 0.25)
    assert answer.json["usage"]["experts"]["per_token"] == 1


@pytest.mark.fields("/v1/completions", "stop")
@pytest.mark.fields("/v1/chat/completions", "stop")
@pytest.mark.fields("/generate", "stop")
@each_route
@pytest.mark.parametrize("stop", ["way is", ["zzz", "way is"]])
async def test_stop_strings_end_the_text(server: Server, path: str, stop: Any) -> None:
    """One or several stop strings end the text before the first, over token borders."""
    answer = await server.post(path, ASK[path] | {"stop": stop})
    assert text_of(answer) == "The capital of Nor"
    assert answer.json["usage"]["completion_tokens"] == 6
    assert not server.service.live


@both_routes
@pytest.mark.parametrize("batch", [1, 2, 100])
@pytest.mark.parametrize("stop", ["The", "way", "way is", " Oslo", ".", "y is O", "slo."])
async def test_stop_strings_never_leak_into_streams(server: Server, path: str, batch: int, stop: str) -> None:
    """However tokens arrive, no event holds any part of a stop string, and the joined text is that of the whole answer."""
    server.service.batch = batch
    request = ASK[path] | {"stop": stop}
    whole = text_of(await server.post(path, request))
    assert whole == REPLY[: REPLY.index(stop)]
    assert text_of(await server.post(path, request | {"stream": True}), stream=True) == whole


@pytest.mark.fields("/v1/completions", "include_stop_str_in_output")
@pytest.mark.fields("/v1/chat/completions", "include_stop_str_in_output")
@both_routes
@whole_and_streamed
async def test_stop_strings_can_be_kept(server: Server, path: str, stream: bool) -> None:
    """include_stop_str_in_output keeps the stop string or the text of the stop id, and nothing behind it."""
    keep = {"include_stop_str_in_output": True, "stream": stream}
    answer = await server.post(path, ASK[path] | keep | {"stop": "way i"})
    assert text_of(answer, stream=stream) == "The capital of Norway i"
    server.service.reply = [568, 572, 281]
    answer = await server.post(path, ASK[path] | keep | {"stop_token_ids": [572]})
    assert text_of(answer, stream=stream) == "The capital"


@pytest.mark.fields("/v1/completions", "skip_special_tokens")
@pytest.mark.fields("/v1/chat/completions", "skip_special_tokens")
@both_routes
@whole_and_streamed
async def test_special_tokens_show_on_demand(server: Server, path: str, stream: bool) -> None:
    """skip_special_tokens: false shows special tokens that are not the end."""
    server.service.reply = [568, 4092, 572]
    for skip, text in ((None, "The capital"), (True, "The capital"), (False, "The<|im_start|> capital")):
        answer = await server.post(path, ASK[path] | {"skip_special_tokens": skip, "stream": stream})
        assert text_of(answer, stream=stream) == text


@pytest.mark.fields("/v1/completions", "return_token_ids")
@pytest.mark.fields("/v1/chat/completions", "return_token_ids")
@both_routes
@whole_and_streamed
async def test_token_ids_are_returned(server: Server, path: str, stream: bool) -> None:
    """return_token_ids adds the ids of prompt and output, the end id included, and nothing without it."""
    answer = await server.post(path, ASK[path] | {"return_token_ids": True, "stream": stream})
    parts = answer.events[:-1] if stream else [answer.json]
    choices = [part["choices"][0] for part in parts]
    prompts = [one["prompt_token_ids"] for one in [*parts, *choices] if "prompt_token_ids" in one]
    assert prompts == [list(server.service.last.prompt_ids)]
    assert [token for choice in choices for token in choice.get("token_ids", [])] == server.service.reply
    assert b"token_ids" not in (await server.post(path, ASK[path] | {"stream": stream})).raw


@pytest.mark.fields("/v1/completions", "truncate_prompt_tokens")
@pytest.mark.fields("/v1/chat/completions", "truncate_prompt_tokens")
@both_routes
async def test_prompts_can_be_truncated(server: Server, path: str) -> None:
    """truncate_prompt_tokens keeps the last tokens; -1 keeps as many as leave room for max_tokens."""
    long = {"prompt": "a b " * 2000, "messages": [{"role": "user", "content": "a b " * 2000}]}
    request = {key: long.get(key, value) for key, value in ASK[path].items()}
    for asked, kept in ((3, 3), (-1, 2048 - 50)):
        answer = await server.post(path, request | {"truncate_prompt_tokens": asked})
        assert len(server.service.last.prompt_ids) == answer.json["usage"]["prompt_tokens"] == kept


@pytest.mark.fields("/v1/completions", "prompt_logprobs")
@pytest.mark.fields("/v1/chat/completions", "prompt_logprobs")
@both_routes
async def test_prompt_logprobs_by_id(server: Server, path: str) -> None:
    """prompt_logprobs lists, for each prompt position but the first, ids with log-probability and rank."""
    body = (await server.post(path, ASK[path] | {"prompt_logprobs": 2})).json
    found = (body if path == CHAT else body["choices"][0])["prompt_logprobs"]
    ids = server.service.last.prompt_ids
    assert len(found) == len(ids)
    assert found[0] is None
    for token, entry in zip(ids[1:], found[1:], strict=True):
        assert entry[str(token)]["rank"] == 1
        assert len(entry) == 2


@pytest.mark.fields("stream_options", "include_usage", "include_obfuscation")
@pytest.mark.fields("/v1/completions", "stream", "stream_options")
@pytest.mark.fields("/v1/chat/completions", "stream", "stream_options")
@both_routes
async def test_streams_with_and_without_usage(server: Server, path: str) -> None:
    """Without options no event has usage; with include_usage all have it, null but in the last, which has no choices."""
    plain = await server.post(path, ASK[path] | {"stream": True, "stream_options": {"include_obfuscation": False}})
    assert text_of(plain, stream=True) == REPLY
    assert plain.events[-1] == "[DONE]"
    assert all("usage" not in event for event in plain.events[:-1])
    whole = (await server.post(path, ASK[path])).json["usage"]
    asked = await server.post(path, ASK[path] | {"stream": True, "stream_options": {"include_usage": True}})
    *events, last, _done = asked.events
    assert all(event["usage"] is None for event in events)
    assert (last["choices"], last["usage"]) == ([], whole)


@pytest.mark.fields("/v1/completions", "user", "model")
@pytest.mark.fields("/v1/chat/completions", "user", "model")
@both_routes
async def test_who_and_what_is_asked(server: Server, path: str) -> None:
    """`user` is accepted and changes nothing; `model` is the served one, or 404."""
    answer = await server.post(path, ASK[path] | {"user": "me", "model": "hummingbird-13m"})
    assert (text_of(answer), answer.json["model"]) == (REPLY, "hummingbird-13m")
    assert "x-colibri-ignored" not in answer.headers
    answer = await server.post(path, ASK[path] | {"model": "gpt-4"})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
    assert "hummingbird-13m" in answer.error["message"]


@pytest.fixture
def text_with_start(model_text: ModelText, with_start: Tokenizer) -> ModelText:
    """The bundled model's text, with a tokenizer that puts a special token first."""
    guard = SpecialGuard(with_start.special_strings, with_start.mark)
    return dataclasses.replace(model_text, tokenizer=with_start, guard=guard)


@pytest.mark.fields("/v1/completions", "add_special_tokens")
@pytest.mark.fields("/v1/chat/completions", "add_special_tokens")
@both_routes
async def test_special_tokens_are_added(make_server: Callable[..., Any], text_with_start: ModelText, path: str) -> None:
    """A tokenizer's own first token is put before texts, but not before rendered chats and ids, unless told otherwise."""
    server = await make_server(text=text_with_start)
    for asked, added in ((None, path == COMPLETIONS), (True, True), (False, False)):
        await server.post(path, ASK[path] | {"add_special_tokens": asked})
        assert (server.service.last.prompt_ids[0] == 4091) == added
    await server.post(COMPLETIONS, {"prompt": [5]})
    assert server.service.last.prompt_ids == (5,)


@pytest.mark.fields("stream_options", "continuous_usage_stats")
@both_routes
async def test_usage_in_every_event(server: Server, path: str) -> None:
    """With continuous_usage_stats each event tells the tokens of its choice so far; without include_usage none does."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = await server.post(path, ASK[path] | {"stream": True, "stream_options": options})
    *events, last, _done = answer.events
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 9
    assert set(counts) >= set(range(1, 10))
    for event in events:
        usage = event["usage"]
        assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    answer = await server.post(path, ASK[path] | {"stream": True, "stream_options": {"continuous_usage_stats": True}})
    assert all("usage" not in event for event in answer.events[:-1])


@pytest.mark.fields("/v1/completions", "timeout_s")
@pytest.mark.fields("/v1/chat/completions", "timeout_s")
@both_routes
@whole_and_streamed
@pytest.mark.parametrize("pause_s", [30.0, 0.02])
async def test_answers_that_take_too_long(server: Server, path: str, stream: bool, pause_s: float) -> None:
    """After timeout_s the request ends with 504, or with an error event and no [DONE], and its slots are free."""
    server.service.pause_s = pause_s
    server.service.reply = [568] * 10_000
    request = ASK[path] | {"max_tokens": 2000, "stream": stream, "timeout_s": 0.5}
    answer = await server.post(path, request, Connection="close")  # a stream that fails closes it anyway
    error = answer.events[-1]["error"] if stream else answer.error
    assert (answer.status, error["code"], error["param"]) == (200 if stream else 504, "timeout", "timeout_s")
    assert "0.5 s" in error["message"]
    assert b"[DONE]" not in answer.raw
    assert not server.service.live
    server.service.pause_s = 0.0
    assert (await server.post(path, ASK[path] | {"timeout_s": 60})).status == 200
