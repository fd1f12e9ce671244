"""Bad input of every kind: the right status, the field by name, nothing submitted."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from colibrid.errors import EngineFaultError, OverloadedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.http.conftest import Server

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
ASK = [{"role": "user", "content": "Hi"}]

BAD_COMPLETIONS = [
    # fields, param, part of the message
    ({}, "prompt", "missing"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [[]]}, "prompt[0]", "empty"),
    ({"prompt": ["a", ""]}, "prompt[1]", "empty"),
    ({"prompt": 5}, "prompt", "expected"),
    ({"prompt": {"a": 1}}, "prompt", "expected"),
    ({"prompt": [1, "a"]}, "prompt", "prompt[1]"),
    ({"prompt": [1, True]}, "prompt", "prompt[1]"),
    ({"prompt": [True]}, "prompt[0]", "expected"),
    ({"prompt": [1, 4096]}, "prompt", "prompt[1] = 4096"),
    ({"prompt": [-1]}, "prompt", "0 to 4095"),
    ({"prompt": [1 << 70]}, "prompt", "0 to 4095"),
    ({"prompt": [1.0]}, "prompt[0]", "expected"),
    ({"prompt": [["a"]]}, "prompt[0]", "prompt[0][0]"),
    ({"prompt": [[1], None]}, "prompt[1]", "expected"),
    ({"prompt": [[1]] * 300}, "prompt", "256"),
    ({"prompt": [1] * 2049}, "prompt", "2048"),
    ({"prompt": [1] * 2048}, "prompt", "2049"),
    ({"prompt": [1] * 2000, "max_tokens": 49}, "max_tokens", "2049"),
    ({"max_tokens": -1}, "max_tokens", ">= 0"),
    ({"max_tokens": 1.5}, "max_tokens", "int"),
    ({"max_tokens": "5"}, "max_tokens", "int"),
    ({"max_tokens": 1 << 40}, "max_tokens", ""),
    ({"temperature": -0.1}, "temperature", ">= 0"),
    ({"temperature": 2.1}, "temperature", "<= 2"),
    ({"temperature": "hot"}, "temperature", "float"),
    ({"top_p": 0}, "top_p", "> 0"),
    ({"top_p": 1.01}, "top_p", "<= 1"),
    ({"top_k": -2}, "top_k", ">= -1"),
    ({"min_p": 1.5}, "min_p", "<= 1"),
    ({"seed": 1.5}, "seed", "int"),
    ({"seed": 1 << 63}, "seed", "int"),
    ({"stop": 5}, "stop", "str"),
    ({"stop": ""}, "stop", "length >= 1"),
    ({"stop": ["a", ""]}, "stop[1]", "length >= 1"),
    ({"stop": ["a"] * 17}, "stop", "length <= 16"),
    ({"stop": "x" * 257}, "stop", "length <= 256"),
    ({"stop_token_ids": [4096]}, "stop_token_ids", "stop_token_ids[0] = 4096"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", ">= 0"),
    ({"stop_token_ids": list(range(63))}, "stop_token_ids", "64"),
    ({"min_tokens": 17}, "min_tokens", "17"),
    ({"presence_penalty": 2.5}, "presence_penalty", "<= 2"),
    ({"frequency_penalty": -2.5}, "frequency_penalty", ">= -2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "> 0"),
    ({"logit_bias": {"4096": 1}}, "logit_bias", "0 to 4095"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "-1"),
    ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias", "01"),
    ({"logit_bias": {"1_0": 1}}, "logit_bias", "1_0"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "x"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "<= 100"),
    ({"logit_bias": [1]}, "logit_bias", "object"),
    ({"logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias", "1024"),
    ({"logprobs": 21}, "logprobs", "<= 20"),
    ({"logprobs": -1}, "logprobs", ">= 0"),
    ({"logprobs": True}, "logprobs", "int"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "<= 20"),
    ({"echo": 1}, "echo", "bool"),
    ({"stream": "yes"}, "stream", "bool"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    ({"stream": True, "stream_options": {"include": 1}}, "stream_options.include", "nknown"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "0"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", ">= -1"),
    ({"experts": {"per_token": 3}}, "experts.per_token", "send 1 to 2"),
    ({"experts": {"per_token": 0}}, "experts.per_token", ">= 1"),
    ({"experts": {"threshold": 1.5}}, "experts.threshold", "<= 1"),
    ({"experts": {"k": 1}}, "experts.k", "nknown"),
    ({"experts": 2}, "experts", "object"),
    ({"model": 3}, "model", "str"),
    ({"n": 0}, "n", ">= 1"),
    ({"n": 33}, "n", "32 slots"),
    ({"n": 10**9}, "n", "<= 64"),
    ({"n": True}, "n", "int"),
    ({"n": 3, "best_of": 2}, "best_of", "less than n = 3"),
    ({"best_of": 33}, "best_of", "32 slots"),
    ({"best_of": 65}, "best_of", "<= 64"),
    ({"best_of": 2, "stream": True}, "best_of", "stream"),
    ({"suffix": "x"}, "suffix", "no tokens"),
    ({"suffix": 5}, "suffix", "str"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "nknown"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice[1]", "empty"),
    ({"structured_outputs": {"choice": ["a"] * 1025}}, "structured_outputs.choice", "1024"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not JSON"),
    ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json", "object"),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "one of",
    ),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "structured_outputs.regex"),
    ({"guided_regex": "a"}, "guided_regex", "structured_outputs"),
    ({"use_beam_search": True}, "use_beam_search", "not implemented yet"),
    ({"priority": 1001}, "priority", "<= 1000"),
    ({"priority": -1001}, "priority", ">= -1000"),
    ({"priority": 0.5}, "priority", "int"),
    ({"timeout_s": 0}, "timeout_s", "> 0"),
]

BAD_CHATS = [
    ({"messages": None}, "messages", "array"),
    ({"messages": []}, "messages", "length >= 1"),
    ({"messages": [{"role": "user", "content": "a"}] * 4097}, "messages", "length <= 4096"),
    ({"messages": "hi"}, "messages", 'expected array, got str: "hi";'),
    ({"messages": [{"content": "a"}]}, "messages[0].role", "missing"),
    (
        {"messages": [{"role": "robot", "content": "a"}]},
        "messages[0].role",
        '"robot" is not one of the allowed values: "assistant", "developer", "system", "tool", "user";',
    ),
    ({"reasoning_effort": "much"}, "reasoning_effort", '"low", "max", "medium"'),
    ({"response_format": {"type": "xml"}}, "response_format.type", '"json_object", "json_schema", "text"'),
    ({"store": True}, "store", "true is not one of the allowed values: false;"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "str"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type", "image_url"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "string"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, "messages[0].tool_calls", "assistant"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function.name", "string"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "<= 20"),
    ({"logprobs": 2}, "logprobs", "bool"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "differ"),
    ({"max_completion_tokens": 2048}, "max_completion_tokens", "2048"),
    ({"continue_final_message": True}, "continue_final_message", "add_generation_prompt"),
    ({"functions": [{}]}, "functions", "not implemented yet"),
    ({"function_call": "auto"}, "function_call", "not implemented yet"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "yaml"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "needs"),
    ({"response_format": {"type": "text", "json_schema": {}}}, "response_format.json_schema", "no use"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
        "response_format.json_schema.schema",
        "object",
    ),
    ({"store": True}, "store", "true"),
    ({"service_tier": "flex"}, "service_tier", "not implemented yet"),
    ({"audio": {}}, "audio", "not implemented yet"),
    ({"modalities": ["audio"]}, "modalities", "not implemented yet"),
    ({"prediction": {}}, "prediction", "not implemented yet"),
    ({"web_search_options": {}}, "web_search_options", "not implemented yet"),
    ({"n": 33}, "n", "32 slots"),
    ({"best_of": 2}, "best_of", "not implemented yet"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
]


@pytest.mark.parametrize(("fields", "param", "part"), BAD_COMPLETIONS)
async def test_bad_completion(server: Server, fields: dict[str, Any], param: str, part: str) -> None:
    """A wrong field of a completion is 400, named, and explained."""
    answer = await server.post(COMPLETIONS, fields if "prompt" in fields or not fields else {"prompt": "Hi"} | fields)
    assert answer.status == 400
    assert answer.error["param"] == param
    assert answer.error["type"] == "invalid_request_error"
    assert part in answer.error["message"]
    assert not server.service.seen


@pytest.mark.parametrize(("fields", "param", "part"), BAD_CHATS)
async def test_bad_chat(server: Server, fields: dict[str, Any], param: str, part: str) -> None:
    """A wrong field of a chat is 400, named, and explained."""
    answer = await server.post(CHAT, {"messages": ASK} | fields)
    assert answer.status == 400
    assert answer.error["param"] == param
    assert part in answer.error["message"]
    assert not server.service.seen


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b'"prompt"',
        b'{"prompt": "a",}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": -Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "\\ud800 alone"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a": ' * 100_000,
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "a", "zeta": {"a": 1}, "zeta": 2}',
        b'{"prompt": "a", "\\u0070rompt": "b"}',
    ],
)
async def test_broken_json(server: Server, raw: bytes) -> None:
    """What is not one JSON object of finite numbers and valid Unicode is 400."""
    answer = await server.raw(COMPLETIONS, raw)
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"
    assert not server.service.seen


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [[5] * 2000] * 30, "max_tokens": 0, "echo": True, "logprobs": 20}, "prompt_logprobs"),
        ({"prompt": [[5] * 2000] * 30, "max_tokens": 0, "prompt_logprobs": 20}, "prompt_logprobs"),
        ({"prompt": [[5]] * 256, "max_tokens": 1000, "logprobs": 20}, "logprobs"),
        ({"prompt": [5], "max_tokens": 2000, "logprobs": 20, "n": 26}, "logprobs"),
    ],
)
async def test_answers_are_bounded(server: Server, fields: dict[str, Any], param: str) -> None:
    """A request whose answer could hold more log-probabilities than the limit is 400 with both numbers."""
    answer = await server.post(COMPLETIONS, fields)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert "1048576" in answer.error["message"]
    assert not server.service.seen


@pytest.mark.parametrize("field", ["chat_template_kwargs", "experts", "structured_outputs", "stream_options", "model"])
async def test_errors_are_short_whatever_the_names(server: Server, field: str) -> None:
    """A name of 100 KB that the client made up is not sent back."""
    name = "n" * 100_000
    answer = await server.post(CHAT, {"messages": ASK, field: name if field == "model" else {name: 1}})
    assert answer.status in {400, 404}
    assert "nnn" in answer.error["message"]
    assert answer.error["param"].startswith(field)
    assert len(answer.raw) < 1000


async def test_inner_objects_may_repeat_names(server: Server) -> None:
    """What is refused twice is a field of the request; names inside of fields are another matter."""
    raw = b'{"prompt": "a", "max_tokens": 1, "zeta": {"prompt": 1, "max_tokens": {"a": "a:,{"}}}'
    assert (await server.raw(COMPLETIONS, raw)).status == 200


async def test_context_length_names_both_numbers(server: Server) -> None:
    """Prompt and max_tokens beyond the context: the code, and all numbers in the message."""
    error = (await server.post(COMPLETIONS, {"prompt": [1] * 2000, "max_tokens": 100})).error
    assert error["code"] == "context_length_exceeded"
    for number in ("2000", "100", "2100", "2048"):
        assert number in error["message"]


async def test_unknown_model_is_404(server: Server) -> None:
    """Another model than the served one is 404 and names the served one; its own name is fine."""
    for path, fields in ((COMPLETIONS, {"prompt": "Hi"}), (CHAT, {"messages": ASK})):
        answer = await server.post(path, fields | {"model": "gpt-4"})
        assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
        assert "hummingbird-13m" in answer.error["message"]
        assert (await server.post(path, fields | {"model": "hummingbird-13m"})).status == 200


async def test_unknown_fields_are_reported(server: Server) -> None:
    """Fields unknown to the API are accepted and listed in a header that they cannot break."""
    request = {"prompt": "Hi", "zeta": 1, "alpha\r\nX-Evil: 1": 2, "é": None}
    answer = await server.post(COMPLETIONS, request)
    assert answer.status == 200
    assert answer.headers["x-colibri-ignored"] == "alpha??X-Evil: 1,zeta,?"
    assert "X-Evil" not in answer.headers
    answer = await server.post(CHAT, {"messages": [{"role": "user", "content": "Hi", "mood": 1}]})
    assert answer.headers["x-colibri-ignored"] == "messages.mood"


async def test_unknown_fields_are_refused_when_strict(make_server: Callable[..., Any]) -> None:
    """With server.strict an unknown field is 400."""
    server = await make_server(server={"strict": True})
    answer = await server.post(COMPLETIONS, {"prompt": "Hi", "zeta": 1})
    assert (answer.status, answer.error["param"]) == (400, "zeta")


async def test_media_type(server: Server) -> None:
    """Only plain JSON is taken: other types and compressed bodies are 415."""
    good = b'{"prompt": "Hi"}'
    assert (await server.raw(COMPLETIONS, good, Content_Type="text/plain")).status == 415
    answer = await server.raw(COMPLETIONS, good, Content_Type="application/x-www-form-urlencoded")
    assert answer.status == 415
    assert "Content-Type: application/json" in answer.error["message"]
    assert (await server.raw(COMPLETIONS, good, Content_Encoding="gzip")).status == 415
    assert (await server.raw(COMPLETIONS, good, Content_Type="application/json; charset=utf-8")).status == 200


async def test_body_limit(make_server: Callable[..., Any]) -> None:
    """A body over server.max_body_bytes is 413, whether or not its length is told."""
    server = await make_server(server={"max_body_bytes": 2048})
    big = b'{"prompt": "' + b"a" * 4096 + b'"}'
    assert (await server.raw(COMPLETIONS, big)).status == 413

    async def chunks() -> Any:
        yield big

    async with server.session.post(
        server.url + COMPLETIONS, data=chunks(), headers={"Content-Type": "application/json"}
    ) as response:
        assert response.status == 413
        assert set((await response.json())["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("path", "good", "long_field"),
    [
        (COMPLETIONS, b'"prompt": "Hi"', "prompt"),
        ("/generate", b'"prompt": "Hi"', "prompt"),
        (CHAT, b'"messages": [1]', "messages"),
    ],
)
@pytest.mark.parametrize("name", [b"zeta", b"metadata", b"tools", b"stop", b"prompt", b"messages"])
async def test_only_prompts_may_be_large(server: Server, path: str, good: bytes, long_field: str, name: bytes) -> None:
    """Megabytes in any other field are refused before they are built, with the size, the limit and the exception."""
    if name.decode() == long_field:
        return
    answer = await server.raw(path, b"{" + good + b', "' + name + b'": [' + b"1," * 150_000 + b"1]}")
    assert (answer.status, answer.error["code"]) == (400, "string_above_max_length")
    for part in (long_field, "3000", "262144"):
        assert part in answer.error["message"]


async def test_large_prompts_are_not_other_fields(server: Server) -> None:
    """A large prompt is judged by its tokens; a large body that is no object is named so."""
    for path, fields in (
        (COMPLETIONS, {"prompt": "a" * 400_000}),
        (CHAT, {"messages": [ASK[0] | {"content": "a" * 400_000}]}),
    ):
        assert (await server.post(path, fields)).error["code"] == "context_length_exceeded"
    answer = await server.post(COMPLETIONS, {"prompt": [-1] * 100_000})
    assert answer.error["code"] == "context_length_exceeded"
    assert "100000" in answer.error["message"]
    answer = await server.raw(COMPLETIONS, b"[" + b"1," * 150_000 + b"1]")
    assert (answer.status, answer.error["code"]) == (400, "invalid_json")
    assert "object" in answer.error["message"]


async def test_garbage_collection_goes_on(server: Server) -> None:
    """It rests while a body is decoded, also while a bad one is."""
    for raw in (b'{"prompt": "Hi"}', b'{"prompt": 5}', b"nonsense"):
        await server.raw(COMPLETIONS, raw)
        assert gc.isenabled()


async def test_prompt_bytes_limit(make_server: Callable[..., Any]) -> None:
    """Prompts over limits.prompt_bytes are refused before they are tokenized."""
    server = await make_server(limits={"prompt_bytes": 10})
    answer = await server.post(COMPLETIONS, {"prompt": ["aaaaaa", "éé", "b"]})
    assert (answer.status, answer.error["code"]) == (400, "string_above_max_length")
    assert "11" in answer.error["message"]
    answer = await server.post(CHAT, {"messages": [{"role": "user", "content": "a" * 11}]})
    assert (answer.status, answer.error["code"]) == (400, "string_above_max_length")


async def test_slow_body_is_408(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that does not arrive in time is 408."""
    monkeypatch.setattr("colibrid.http.body.BODY_TIMEOUT_S", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 50\r\n\r\n{"
    )
    assert (await reader.readline()).startswith(b"HTTP/1.1 408")
    writer.close()


async def test_overload_is_503_with_retry_after(server: Server) -> None:
    """A full queue is 503 with Retry-After in seconds and milliseconds."""
    server.service.refusal = OverloadedError("full", code="server_is_overloaded", retry_after_s=2.5)
    answer = await server.post(COMPLETIONS, {"prompt": "Hi"})
    assert (answer.status, answer.error["code"]) == (503, "server_is_overloaded")
    assert (answer.headers["Retry-After"], answer.headers["retry-after-ms"]) == ("3", "2500")


async def test_draining_closes_the_connection(server: Server) -> None:
    """While draining, requests are 503 and the connection closes."""
    server.service.refusal = OverloadedError("bye", code="draining", retry_after_s=1)
    answer = await server.post(COMPLETIONS, {"prompt": "Hi"})
    assert (answer.status, answer.error["code"], answer.headers["Connection"]) == (503, "draining", "close")


async def test_engine_fault_is_500(server: Server) -> None:
    """An engine that dies before the answer is a 500 of the contract."""
    server.service.failure = EngineFaultError("the engine died")
    answer = await server.post(COMPLETIONS, {"prompt": "Hi"})
    assert (answer.status, answer.error["type"]) == (500, "server_error")


async def test_mistakes_of_ours_say_nothing_of_the_inside(server: Server) -> None:
    """An unexpected exception is a 500 that names the request id only."""
    server.service.failure = ValueError("/secret/path 0xdeadbeef")
    answer = await server.post(COMPLETIONS, {"prompt": "Hi"}, **{"x-request-id": "abc-1"})
    assert answer.status == 500
    assert "abc-1" in answer.error["message"]
    assert b"secret" not in answer.raw
    assert b"ValueError" not in answer.raw


async def test_broken_chunks_are_a_client_error(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunked body that breaks after its first chunk is a body that never arrives, not a mistake of ours."""
    monkeypatch.setattr("colibrid.http.body.BODY_TIMEOUT_S", 0.2)
    with structlog.testing.capture_logs() as logs:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n3\r\n{ \n\r\n"
        )
        await asyncio.sleep(0.05)
        writer.write(b"zz\r\n")
        assert (await reader.readline()).split()[1] in {b"400", b"408"}
        writer.close()
    assert not [line for line in logs if line["log_level"] == "error"]


async def test_bodies_under_way_are_bounded(make_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """While as many bytes of others are held as may be, a request is 503; when they are gone it is answered."""
    monkeypatch.setattr("colibrid.http.body.MAX_INCOMING_BODIES", 1)
    server = await make_server(server={"max_body_bytes": 1024})
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    _, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    writer.write(head + b"Content-Length: 1020\r\n\r\n" + b" " * 1015)
    while server.state.incoming.bytes != 1015:  # noqa: ASYNC110 - the condition is of the other side
        await asyncio.sleep(0.005)
    answer = await server.post(COMPLETIONS, {"prompt": "Hi"})
    assert (answer.status, answer.error["code"]) == (503, "server_is_overloaded")
    assert answer.headers["Retry-After"] == "1"
    writer.close()
    while server.state.incoming.bytes:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    for _ in range(3):
        assert (await server.post(COMPLETIONS, {"prompt": "Hi"})).status == 200
        assert server.state.incoming.bytes == 0
