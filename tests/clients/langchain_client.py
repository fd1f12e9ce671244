"""langchain-openai, unchanged: ChatOpenAI and OpenAIEmbeddings, sync, async and streaming, tools and structured output.

Usage: langchain_client.py BASE_URL   (runs in an environment of its own)
"""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Literal

import pydantic
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

QUESTION = "What is the capital of Norway?"
OSLO = "The capital of Norway is Oslo."


def check(name: str, good: object) -> None:
    print(f"  {'ok  ' if good else 'FAIL'} {name}", flush=True)
    if not good:
        raise SystemExit(1)


class City(pydantic.BaseModel):
    """A city."""

    name: Literal["Oslo", "Bergen"]
    rank: Annotated[int, pydantic.Field(ge=1, le=9)]


def get_time(city: str) -> str:
    """Get the local time in a city."""
    return city


def tools_and_forms(chat: ChatOpenAI) -> None:
    bound = chat.bind_tools([get_time])
    asked = "What time is it in Helsinki?"
    calls = bound.invoke(asked).tool_calls
    check("bind_tools", [(call["name"], call["args"]) for call in calls] == [("get_time", {"city": "Helsinki"})])
    whole = None
    for chunk in bound.stream(asked):
        whole = chunk if whole is None else whole + chunk
    check("tool calls of a stream", whole is not None and whole.tool_calls[0]["args"] == {"city": "Helsinki"})
    check("tool_choice", chat.bind_tools([City], tool_choice="City").invoke(QUESTION).tool_calls[0]["args"]["rank"] > 0)
    for method in ("json_schema", "function_calling"):
        parsed = chat.with_structured_output(City, method=method).invoke(QUESTION)
        check(f"with_structured_output, {method}", isinstance(parsed, City))


async def asynchronous(chat: ChatOpenAI) -> None:
    check("ainvoke", (await chat.ainvoke(QUESTION)).content == OSLO)
    check("astream", "".join([str(chunk.content) async for chunk in chat.astream(QUESTION)]) == OSLO)


def main() -> None:
    where = {"base_url": f"{sys.argv[1]}/v1", "api_key": "none", "model": "hummingbird-13m", "max_retries": 0}
    chat = ChatOpenAI(temperature=0, max_completion_tokens=30, stream_usage=True, **where)
    answer = chat.invoke(QUESTION)
    check("invoke", answer.content == OSLO)
    check("usage", answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] == 9)
    check("response metadata", answer.response_metadata["finish_reason"] == "stop")
    check("batch", [str(one.content) for one in chat.batch([QUESTION] * 4)] == [OSLO] * 4)
    chunks = list(chat.stream(QUESTION))
    check("stream", "".join(str(chunk.content) for chunk in chunks) == OSLO and len(chunks) > 1)
    check("usage of a stream", any(chunk.usage_metadata for chunk in chunks))
    asyncio.run(asynchronous(chat))
    tools_and_forms(chat)
    # Not cut into pieces by a tokenizer that is not the model's.
    embeddings = OpenAIEmbeddings(check_embedding_ctx_length=False, **where)
    vectors = embeddings.embed_documents(["The capital of Norway", "Oslo", "Rome"])
    check("embed_documents", len(vectors) == 3 and len(vectors[0]) == 256)
    check("embed_query", embeddings.embed_query("Oslo") == vectors[1])


if __name__ == "__main__":
    main()
