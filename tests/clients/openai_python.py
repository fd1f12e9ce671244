"""The openai SDK for Python, unchanged: sync, async, streams, log-probabilities, tools,
structured output, embeddings and errors.

Usage: openai_python.py BASE_URL MAJOR   (runs in an environment of its own; exits 1 unless all is as it should be)
"""

from __future__ import annotations

import asyncio
import math
import sys
from typing import Annotated, Any, Literal

import openai
import pydantic

QUESTION: Any = [{"role": "user", "content": "What is the capital of Norway?"}]
OSLO = "The capital of Norway is Oslo."
MODEL = "hummingbird-13m"


def check(name: str, good: object) -> None:
    """One line for each check; the first that fails ends the run."""
    print(f"  {'ok  ' if good else 'FAIL'} {name}", flush=True)
    if not good:
        raise SystemExit(1)


def models(client: openai.OpenAI) -> None:
    found = client.models.list().data
    check("models.list", [model.id for model in found] == [MODEL])
    check("models.retrieve", client.models.retrieve(MODEL).id == MODEL)


def completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="The capital of", max_tokens=4, temperature=0, logprobs=2)
    (choice,) = answer.choices
    check("completions.create", choice.text and choice.finish_reason == "length")
    assert choice.logprobs is not None
    assert answer.usage is not None
    check("its log-probabilities", len(choice.logprobs.token_logprobs or []) == answer.usage.completion_tokens == 4)
    several = client.completions.create(model=MODEL, prompt=["a b", "c d"], max_tokens=3, temperature=0)
    check("a list of prompts", [choice.index for choice in several.choices] == [0, 1])
    pieces = client.completions.create(
        model=MODEL,
        prompt="The capital of",
        max_tokens=4,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(pieces)
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    check("a stream of completions", text == choice.text)
    check("its usage", chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 4)


class GetTime(pydantic.BaseModel):
    """Get the local time in a city."""

    city: str


class City(pydantic.BaseModel):
    """A city."""

    name: Literal["Oslo", "Bergen"]
    rank: Annotated[int, pydantic.Field(ge=1, le=9)]


def tools_and_forms(client: openai.OpenAI) -> None:
    asked: Any = [{"role": "user", "content": "What time is it in Helsinki?"}]
    tool = openai.pydantic_function_tool(GetTime, name="get_time")
    with client.chat.completions.stream(model=MODEL, messages=asked, tools=[tool], temperature=0) as stream:
        seen = {event.type for event in stream}
        (choice,) = stream.get_final_completion().choices
    check("a streamed tool call", "tool_calls.function.arguments.done" in seen and choice.finish_reason == "tool_calls")
    (call,) = choice.message.tool_calls or []
    check("its arguments", call.function.parsed_arguments == GetTime(city="Helsinki"))
    parsed = client.chat.completions.parse(model=MODEL, messages=QUESTION, response_format=City)
    check("chat.completions.parse", isinstance(parsed.choices[0].message.parsed, City))
    choice_of = {"structured_outputs": {"choice": ["Oslo", "Bergen"]}}
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, extra_body=choice_of)
    check("extra_body", answer.choices[0].message.content in {"Oslo", "Bergen"})


def chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, seed=1, logprobs=True, top_logprobs=2, max_completion_tokens=20
    )
    (choice,) = answer.choices
    check("chat.completions.create", choice.message.content == OSLO and choice.finish_reason == "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    check("its log-probabilities", all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content))
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=QUESTION, temperature=0)
    check("with_raw_response", raw.headers["x-request-id"] and raw.parse().choices[0].message.content == OSLO)
    with client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, stream=True) as stream:
        parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    check("a stream of chat", "".join(parts) == OSLO and len(parts) > 1)
    stopped = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, stop=[" is"])
    check("stop", stopped.choices[0].message.content == "The capital of Norway")


def embeddings(client: openai.OpenAI) -> None:
    texts = ["The capital of Norway", "Oslo"]
    plain = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    default = client.embeddings.create(model=MODEL, input=texts)  # base64 on the wire
    check("embeddings.create", [entry.embedding for entry in plain.data] == [entry.embedding for entry in default.data])
    check("their length", all(abs(math.hypot(*entry.embedding) - 1) < 1e-5 for entry in plain.data))
    check("their usage", plain.usage.prompt_tokens == plain.usage.total_tokens > len(texts))
    short = client.embeddings.create(model=MODEL, input=[[5, 6, 7]], dimensions=8).data[0].embedding
    check("dimensions", len(short) == 8 and abs(math.hypot(*short) - 1) < 1e-5)
    few = client.embeddings.create(model=MODEL, input="Oslo", extra_body={"experts": {"per_token": 1}})
    check("extra_body", few.data[0].embedding != plain.data[1].embedding)


def errors(client: openai.OpenAI) -> None:
    try:
        client.chat.completions.create(model="gpt-4o", messages=QUESTION)
    except openai.NotFoundError as error:
        check("NotFoundError", error.code == "model_not_found" and error.param == "model")
    try:
        client.completions.create(model=MODEL, prompt="a", temperature=3)
    except openai.BadRequestError as error:
        check("BadRequestError", error.param == "temperature" and error.request_id)


async def together(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:

        async def streamed() -> str:
            stream = await client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

        async def plain() -> str:
            answer = await client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
            return answer.choices[0].message.content or ""

        texts = await asyncio.gather(*(work() for work in (plain, streamed) * 4))
        check("async: plain and streamed together", texts == [OSLO] * 8)
        vectors = await client.embeddings.create(model=MODEL, input=["a b", "c d"])
        check("async: embeddings", len(vectors.data) == 2)


def main() -> None:
    url, major = f"{sys.argv[1]}/v1", sys.argv[2]
    check(f"openai {openai.__version__}", openai.__version__.split(".")[0] == major)
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        for part in (models, completions, chat, tools_and_forms, embeddings, errors):
            part(client)
    asyncio.run(together(url))


if __name__ == "__main__":
    main()
