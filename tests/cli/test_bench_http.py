"""`colibrid bench http` against a server made for the test: what is sent, what is counted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from colibrid.cli.main import run

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

    Handler = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


class FakeServer:
    """An OpenAI server in a thread; `handler` answers completions, all of whose bodies are kept."""

    def __init__(self, handler: Handler) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.models: object = {"object": "list", "data": [{"id": "fake", "object": "model"}]}
        self.url = ""
        self._handler = handler

    @contextlib.contextmanager
    def running(self) -> Iterator[FakeServer]:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        runner = asyncio.run_coroutine_threadsafe(self._start(), loop).result(10)
        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    async def _start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/v1/models", self._list)
        app.router.add_post("/v1/completions", self._complete)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    async def _list(self, _request: web.Request) -> web.Response:
        return web.json_response(self.models)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        return await self._handler(request, body)


async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """A proper server: two events of text whose tokens make up max_tokens, or one whole answer."""
    usage = {"completion_tokens": body["max_tokens"]}
    if not body.get("stream"):
        return web.json_response({"choices": [{"text": "ab"}], "usage": usage})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in (
        {"choices": [{"text": "a"}]},
        {"choices": [{"text": "b"}]},
        {"choices": [{"text": "", "finish_reason": "length"}]},
        {"choices": [], "usage": usage},
    ):
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await asyncio.sleep(0.002)
    await response.write(b"data: [DONE]\n\n")
    return response


def bench(url: str, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and report."""
    code = run(["bench", "http", "--url", url, "--json", "--prompt-tokens", "6", "--max-tokens", "5", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_streams_are_counted_and_timed(capsys: pytest.CaptureFixture[str]) -> None:
    """Every request is answered, rates are counts over the time, and tokens have times of their own."""
    with FakeServer(answer).running() as server:
        code, report = bench(server.url, capsys, "--clients", "3", "--requests", "12", "--warmup", "2")
    assert code == 0
    assert (report["ok"], report["refused"], report["failed"], report["model"]) == (12, 0, 0, "fake")
    assert len(server.bodies) == 14
    assert report["requests_per_s"] == pytest.approx(12 / report["elapsed_s"])
    assert report["output_tokens_per_s"] == pytest.approx(60 / report["elapsed_s"])
    assert report["tokens_per_request"] == 5
    request, first = report["request_ms"], report["first_token_ms"]
    between, events = report["between_tokens_ms"], report["between_events_ms"]
    assert 0 < first["p50"] < request["p50"] <= request["p90"] <= request["p99"] <= request["max"]
    # Two events a request: the gap between them spans four tokens.
    assert events["mean"] == pytest.approx(4 * between["mean"])


def test_prompts_are_random_ids_and_all_different(capsys: pytest.CaptureFixture[str]) -> None:
    """No two requests share a prompt, and the same seed asks the same again."""
    arguments = ("--clients", "1", "--requests", "8", "--warmup", "2", "--vocab-size", "50")
    with FakeServer(answer).running() as server:
        for _ in range(2):
            bench(server.url, capsys, *arguments, "--seed", "7")
        bench(server.url, capsys, *arguments, "--seed", "70")
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert prompts[:10] == prompts[10:20]
    assert len(set(prompts)) == 20
    assert all(len(prompt) == 6 and min(prompt) >= 0 and max(prompt) < 50 for prompt in prompts)


def test_the_body_is_what_the_options_say(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Fields, key and model reach the server; the key is not in the report."""
    key = tmp_path / "keys"
    key.write_text("# whose\nsecret-key\nother\n")
    with FakeServer(answer).running() as server:
        _, report = bench(
            server.url, capsys, "--requests", "1", "--clients", "1", "--warmup", "0", "--no-stream", "--no-ignore-eos",
            "--model", "other", "--field", "cache_prompt=false", "--field", 'user="me"', "--api-key-file", str(key),
        )  # fmt: skip
    body = server.bodies[0]
    assert body.pop("prompt")
    assert body == {"model": "other", "max_tokens": 5, "temperature": 0, "cache_prompt": False, "user": "me"}
    assert server.headers[0]["Authorization"] == "Bearer secret-key"
    assert "secret-key" not in json.dumps(report)
    assert report["first_token_ms"] is None
    assert report["request_ms"]["p50"] > 0


def test_refusals_are_counted_apart_and_tried_again(capsys: pytest.CaptureFixture[str]) -> None:
    """503 with Retry-After is no failure: the client waits and sends another request."""
    seen = 0

    async def busy(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal seen
        seen += 1
        if seen % 2:
            return web.Response(status=503, headers={"Retry-After": "1", "retry-after-ms": "5"})
        return await answer(request, body)

    with FakeServer(busy).running() as server:
        code, report = bench(server.url, capsys, "--clients", "1", "--requests", "3", "--warmup", "0")
    assert code == 0
    assert (report["ok"], report["refused"], report["failed"]) == (3, 3, 0)


async def _error(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"message": "broken"}}, status=500)


async def _busy_without_time(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(status=503, text="later")


async def _error_in_stream(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b'data: {"error": {"message": "engine died"}}\n\n')
    return response


async def _no_usage(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(text='data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n')


async def _nonsense(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(text="data: hello\n\n")


async def _cut(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def _slow(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    await asyncio.sleep(60)
    return web.Response()


@pytest.mark.parametrize(
    ("handler", "problem"),
    [
        (_error, "500: "),
        (_busy_without_time, "503: later"),
        (_error_in_stream, "engine died"),
        (_no_usage, "usage.completion_tokens"),
        (_nonsense, "not an answer of this API"),
        (_cut, "the server closed the connection"),
        (_slow, "no answer within 0.2 s"),
    ],
)
def test_failures_are_counted_and_explained(handler: Handler, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is no whole answer fails its request, exits with 1, and says why."""
    with FakeServer(handler).running() as server:
        arguments = ("--clients", "1", "--requests", "2", "--warmup", "0", "--timeout", "0.2")
        code, report = bench(server.url, capsys, *arguments)
    assert code == 1
    assert (report["ok"], report["refused"], report["failed"]) == (0, 0, 2)
    assert problem in report["problems"][0]
    assert report["request_ms"] is None


def test_a_time_instead_of_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    """--seconds starts new requests for that long; those under way are waited for."""
    with FakeServer(answer).running() as server:
        code, report = bench(server.url, capsys, "--clients", "2", "--seconds", "0.3", "--warmup", "0")
    assert code == 0
    assert report["ok"] == len(server.bodies) > 2
    assert report["elapsed_s"] > 0.3


def test_the_table_names_server_load_and_times(capsys: pytest.CaptureFixture[str]) -> None:
    """People see what was sent, how many were answered, and a line for each kind of time."""
    with FakeServer(answer).running() as server:
        assert run(["bench", "http", "--url", server.url, "--requests", "4", "--max-tokens", "5"]) == 0
    text = capsys.readouterr().out
    for part in (
        server.url,
        "model fake",
        "8 clients, 4 requests",
        "4 answered, 0 refused, 0 failed",
        "5.0 tokens a request",
    ):
        assert part in text
    assert [line.split("  ")[0] for line in text.splitlines()[-4:]] == [
        "request", "first token", "between tokens", "between events",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--url", "https://x"], 78, "--url 'https://x'"),
        (["--url", "http://x:99999"], 78, "--url"),
        (["--field", "n"], 78, "--field 'n'"),
        (["--field", "n=x"], 78, "--field 'n=x'"),
        (["--requests", "3", "--seconds", "1"], 2, "--requests or --seconds"),
        (["--url", "http://127.0.0.1:9"], 1, "is a server running there?"),
    ],
)
def test_mistakes_are_named(arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An option that makes no sense, or no server at all, is one clear line."""
    assert run(["bench", "http", *arguments]) == code
    assert message in capsys.readouterr().err


def test_a_server_without_models_needs_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    """When the list is empty, the message says to name the model."""
    server = FakeServer(answer)
    server.models = {"data": []}
    with server.running():
        assert run(["bench", "http", "--url", server.url]) == 1
    assert "--model" in capsys.readouterr().err


def test_a_warm_up_without_any_answer_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """A server that refuses the body is reported at once, in its own words."""
    with FakeServer(_error).running() as server:
        assert run(["bench", "http", "--url", server.url]) == 1
    assert "no request of the warm-up was answered: 500: " in capsys.readouterr().err


def test_a_key_file_without_a_key_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Comments and blank lines are no keys, as in the server's file."""
    keys = tmp_path / "keys"
    keys.write_text("# nobody yet\n\n")
    assert run(["bench", "http", "--api-key-file", str(keys)]) == 78
    assert capsys.readouterr().err == f"colibrid: --api-key-file {keys} holds no key; write one a line\n"
