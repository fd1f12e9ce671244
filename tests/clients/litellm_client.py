"""litellm, unchanged: completion, streaming, async, text completion and embedding.

Usage: litellm_client.py BASE_URL   (runs in an environment of its own)
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm

QUESTION = [{"role": "user", "content": "What is the capital of Norway?"}]
OSLO = "The capital of Norway is Oslo."


def check(name: str, good: object) -> None:
    print(f"  {'ok  ' if good else 'FAIL'} {name}", flush=True)
    if not good:
        raise SystemExit(1)


TIME = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Get the local time in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"rank": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["rank"],
}


def tools_and_forms(where: dict[str, Any]) -> None:
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": "What time is it in Helsinki?"}], "tools": [TIME], "temperature": 0
    }  # fmt: skip
    message = litellm.completion(**asked, **where).choices[0].message
    check("tools", json.loads(message.tool_calls[0].function.arguments) == {"city": "Helsinki"})
    chunks = list(litellm.completion(**asked, stream=True, **where))
    whole = litellm.stream_chunk_builder(chunks)
    check("tools of a stream", whole.choices[0].message.tool_calls[0].function.name == "get_time")
    form = {"type": "json_schema", "json_schema": {"name": "rank", "schema": SCHEMA, "strict": True}}
    answer = litellm.completion(messages=QUESTION, response_format=form, **where)
    check("response_format", 1 <= json.loads(answer.choices[0].message.content)["rank"] <= 9)


async def asynchronous(where: dict[str, Any]) -> None:
    answers = await asyncio.gather(*(litellm.acompletion(messages=QUESTION, temperature=0, **where) for _ in range(4)))
    check("acompletion", [answer.choices[0].message.content for answer in answers] == [OSLO] * 4)


def main() -> None:
    litellm.suppress_debug_info = True
    url = f"{sys.argv[1]}/v1"
    where: dict[str, Any] = {"model": "openai/hummingbird-13m", "api_base": url, "api_key": "none", "num_retries": 0}
    answer = litellm.completion(messages=QUESTION, temperature=0, **where)
    check("completion", answer.choices[0].message.content == OSLO)
    check("usage", answer.usage.completion_tokens == 9)
    stream = litellm.completion(messages=QUESTION, temperature=0, stream=True, **where)
    check("stream", "".join(chunk.choices[0].delta.content or "" for chunk in stream) == OSLO)
    asyncio.run(asynchronous(where))
    tools_and_forms(where)
    text = {**where, "model": "text-completion-openai/hummingbird-13m"}
    check("text_completion", litellm.text_completion(prompt="The capital of", max_tokens=3, **text).choices[0].text)
    vectors = litellm.embedding(input=["Oslo", "Rome"], **where)
    check("embedding", [len(entry["embedding"]) for entry in vectors.data] == [256, 256])
    try:
        litellm.completion(messages=QUESTION, **{**where, "model": "openai/gpt-4o"})
    except litellm.NotFoundError:
        check("NotFoundError", good=True)


if __name__ == "__main__":
    main()
