"""POST /v1/embeddings: forms of input, encodings, dimensions, usage, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import math
from array import array
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from colibrid.errors import EngineFaultError, OverloadedError
from colibrid.http.embeddings import shortened
from tests.http.conftest import FakeGeneration, pooled

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.http.conftest import Server

ROUTE = "/v1/embeddings"
FULL = OverloadedError("the queue is full", code="server_is_overloaded", retry_after_s=1.0)


def _vector(prompt: tuple[int, ...]) -> list[float]:
    return array("f", pooled(prompt)).tolist()


@pytest.mark.fields("/v1/embeddings", "input", "model")
@pytest.mark.parametrize(
    ("given", "texts"),
    [("Oslo", 1), ([5, 6], 1), (["Oslo"], 1), (["Oslo", [5, 6], "Rome"], 3), ([[7], [8]], 2)],
)
async def test_every_form_of_input(server: Server, given: Any, texts: int) -> None:
    """One embedding for each text or id list, in order, with exact usage."""
    answer = await server.post(ROUTE, {"input": given, "model": "hummingbird-13m"})
    assert answer.status == 200
    assert answer.json["object"] == "list"
    assert answer.json["model"] == "hummingbird-13m"
    prompts = [request.prompt_ids for request in server.service.seen]
    assert len(prompts) == texts
    assert answer.json["data"] == [
        {"object": "embedding", "index": index, "embedding": _vector(prompt)} for index, prompt in enumerate(prompts)
    ]
    tokens = sum(map(len, prompts))
    usage = answer.json["usage"]
    assert (usage["prompt_tokens"], usage["total_tokens"]) == (tokens, tokens)
    assert usage["experts"] == {"per_token": 2, "assignments": 0, "trimmed": 0, "dropped": 0}


@pytest.mark.fields("/v1/embeddings", "experts", "user", "add_special_tokens")
async def test_requests_only_read_their_text(server: Server) -> None:
    """The scheduler gets prompts without output, pooled as the settings say, with the request's experts."""
    asked = {"input": "Oslo", "experts": {"per_token": 1, "threshold": 0.5}, "user": "me", "add_special_tokens": False}
    answer = await server.post(ROUTE, asked)
    assert "x-colibri-ignored" not in answer.headers
    request = server.service.last
    assert (request.max_tokens, request.pooling) == (0, "mean")
    assert (request.experts.per_token, request.experts.threshold) == (1, 0.5)


async def test_pooling_is_a_setting(make_server: Callable[..., Any]) -> None:
    """`embeddings.pooling: last` takes the last position."""
    server = await make_server(embeddings={"pooling": "last"})
    await server.post(ROUTE, {"input": "Oslo"})
    assert server.service.last.pooling == "last"


@pytest.mark.fields("/v1/embeddings", "encoding_format")
async def test_base64_holds_the_same_values(server: Server) -> None:
    """base64 is that of little-endian float32."""
    plain = await server.post(ROUTE, {"input": [1, 2], "encoding_format": "float"})
    coded = await server.post(ROUTE, {"input": [1, 2], "encoding_format": "base64"})
    raw = base64.b64decode(coded.json["data"][0]["embedding"], validate=True)
    assert array("f", raw).tolist() == plain.json["data"][0]["embedding"]


@pytest.mark.fields("/v1/embeddings", "dimensions")
async def test_dimensions_shorten_to_length_1(server: Server) -> None:
    """The first values in the same direction, brought to length 1 again."""
    answer = await server.post(ROUTE, {"input": [1, 2], "dimensions": 3})
    found = answer.json["data"][0]["embedding"]
    whole = _vector((1, 2))
    assert len(found) == 3
    assert math.hypot(*found) == pytest.approx(1, abs=1e-6)
    assert [value / found[0] for value in found] == pytest.approx([value / whole[0] for value in whole[:3]], rel=1e-5)


def test_a_zero_vector_stays_zero() -> None:
    """Nothing is divided by zero."""
    assert shortened(array("f", [0.0, 0.0, 1.0]), 2).tolist() == [0.0, 0.0]


async def test_long_lists_go_through_in_turns(server: Server) -> None:
    """Not more texts are under way than there are slots, and the order is that of the input."""
    most = 0

    class Watched(list[Any]):
        def extend(self, more: Any) -> None:
            nonlocal most
            super().extend(more)
            most = max(most, len(server.service.live) + len(list(more)))

    server.service.seen = Watched()
    answer = await server.post(ROUTE, {"input": [[token, 1] for token in range(300)]})
    assert [entry["embedding"] for entry in answer.json["data"]] == [_vector((token, 1)) for token in range(300)]
    assert most <= server.service.info.slots
    assert not server.service.live


async def test_a_list_that_was_begun_ends_while_draining(server: Server) -> None:
    """Texts behind the first ones belong to an answer that is held, so that a server that drains takes them."""
    texts = [f"text {index}" for index in range(server.service.info.slots + 5)]
    answer = await server.post("/v1/embeddings", {"input": texts})
    assert len(answer.json["data"]) == len(texts)
    assert (server.service.begun, server.service.holds) == (5, 0)


async def test_a_list_that_was_begun_waits_for_room(server: Server) -> None:
    """A queue that fills up meanwhile delays the rest; a queue that is full at once refuses all."""

    class FullAfterwards(list[Any]):
        def extend(self, more: Any) -> None:
            super().extend(more)
            server.service.refusal = FULL
            begun.set()

    begun = asyncio.Event()
    server.service.seen = FullAfterwards()
    answered = asyncio.ensure_future(server.post(ROUTE, {"input": [[token] for token in range(40)]}))
    await begun.wait()
    assert (await server.post(ROUTE, {"input": [1]})).status == 503
    assert not answered.done()
    server.service.seen = []
    server.service.refusal = None
    answer = await answered
    assert (answer.status, len(answer.json["data"])) == (200, 40)


@pytest.mark.fields("/v1/embeddings", "truncate_prompt_tokens")
async def test_texts_can_be_truncated(server: Server) -> None:
    """The last n tokens are kept; -1 keeps what the context holds."""
    await server.post(ROUTE, {"input": [1, 2, 3, 4], "truncate_prompt_tokens": 2})
    assert server.service.last.prompt_ids == (3, 4)
    await server.post(ROUTE, {"input": [5] * 3000, "truncate_prompt_tokens": -1})
    assert len(server.service.last.prompt_ids) == 2048


@pytest.mark.fields("/v1/embeddings", "priority", "timeout_s")
async def test_urgency_and_patience(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """priority reaches the scheduler; an answer that takes longer than timeout_s is 504, and nothing goes on running."""
    await server.post(ROUTE, {"input": [1], "priority": -3})
    assert server.service.last.priority == -3

    async def late(self: FakeGeneration) -> AsyncIterator[list[Any]]:
        await asyncio.sleep(60)
        yield []

    monkeypatch.setattr(FakeGeneration, "__aiter__", late)
    answer = await server.post(ROUTE, {"input": [[1], [2]], "timeout_s": 0.1})
    assert answer.status == 504
    assert answer.error["param"] == "timeout_s"
    assert not server.service.live


async def test_batch_dependence_is_told(server: Server) -> None:
    """With experts.max_tokens_per_expert the usage says so."""
    server.service.info = msgspec.structs.replace(server.service.info, batch_dependent=True)
    answer = await server.post(ROUTE, {"input": [1]})
    assert answer.json["usage"]["experts"]["batch_dependent"] is True


async def test_a_failing_engine_is_an_error(server: Server) -> None:
    """One failed text fails the request, and nothing goes on running."""
    server.service.failure = EngineFaultError("the engine died")
    answer = await server.post(ROUTE, {"input": [[1], [2]]})
    assert answer.status == 500
    assert not server.service.live


BAD = [
    # fields, param, part of the message
    ({}, "input", "missing"),
    ({"input": ""}, "input", "empty"),
    ({"input": []}, "input", "empty"),
    ({"input": ["a", ""]}, "input[1]", "empty"),
    ({"input": [1, 4096]}, "input", "input[1] = 4096"),
    ({"input": [[1]] * 2049}, "input", "2048"),
    ({"input": [1] * 2049}, "input", "2048"),
    ({"input": 5}, "input", "expected"),
    ({"input": "a", "dimensions": 0}, "dimensions", ">= 1"),
    ({"input": "a", "dimensions": 9}, "dimensions", "8"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format", "not one of"),
    ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "no text"),
    ({"input": "a", "experts": {"per_token": 3}}, "experts.per_token", "send 1 to 2"),
    ({"input": "a", "experts": {"threshold": 1.5}}, "experts.threshold", "<= 1"),
    ({"input": "a", "stream": True}, "stream", "not implemented"),
    ({"input": "a", "model": "gpt-4"}, "model", "does not exist"),
]


@pytest.mark.parametrize(("fields", "param", "part"), BAD)
async def test_bad_embeddings(server: Server, fields: dict[str, Any], param: str, part: str) -> None:
    """A wrong field is refused by name, and nothing is submitted."""
    answer = await server.post(ROUTE, fields)
    assert answer.status == (404 if param == "model" else 400)
    assert answer.error["param"] == param
    assert part in answer.error["message"]
    assert not server.service.seen
