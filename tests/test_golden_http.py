"""The whole way, with the real engine: golden cases over HTTP, the openai SDK, and engines that are killed."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest
from daemon_process import DaemonProcess, wait_for
from live_server import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from colibrid.engine.library import Library
    from colibrid.model.pack import Pack

GOLDEN = json.loads((Path(__file__).parent / "data" / "hummingbird-13m.golden.json").read_text())["cases"]
TOLERANCE = 2e-2
CLEAR_GAP = 0.05
ASK = [{"role": "user", "content": "What is the capital of Norway?"}]
OSLO = "The capital of Norway is Oslo."


def close(got: float, expected: float) -> bool:
    return abs(got - expected) <= TOLERANCE


def clear_steps(case: dict[str, Any]) -> int:
    """Greedy steps before the first one where the two best logits are too close to call."""
    gaps = case["top2_gaps"]
    return next((step for step, gap in enumerate(gaps) if gap <= CLEAR_GAP), len(gaps))


async def test_golden_cases(library: Library, bundled_pack: Pack) -> None:
    """All 39 cases, at once: each prompt and top-8 log-probability within 2e-2, greedy ids while the gap is clear."""
    assert len(GOLDEN) == 39
    async with serving(library, bundled_pack) as live:

        async def check(case: dict[str, Any]) -> None:
            ids = case["prompt_ids"]
            score = {"prompt": ids, "max_tokens": 1, "echo": True, "logprobs": 8, "prompt_logprobs": 0}
            choice = (await live.post("/v1/completions", score | {"temperature": 0}))["choices"][0]
            found = choice["logprobs"]["token_logprobs"]
            assert found[0] is None
            assert choice["prompt_logprobs"][0] is None
            assert len(found) == len(ids) + 1
            for place, expected in enumerate(case["prompt_logprobs"][1:], start=1):
                assert close(found[place], expected)
                assert close(choice["prompt_logprobs"][place][str(ids[place])]["logprob"], expected)
            tops = choice["logprobs"]["top_logprobs"][-1]
            assert sorted(tops.values(), reverse=True) == pytest.approx(case["next_top8_logprobs"], abs=TOLERANCE)
            greedy = {"prompt": ids, "max_tokens": len(case["greedy_ids"]), "temperature": 0, "return_token_ids": True}
            choice = (await live.post("/v1/completions", greedy))["choices"][0]
            steps = clear_steps(case)
            assert choice["token_ids"][:steps] == case["greedy_ids"][:steps]
            if steps == len(case["greedy_ids"]):
                assert choice["text"] == case["greedy_text"]

        await asyncio.gather(*map(check, GOLDEN))


async def test_chat_prompts_give_the_golden_answers(library: Library, bundled_pack: Pack) -> None:
    """Conversations through the chat route: the reference's text, wherever every step is clear."""
    cases = [case for case in GOLDEN if case["messages"] and clear_steps(case) == len(case["greedy_ids"])]
    assert len(cases) >= 20
    async with serving(library, bundled_pack) as live:
        for case in cases:
            request = {"messages": case["messages"], "temperature": 0, "max_tokens": len(case["greedy_ids"])}
            body = await live.post("/v1/chat/completions", request)
            assert body["choices"][0]["message"]["content"] == case["greedy_text"]
            assert body["usage"]["prompt_tokens"] == len(case["prompt_ids"])
            assert body["usage"]["completion_tokens"] == len(case["greedy_ids"])


async def test_streams_and_seeds(library: Library, bundled_pack: Pack) -> None:
    """The same request and seed give the same text, streamed or whole, alone or among others."""
    request = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 1.0, "top_p": 1.0, "seed": 7}
    async with serving(library, bundled_pack) as live:
        whole = (await live.post("/v1/completions", request))["choices"][0]["text"]
        many = await live.post("/v1/completions", request | {"prompt": [request["prompt"]] * 8})
        assert [choice["text"] for choice in many["choices"]] == [whole] * 8
        async with live.session.post(live.url + "/v1/completions", json=request | {"stream": True}) as response:
            events = [line[6:] async for line in response.content if line.startswith(b"data: ")]
        assert events[-1].strip() == b"[DONE]"
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == whole


async def test_client_that_leaves_frees_the_slot(library: Library, bundled_pack: Pack) -> None:
    """A client that closes the connection frees its slot, streaming or not; the next request is served."""
    request = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True}
    async with serving(library, bundled_pack, batch={"slots": 1}) as live:
        for stream in (True, False):
            task = asyncio.create_task(live.post("/v1/completions", request | {"stream": stream}))
            async with asyncio.timeout(60):
                while not live.scheduler.counts.running:  # noqa: ASYNC110 - the engine has no event for this
                    await asyncio.sleep(0.01)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                while live.scheduler.counts.running:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        answer = await live.post("/v1/completions", {"prompt": "Once", "max_tokens": 2})
        assert answer["usage"]["completion_tokens"] <= 2
        assert live.scheduler.counts.cancelled == 2


async def test_full_queue_is_refused(library: Library, bundled_pack: Pack) -> None:
    """With one slot and no queue, a second request is 503 with Retry-After while the first one runs on."""
    request = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True}
    async with serving(library, bundled_pack, batch={"slots": 1}, limits={"queue": 0}) as live:
        first = asyncio.create_task(live.post("/v1/completions", request))
        while not live.scheduler.counts.running:  # noqa: ASYNC110 - the engine has no event for this
            await asyncio.sleep(0.005)
        async with live.session.post(live.url + "/v1/completions", json=request) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["code"] == "server_is_overloaded"
        assert (await first)["usage"]["completion_tokens"] == 2000


async def test_experts_change_the_answer(library: Library, bundled_pack: Pack) -> None:
    """Fewer experts per token are used, reported, and change the log-probabilities."""
    request = {"prompt": "Once upon a time", "max_tokens": 0, "echo": True, "logprobs": 0}
    async with serving(library, bundled_pack) as live:
        own = await live.post("/v1/completions", request)
        one = await live.post("/v1/completions", request | {"experts": {"per_token": 1}})
        assert (own["usage"]["experts"]["per_token"], one["usage"]["experts"]["per_token"]) == (2, 1)
        assert own["usage"]["experts"]["assignments"] == 2 * one["usage"]["experts"]["assignments"]
        assert own["choices"][0]["logprobs"] != one["choices"][0]["logprobs"]


# ---------------------------------------------------------------- the daemon


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """`colibrid serve` with the bundled model."""
    with DaemonProcess(tmp_path_factory.mktemp("daemon")) as process:
        yield process.wait_ready()


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{daemon.port}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_sdk_chat(client: openai.OpenAI) -> None:
    """The openai SDK gets the right answer, whole and as a stream."""
    answer = client.chat.completions.create(model="hummingbird-13m", messages=ASK)
    assert answer.choices[0].message.content == OSLO
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 9
    stream = client.chat.completions.create(
        model="hummingbird-13m", messages=ASK, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == OSLO
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.total_tokens == answer.usage.total_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens in range(29)  # the first request's prompt may be used again


def test_sdk_completions(client: openai.OpenAI) -> None:
    """The SDK's older completions work, with logprobs, whole and as a stream."""
    request: dict[str, Any] = {"model": "hummingbird-13m", "prompt": GOLDEN[0]["prompt"], "temperature": 0}
    answer = client.completions.create(**request, logprobs=1)
    assert answer.choices[0].text == OSLO
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.tokens or []) == 9
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(**request, stream=True)) == OSLO


async def test_sdk_async(daemon: DaemonProcess) -> None:
    """The SDK's asynchronous client works, whole and as a stream."""
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{daemon.port}/v1", api_key="none") as client:
        answer = await client.chat.completions.create(model="hummingbird-13m", messages=ASK)
        assert answer.choices[0].message.content == OSLO
        stream = await client.chat.completions.create(model="hummingbird-13m", messages=ASK, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(pieces) == OSLO


def test_sdk_errors(client: openai.OpenAI) -> None:
    """The SDK raises its own types for our errors, with code and param."""
    assert [model.id for model in client.models.list()] == ["hummingbird-13m"]
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=ASK)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="hummingbird-13m", messages=ASK, n=65)
    assert refused.value.param == "n"


def test_engine_killed_in_mid_stream(daemon: DaemonProcess, client: openai.OpenAI) -> None:
    """kill -9 of the engine: the stream ends with an error event and no [DONE]; readiness falls and comes back."""
    body = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with daemon.open("POST", "/v1/completions", body) as response:
        assert response.readline().startswith(b"data: ")
        os.kill(engine_pid(daemon), signal.SIGKILL)
        rest = response.read()
    assert b"[DONE]" not in rest
    last = json.loads(rest.strip().rsplit(b"\n\n", 1)[-1].removeprefix(b"data: "))
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert last["error"]["type"] == "server_error"
    wait_for(lambda: daemon.request("GET", "/readyz")[0] == http.client.OK, daemon)
    answer = client.chat.completions.create(model="hummingbird-13m", messages=ASK)
    assert answer.choices[0].message.content == OSLO


def test_sdk_hears_of_a_killed_engine(daemon: DaemonProcess, client: openai.OpenAI) -> None:
    """The SDK raises an API error when the engine dies under its stream."""
    stream = client.completions.create(
        model="hummingbird-13m", prompt="Once", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    os.kill(engine_pid(daemon), signal.SIGKILL)
    with pytest.raises(openai.APIError):
        list(stream)
    wait_for(lambda: daemon.request("GET", "/readyz")[0] == http.client.OK, daemon)


def engine_pid(daemon: DaemonProcess) -> int:
    """The daemon's only child."""
    children = Path(f"/proc/{daemon.process.pid}/task/{daemon.process.pid}/children").read_text().split()
    assert len(children) == 1
    return int(children[0])
