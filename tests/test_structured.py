"""Structured output with the real engine: whatever ends with `stop` is what was asked for."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import openai
import pydantic
import pytest
from daemon_process import DEADLINE_S, DaemonProcess
from jsonschema import Draft202012Validator
from live_server import Live, serving
from schemas import schemas

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from colibrid.engine.library import Library
    from colibrid.model.pack import Pack

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ASK = [{"role": "user", "content": "Tell me about Oslo."}]


@pytest.fixture
async def live(library: Library, bundled_pack: Pack) -> AsyncIterator[Live]:
    async with serving(library, bundled_pack) as live:
        yield live


def as_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@pytest.mark.slow
async def test_answers_follow_their_schemas(live: Live) -> None:
    """200 schemas, greedy and sampled, all at once: what stops validates, and nearly all stop."""
    asked = [(schema, temperature) for schema in schemas(200) for temperature in (0, 1)]

    async def answer(schema: dict[str, Any], temperature: float) -> str:
        request = {"messages": ASK, "max_tokens": 256, "temperature": temperature, "seed": 1}
        choice = (await live.post(CHAT, request | {"response_format": as_format(schema)}))["choices"][0]
        if choice["finish_reason"] == "stop":
            Draft202012Validator(schema).validate(json.loads(choice["message"]["content"]))
        return str(choice["finish_reason"])

    limit = asyncio.Semaphore(64)

    async def limited(schema: dict[str, Any], temperature: float) -> str:
        async with limit:
            return await answer(schema, temperature)

    reasons = await asyncio.gather(*(limited(*one) for one in asked))
    assert set(reasons) <= {"stop", "length"}
    assert reasons.count("stop") >= 0.95 * len(asked)


@pytest.mark.parametrize("temperature", [0, 1])
async def test_forms(live: Live, temperature: float) -> None:
    """A regex, choices, a grammar and any object, in completions and chats, whole and streamed."""
    for fields, pattern in [
        ({"regex": "[a-c]{2,4}/[0-9]"}, "[a-c]{2,4}/[0-9]"),
        ({"choice": ["Oslo", "<|im_end|>"]}, r"Oslo|<\|im_end\|>"),
        ({"grammar": 'start: "a" b{2}\nb: "x" | "y"\n'}, "a[xy]{2}"),
    ]:
        request = {"max_tokens": 50, "temperature": temperature, "structured_outputs": fields}
        choice = (await live.post(COMPLETIONS, request | {"prompt": "Say:"}))["choices"][0]
        assert re.fullmatch(pattern, choice["text"])
        assert choice["finish_reason"] == "stop"
        choice = (await live.post(CHAT, request | {"messages": ASK}))["choices"][0]
        assert re.fullmatch(pattern, choice["message"]["content"])


async def test_the_example_of_the_reference_answers_as_it_says(live: Live) -> None:
    """The page's request, greedy and as it stands, gets the answer that stands behind it."""
    page = (Path(__file__).parents[1] / "docs" / "reference" / "structured-output.md").read_text()
    example = re.search(r"messages=(\[.*\]),\n\s+extra_body=(\{(?:.*\n)*?    \}),\n.*\nprint.*  # (.*)", page)
    assert example is not None
    request = {"messages": json.loads(example[1])} | json.loads(example[2])
    for fields in ({}, {"temperature": 0}):
        answer = await live.post(CHAT, request | fields)
        assert answer["choices"][0]["message"]["content"] == example[3]


async def test_choices_have_masks_of_their_own(live: Live) -> None:
    """Several choices of one request differ and each is complete, whole and streamed."""
    request = {"messages": ASK, "max_tokens": 60, "temperature": 1, "seed": 3, "n": 4}
    schema = {"type": "object", "properties": {"s": {"type": "string", "maxLength": 12}}, "required": ["s"]}
    request |= {"response_format": as_format(schema)}
    texts = [choice["message"]["content"] for choice in (await live.post(CHAT, request))["choices"]]
    for text in texts:
        Draft202012Validator(schema).validate(json.loads(text))
    assert len(set(texts)) > 1
    async with live.session.post(live.url + CHAT, json=request | {"stream": True}) as response:
        events = (await response.text()).split("\n\n")
    streamed = ["", "", "", ""]
    for event in events[:-2]:
        choice = json.loads(event.removeprefix("data: "))["choices"][0]
        streamed[choice["index"]] += choice["delta"].get("content") or ""
    assert streamed == texts


async def test_length_cuts_an_answer(live: Live) -> None:
    """An answer that is not complete at max_tokens ends with length, one that is complete then with stop."""
    request = {"messages": ASK, "temperature": 0, "structured_outputs": {"choice": ["one two three four five"]}}
    whole = await live.post(CHAT, request | {"max_tokens": 50})
    tokens = whole["usage"]["completion_tokens"]
    for most, reason in [(tokens, "stop"), (tokens - 1, "length"), (1, "length")]:
        answer = await live.post(CHAT, request | {"max_tokens": most})
        assert answer["choices"][0]["finish_reason"] == reason
        assert answer["usage"]["completion_tokens"] == most
        assert whole["choices"][0]["message"]["content"].startswith(answer["choices"][0]["message"]["content"])


async def test_neighbours_do_not_notice(live: Live) -> None:
    """A plain request has the same text alone and among constrained ones; these have theirs, too."""
    plain = {"messages": ASK, "max_tokens": 40, "temperature": 1, "seed": 5}
    masked = plain | {"response_format": as_format(schemas(1, seed=9)[0])}
    alone = [await live.post(CHAT, plain), await live.post(CHAT, masked)]
    together = await asyncio.gather(*(live.post(CHAT, request) for request in [plain, masked] * 8))
    for index, answer in enumerate(together):
        assert answer["choices"] == alone[index % 2]["choices"]


async def test_grammar_without_a_legal_token(live: Live) -> None:
    """Biases that leave nothing of what the grammar allows fail that request by name."""
    request = {"prompt": "Hi", "max_tokens": 5, "structured_outputs": {"choice": ["yes"]}, "min_tokens": 5}
    async with live.session.post(live.url + COMPLETIONS, json=request) as response:
        assert response.status == 400
        assert "token" in (await response.json())["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["named", "required"])
async def test_tool_calls_follow_their_parameters(live: Live, choice: str) -> None:
    """100 tools each way, greedy and sampled: the arguments of every complete call validate, and nearly all complete."""
    limit = asyncio.Semaphore(64)

    async def call(schema: dict[str, Any], temperature: float) -> str:
        tools = [
            {"type": "function", "function": {"name": name, "description": "Tell it.", "parameters": schema}}
            for name in ("tell", "say")
        ]
        request = {
            "messages": ASK, "max_tokens": 300, "temperature": temperature, "seed": 1, "tools": tools,
            "tool_choice": {"type": "function", "function": {"name": "say"}} if choice == "named" else "required",
            "parallel_tool_calls": False,
        }  # fmt: skip
        async with limit:
            found = (await live.post(CHAT, request))["choices"][0]
        if found["finish_reason"] == "tool_calls":
            (one,) = found["message"]["tool_calls"]
            assert one["function"]["name"] in ({"say"} if choice == "named" else {"say", "tell"})
            Draft202012Validator(schema).validate(json.loads(one["function"]["arguments"]))
            assert found["message"]["content"] is None
        return str(found["finish_reason"])

    asked = [(schema, index % 2) for index, schema in enumerate(schemas(100, seed=4 if choice == "named" else 5))]
    reasons = await asyncio.gather(*(call(*one) for one in asked))
    assert set(reasons) <= {"tool_calls", "length"}
    assert reasons.count("tool_calls") >= 0.95 * len(asked)


async def test_openai_sdk_sees_tools_and_forms(live: Live) -> None:
    """The SDK's own helpers: parsed answers, and a streamed tool call put together by its accumulator."""

    class City(pydantic.BaseModel):
        name: Literal["Oslo", "Bergen"]
        rank: Annotated[int, pydantic.Field(ge=1, le=9)]

    tool = openai.pydantic_function_tool(City, name="tell")
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        parsed = await client.chat.completions.parse(
            model="hummingbird-13m", messages=ASK, response_format=City, temperature=0
        )
        assert isinstance(parsed.choices[0].message.parsed, City)
        async with client.chat.completions.stream(
            model="hummingbird-13m", messages=ASK, tools=[tool], tool_choice="required", temperature=0
        ) as stream:
            events = [event.type async for event in stream]
            final = await stream.get_final_completion()
        assert "tool_calls.function.arguments.delta" in events
        assert final.choices[0].finish_reason == "tool_calls"
        calls = final.choices[0].message.tool_calls
        assert calls is not None
        assert isinstance(calls[0].function.parsed_arguments, City)
        answered = await client.chat.completions.create(
            model="hummingbird-13m",
            messages=[*ASK, final.choices[0].message, {"role": "tool", "tool_call_id": calls[0].id, "content": "yes"}],
            tools=[tool],
            max_tokens=20,
        )
        assert answered.choices[0].finish_reason in {"stop", "length", "tool_calls"}


def _tool(name: str, description: str, **properties: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties),
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TIME = _tool("get_time", "Get the local time in a city.", city="string")
ADD = _tool("add", "Add two numbers.", a="integer", b="integer")


@pytest.mark.parametrize("stream", [False, True])
async def test_the_model_calls_by_itself(live: Live, stream: bool) -> None:
    """The bundled model calls the right tool unforced, reads its answer, and answers without where none is needed."""
    messages: list[Any] = [{"role": "user", "content": "What time is it in Helsinki?"}]
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:

        async def ask(messages: list[Any]) -> Any:
            request: Any = {
                "model": "hummingbird-13m", "messages": messages, "tools": [TIME, ADD], "temperature": 0, "max_tokens": 80
            }  # fmt: skip
            if not stream:
                return (await client.chat.completions.create(**request)).choices[0]
            async with client.chat.completions.stream(**request) as chunks:
                return (await chunks.get_final_completion()).choices[0]

        choice = await ask(messages)
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_time", {"city": "Helsinki"})
        sent_back = {"role": "assistant", "tool_calls": [call.model_dump(include={"id", "type", "function"})]}
        messages += [sent_back, {"role": "tool", "tool_call_id": call.id, "content": '{"time": "20:59"}'}]
        choice = await ask(messages)
        assert choice.message.content == "It is 20:59 in Helsinki."
        assert choice.finish_reason == "stop"
        choice = await ask([{"role": "user", "content": "Please add 355 and 932 with the tool."}])
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"a": 355, "b": 932}
        choice = await ask([{"role": "user", "content": "What is the capital of Norway?"}])
        assert choice.message.content == "The capital of Norway is Oslo."
        assert not choice.message.tool_calls


def children_of(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def test_the_daemon_ends_with_its_helpers(tmp_path: Path) -> None:
    """The process that tries grammars out comes with the first grammar and goes with the daemon, even killed."""
    with DaemonProcess(tmp_path) as daemon:
        daemon.wait_ready()
        before = children_of(daemon.process.pid)
        request = {"prompt": "Hi", "structured_outputs": {"choice": ["Oslo"]}}
        status, answer = daemon.request("POST", COMPLETIONS, request)
        assert (status, answer["choices"][0]["text"]) == (200, "Oslo")
        (helper,) = children_of(daemon.process.pid) - before
        os.kill(helper, signal.SIGKILL)
        status, _ = daemon.request("POST", COMPLETIONS, {"prompt": "Hi", "structured_outputs": {"choice": ["Rome"]}})
        assert status == 200
        (helper,) = children_of(daemon.process.pid) - before
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(DEADLINE_S) == 0
        assert gone({helper})
    with DaemonProcess(tmp_path) as daemon:
        daemon.wait_ready()
        daemon.request("POST", COMPLETIONS, {"prompt": "Hi", "structured_outputs": {"choice": ["Oslo"]}})
        helpers = children_of(daemon.process.pid)
        daemon.process.kill()
        assert gone(helpers)


def gone(pids: set[int]) -> bool:
    """True once none of them runs."""
    deadline = time.monotonic() + DEADLINE_S
    while any(map(runs, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
