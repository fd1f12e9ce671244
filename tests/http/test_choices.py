"""n and best_of: several choices of one prompt, on a scripted engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.http.conftest import Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ASK: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 50},
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50},
}
REPLY = "The capital of Norway is Oslo."
THE, CAPITAL, OF = 568, 572, 281

both_routes = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


@pytest.fixture
def service_of() -> Callable[[Server], None]:
    """Makes the scripted choices differ: the i-th begins with i more tokens."""

    def differ(server: Server) -> None:
        server.service.choice_starts = {1: [THE], 2: [THE, CAPITAL], 3: [THE, CAPITAL, OF]}
        server.service.cached_tokens = 1

    return differ


def texts(choices: list[dict[str, Any]]) -> list[str]:
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]


@pytest.mark.fields("/v1/completions", "n")
@pytest.mark.fields("/v1/chat/completions", "n")
@both_routes
async def test_n_choices_come_in_order(server: Server, service_of: Callable[[Server], None], path: str) -> None:
    """Each choice has its index and its own text; the prompt is one request, and counted once."""
    service_of(server)
    answer = await server.post(path, ASK[path] | {"n": 3})
    assert [choice["index"] for choice in answer.json["choices"]] == [0, 1, 2]
    assert texts(answer.json["choices"]) == [REPLY, "The" + REPLY, "The capital" + REPLY]
    (request,) = server.service.seen
    usage = answer.json["usage"]
    assert (request.n, usage["prompt_tokens"]) == (3, len(request.prompt_ids))
    assert usage["completion_tokens"] == 9 + 10 + 11
    assert usage["total_tokens"] == len(request.prompt_ids) + 30
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}


@both_routes
async def test_streamed_choices_are_told_apart(server: Server, service_of: Callable[[Server], None], path: str) -> None:
    """Pieces of all choices come as they arrive; each choice ends once, and usage comes last."""
    service_of(server)
    body = ASK[path] | {"n": 3, "stream": True, "stream_options": {"include_usage": True}}
    answer = await server.post(path, body)
    *events, usage, done = answer.events
    assert done == "[DONE]"
    parts: dict[int, list[str]] = {}
    ends: dict[int, str] = {}
    for event in events:
        (choice,) = event["choices"]
        assert choice["index"] not in ends, "text after the end"
        piece = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        parts.setdefault(choice["index"], []).append(piece)
        if choice["finish_reason"] is not None:
            ends[choice["index"]] = choice["finish_reason"]
    assert ["".join(parts[index]) for index in range(3)] == [REPLY, "The" + REPLY, "The capital" + REPLY]
    assert ends == dict.fromkeys(range(3), "stop")
    assert usage["usage"]["completion_tokens"] == 30
    assert usage["usage"]["prompt_tokens"] == len(server.service.last.prompt_ids)
    order = [event["choices"][0]["index"] for event in events]
    assert order != sorted(order), "one choice after the other is no streaming"


async def test_lists_of_prompts_have_n_choices_each(server: Server, service_of: Callable[[Server], None]) -> None:
    """All choices of the first prompt come first; each prompt is counted once."""
    service_of(server)
    body = {"prompt": ["Hi", [5, 6]], "max_tokens": 50, "n": 2, "echo": True, "return_token_ids": True}
    answer = await server.post(COMPLETIONS, body)
    choices = answer.json["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["text"].endswith("The" + REPLY) for choice in choices] == [False, True, False, True]
    assert [choice["prompt_token_ids"] == [5, 6] for choice in choices] == [False, False, True, True]
    assert answer.json["usage"]["prompt_tokens"] == 3
    assert answer.json["usage"]["completion_tokens"] == 2 * (9 + 10)


@pytest.mark.fields("/v1/completions", "best_of")
async def test_best_of_gives_the_likeliest(server: Server, service_of: Callable[[Server], None]) -> None:
    """The n choices of highest mean log-probability come, best first; usage counts all that were generated."""
    service_of(server)
    server.service.choice_logprobs = {0: 0.4, 1: 0.2, 2: 0.3, 3: 0.1}
    answer = await server.post(COMPLETIONS, {"prompt": ["Hi", "Ho"], "max_tokens": 50, "n": 2, "best_of": 4})
    best = ["The capital of" + REPLY, "The" + REPLY]
    assert texts(answer.json["choices"]) == best * 2
    assert [choice["index"] for choice in answer.json["choices"]] == [0, 1, 2, 3]
    assert [choice["logprobs"] for choice in answer.json["choices"]] == [None] * 4
    assert [request.n for request in server.service.seen] == [4, 4]
    usage = answer.json["usage"]
    assert usage["completion_tokens"] == 2 * (9 + 10 + 11 + 12)
    assert usage["prompt_tokens"] == sum(len(request.prompt_ids) for request in server.service.seen)


async def test_the_mean_decides_and_not_the_sum(server: Server, service_of: Callable[[Server], None]) -> None:
    """A long text is not worse for being long; among equals the first one comes."""
    service_of(server)
    server.service.choice_logprobs = {3: -0.01}
    answer = await server.post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 50, "best_of": 4})
    assert texts(answer.json["choices"]) == ["The capital of" + REPLY]
    server.service.choice_logprobs = {}
    answer = await server.post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 50, "best_of": 4, "logprobs": 2})
    assert texts(answer.json["choices"]) == [REPLY]
    assert set(answer.json["choices"][0]["logprobs"]["token_logprobs"]) == {-0.5}


@pytest.mark.parametrize("fields", [{"best_of": 0}, {"best_of": None}, {"best_of": 1}, {"n": 1}, {"n": None}])
@pytest.mark.parametrize("stream", [False, True])
async def test_values_that_mean_one_choice(server: Server, fields: dict[str, Any], stream: bool) -> None:
    """0 and null are as if best_of were absent, and best_of = n streams."""
    answer = await server.post(COMPLETIONS, ASK[COMPLETIONS] | fields | {"stream": stream})
    assert answer.status == 200
    assert (server.service.last.n, server.service.last.logprobs) == (1, None)


async def test_as_many_choices_as_there_are_slots(server: Server) -> None:
    """n may use every slot of the server."""
    answer = await server.post(COMPLETIONS, ASK[COMPLETIONS] | {"n": 32})
    assert len(answer.json["choices"]) == 32


async def test_one_failing_choice_ends_the_answer(server: Server) -> None:
    """An error of one choice is the answer's, and the others are cancelled."""
    server.service.refusal = None
    server.service.pause_s = 0.3
    body = ASK[COMPLETIONS] | {"n": 3, "stream": True, "timeout_s": 0.5}
    answer = await server.post(COMPLETIONS, body)
    assert answer.events[-1]["error"]["code"] == "timeout"
    assert server.service.live == set()
    assert all(generation.cancelled for generation in server.service.generations)


@pytest.mark.fields("/v1/completions", "priority")
@pytest.mark.fields("/v1/chat/completions", "priority")
@both_routes
async def test_priority_reaches_the_scheduler(server: Server, path: str) -> None:
    """As given; 0 when it is not."""
    await server.post(path, ASK[path] | {"priority": -7})
    await server.post(path, ASK[path])
    assert [request.priority for request in server.service.seen] == [-7, 0]


async def test_each_key_is_a_tenant(make_server: Callable[..., Any]) -> None:
    """What one key has computed is told apart from what another has; without keys there is one tenant."""
    server = await make_server(keys=["first-key-1", "second-key-2"])
    for key in ("first-key-1", "second-key-2", "first-key-1"):
        await server.post(COMPLETIONS, ASK[COMPLETIONS], Authorization=f"Bearer {key}")
    tenants = [request.tenant for request in server.service.seen]
    assert tenants[0] == tenants[2] != tenants[1]
    assert "" not in tenants
    open_server = await make_server()
    await open_server.post(COMPLETIONS, ASK[COMPLETIONS])
    assert open_server.service.last.tenant == ""
