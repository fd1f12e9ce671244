"""An OpenAI server in a thread, for tests of `colibrid bench http`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from typing import TYPE_CHECKING, Any

from aiohttp import web

from colibrid.cli.main import run

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable, Iterator

    import pytest

    Handler = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


class FakeServer:
    """`handler` answers completions and chats, all of whose bodies are kept."""

    def __init__(self, handler: Handler, tls: ssl.SSLContext | None = None) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.models: object = {"object": "list", "data": [{"id": "fake", "object": "model"}]}
        self.url = ""
        self._handler = handler
        self._tls = tls

    @contextlib.contextmanager
    def running(self) -> Iterator[FakeServer]:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        runner = asyncio.run_coroutine_threadsafe(self._start(), loop).result(60)
        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(60)
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    async def _start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/v1/models", self._list)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=self._tls)
        await site.start()
        scheme = "http" if self._tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{runner.addresses[0][1]}"
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
    events = [
        {"choices": [{"text": "a"}]},
        {"choices": [{"text": "b"}]},
        {"choices": [{"text": "", "finish_reason": "length"}]},
        {"choices": [], "usage": usage},
    ]
    return await stream(request, events)


async def stream(request: web.Request, events: list[dict[str, Any]], *, done: bool = True) -> web.StreamResponse:
    """Events with a little time between them."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await asyncio.sleep(0.002)
    if done:
        await response.write(b"data: [DONE]\n\n")
    return response


def bench(url: str, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and report."""
    code = run(["bench", "http", "--url", url, "--json", "--prompt-tokens", "6", "--max-tokens", "5", *arguments])
    return code, json.loads(capsys.readouterr().out)
