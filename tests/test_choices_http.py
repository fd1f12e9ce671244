"""Several choices and reused prompts over HTTP, with the real engine: what clients see is what one request alone gives."""

from __future__ import annotations

import asyncio
import json
import re
import statistics
from typing import TYPE_CHECKING, Any

import pytest
from live_server import serving

if TYPE_CHECKING:
    from live_server import Live

    from colibrid.engine.library import Library
    from colibrid.model.pack import Pack

STORY = {"prompt": "Once upon a time there was a", "max_tokens": 24, "temperature": 1.0, "seed": 11, "ignore_eos": True}
TALK = ["What is the capital of Norway?", "And what is the capital of Sweden?", "Is it a large city?"]


async def streamed(live: Live, path: str, request: dict[str, Any]) -> list[dict[str, Any]]:
    async with live.session.post(live.url + path, json=request | {"stream": True}) as response:
        lines = [line[6:].strip() async for line in response.content if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_choices_are_those_of_smaller_requests(library: Library, bundled_pack: Pack) -> None:
    """The i-th choice does not depend on how many there are, on streaming, or on what else the server does."""
    async with serving(library, bundled_pack) as live:
        (alone,) = (await live.post("/v1/completions", STORY))["choices"]
        answers = await asyncio.gather(
            *(live.post("/v1/completions", STORY | {"n": n}) for n in (2, 5, 9)),
            *(live.post("/v1/completions", STORY | {"seed": seed}) for seed in range(9)),
        )
        texts = [[choice["text"] for choice in answer["choices"]] for answer in answers[:3]]
        assert texts[0][0] == alone["text"]
        assert texts[2][:5] == texts[1]
        assert texts[2][:2] == texts[0]
        assert len(set(texts[2])) == 9
        for answer, n in zip(answers[:3], (2, 5, 9), strict=True):
            usage = answer["usage"]
            assert usage["completion_tokens"] == 24 * n
            assert usage["prompt_tokens"] == answers[3]["usage"]["prompt_tokens"]
        pieces: dict[int, str] = {}
        for event in await streamed(live, "/v1/completions", STORY | {"n": 9}):
            (choice,) = event["choices"]
            pieces[choice["index"]] = pieces.get(choice["index"], "") + choice["text"]
        assert [pieces[index] for index in range(9)] == texts[2]


async def test_best_of_is_the_best_of_as_many_choices(library: Library, bundled_pack: Pack) -> None:
    """best_of gives those of n choices whose mean log-probability is highest, and counts all their tokens."""
    async with serving(library, bundled_pack) as live:
        every = await live.post("/v1/completions", STORY | {"n": 6, "logprobs": 1})
        best = await live.post("/v1/completions", STORY | {"best_of": 6, "n": 3})
        means = {choice["text"]: statistics.mean(choice["logprobs"]["token_logprobs"]) for choice in every["choices"]}
        ranked = sorted(means, key=lambda text: -means[text])
        assert [choice["text"] for choice in best["choices"]] == ranked[:3]
        assert best["usage"]["completion_tokens"] == every["usage"]["completion_tokens"] == 6 * 24


async def test_a_stop_string_ends_its_own_choice(library: Library, bundled_pack: Pack) -> None:
    """Where one choice meets the stop string it ends; the others go on to their own."""
    async with serving(library, bundled_pack) as live:
        free = [choice["text"] for choice in (await live.post("/v1/completions", STORY | {"n": 6}))["choices"]]
        stop = free[2][20:24]
        stopped = (await live.post("/v1/completions", STORY | {"n": 6, "stop": stop}))["choices"]
        for text, choice in zip(free, stopped, strict=True):
            assert choice["text"] == text.split(stop)[0]
            assert choice["finish_reason"] == ("stop" if stop in text else "length")


async def test_a_client_that_leaves_frees_all_its_choices(library: Library, bundled_pack: Pack) -> None:
    """Every slot of the request is free at once, before and after its prompt is computed; others go on."""
    request = {"prompt": "Once " * 300, "max_tokens": 700, "ignore_eos": True, "n": 8, "stream": True}
    async with serving(library, bundled_pack, batch={"slots": 9}) as live:
        other = asyncio.create_task(live.post("/v1/completions", STORY | {"max_tokens": 300}))
        for pause_s in (0.0, 0.02, 0.3):
            task = asyncio.create_task(live.post("/v1/completions", request))
            async with asyncio.timeout(120):
                while live.scheduler.counts.running < 8:  # noqa: ASYNC110 - the engine has no event for this
                    await asyncio.sleep(0.005)
                await asyncio.sleep(pause_s)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                while live.scheduler.counts.running > 1:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
        assert (await other)["usage"]["completion_tokens"] == 300


async def test_structured_choices_are_all_valid(library: Library, bundled_pack: Pack) -> None:
    """Each choice has masks of its own."""
    request = STORY | {"structured_outputs": {"regex": "[a-z]{8}"}, "n": 6, "ignore_eos": False}
    async with serving(library, bundled_pack) as live:
        choices = (await live.post("/v1/completions", request))["choices"]
        assert len(choices) == 6
        assert all(re.fullmatch("[a-z]{8}", choice["text"]) for choice in choices)
        assert len({choice["text"] for choice in choices}) > 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_is_computed_once(library: Library, bundled_pack: Pack, stream: bool) -> None:
    """Each turn says what of it was held, and gets the words that it gets from a server that holds nothing."""
    async with (
        serving(library, bundled_pack) as live,
        serving(library, bundled_pack, batch={"prefix_reuse": "off"}) as plain,
    ):
        messages: list[dict[str, str]] = []
        before = 0
        for question in TALK:
            messages.append({"role": "user", "content": question})
            request: dict[str, Any] = {"messages": messages, "temperature": 0, "max_tokens": 40}
            expected = await plain.post("/v1/chat/completions", request)
            words = expected["choices"][0]["message"]["content"]
            assert expected["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
            if stream:
                events = await streamed(
                    live, "/v1/chat/completions", request | {"stream_options": {"include_usage": True}}
                )
                parts = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
                text, usage = "".join(parts), events[-1]["usage"]
            else:
                answer = await live.post("/v1/chat/completions", request)
                text, usage = answer["choices"][0]["message"]["content"], answer["usage"]
            assert text == words
            assert usage["prompt_tokens"] == expected["usage"]["prompt_tokens"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert cached >= before or before < 16, "the last turn's prompt is the beginning of this one"
            before = usage["prompt_tokens"]
            messages.append({"role": "assistant", "content": words})
        assert cached >= 16
