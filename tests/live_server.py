"""The whole application in the test's own process, with a real engine in another."""

from __future__ import annotations

import socket
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from colibrid.batch.service import make_service
from colibrid.config.settings import Settings
from colibrid.http.server import start_server
from colibrid.http.state import AppState
from colibrid.text.model_text import load_text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from colibrid.batch.pool import EnginePool
    from colibrid.engine.fleet import Fleet
    from colibrid.engine.library import Library
    from colibrid.model.pack import Pack


class Live:
    """The application in this process, its engine in another."""

    def __init__(self, url: str, fleet: Fleet, pool: EnginePool, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.fleet = fleet
        self.scheduler = pool
        self.session = session

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        async with self.session.post(self.url + path, json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
            return answer


@asynccontextmanager
async def serving(library: Library, pack: Pack, **sections: Any) -> AsyncIterator[Live]:
    settings = msgspec.convert(sections, Settings)
    async with AsyncExitStack() as stack:
        fleet, pool = make_service(library, settings, str(pack.path), pack.manifest)
        stack.push_async_callback(fleet.stop)
        stack.callback(pool.stop)
        fleet.start()
        await fleet.wait_ready()
        listening = socket.create_server(("127.0.0.1", 0))
        stack.callback(listening.close)
        text = load_text(pack.path, pack.manifest.text)
        await start_server(AppState(settings=settings, scheduler=pool, text=text), [listening], stack)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Live(f"http://127.0.0.1:{listening.getsockname()[1]}", fleet, pool, session)
