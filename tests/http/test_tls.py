"""colibrid.http.tls, and TLS on a real socket. The certificates of tests/data/tls are for tests only."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import uvloop
from aiohttp import web

from colibrid.config.settings import LimitsSettings, ServerSettings
from colibrid.errors import ConfigError
from colibrid.http.gate import Gate
from colibrid.http.runner import run_application
from colibrid.http.server import start_server
from colibrid.http.tls import Tls, make_tls

if TYPE_CHECKING:
    from tests.http.conftest import Server

FILES = Path(__file__).parents[1] / "data" / "tls"


@pytest.fixture
def settings(tmp_path: Path) -> ServerSettings:
    """Of copies, which a test may replace."""
    for name in ("first.pem", "first.key"):
        shutil.copy(FILES / name, tmp_path)
    return ServerSettings(tls_cert_file=str(tmp_path / "first.pem"), tls_key_file=str(tmp_path / "first.key"))


def trusting(name: str) -> ssl.SSLContext:
    """A client that takes only that certificate."""
    return ssl.create_default_context(cafile=str(FILES / name))


@pytest.mark.parametrize(
    ("cert", "key", "text"),
    [
        ("first.pem", None, "server.tls_key_file is not set"),
        (None, "first.key", "server.tls_cert_file is not set"),
        ("no.pem", "first.key", "No such file"),
        ("first.pem", "second.key", "KEY_VALUES_MISMATCH"),
        ("first.key", "first.key", "cannot be used"),
        ("first.pem", "locked.key", "without a password"),
    ],
)
def test_files_that_cannot_be_used(cert: str | None, key: str | None, text: str) -> None:
    """Wrong files are a configuration error, and a key with a password does not wait for a terminal."""
    names = [None if name is None else str(FILES / name) for name in (cert, key)]
    with pytest.raises(ConfigError, match=text):
        make_tls(ServerSettings(tls_cert_file=names[0], tls_key_file=names[1]))


def test_no_files_no_tls() -> None:
    """TLS is off unless the files are named."""
    assert make_tls(ServerSettings()) is None


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
async def test_answers_over_tls(server: Server, settings: ServerSettings) -> None:
    """Requests are answered over TLS 1.2 and 1.3, not over 1.1; plain HTTP gets no answer, and hurts nobody."""
    async with AsyncExitStack() as stack:
        listening = socket.create_server(("127.0.0.1", 0))
        stack.callback(listening.close)
        await start_server(server.state, [listening], stack, make_tls(settings))
        place = f"127.0.0.1:{listening.getsockname()[1]}"
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            client = trusting("first.pem")
            client.minimum_version = client.maximum_version = version
            async with server.session.get(f"https://{place}/v1/models", ssl=client) as response:
                assert response.status == 200
        with pytest.raises((aiohttp.ClientError, ConnectionError)):
            await server.session.get(f"http://{place}/livez")
        client = trusting("first.pem")
        client.set_ciphers("ALL:@SECLEVEL=0")
        client.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
        client.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((aiohttp.ClientError, ConnectionError)):
            await server.session.get(f"https://{place}/livez", ssl=client)
        async with server.session.get(f"https://{place}/livez", ssl=trusting("first.pem")) as response:
            assert response.status == 200


async def test_certificates_change_while_serving(server: Server, settings: ServerSettings) -> None:
    """After a renewal new connections get the new certificate; files that do not fit are refused before."""
    context = make_tls(settings)
    assert context is not None
    tls = Tls(context)

    async def shown(name: str) -> int:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/livez", ssl=trusting(name)) as response:
            return response.status

    async with AsyncExitStack() as stack:
        listening = socket.create_server(("127.0.0.1", 0))
        stack.callback(listening.close)
        await start_server(server.state, [listening], stack, tls.listening)
        url = f"https://127.0.0.1:{listening.getsockname()[1]}"
        assert await shown("first.pem") == 200
        assert settings.tls_cert_file is not None
        assert settings.tls_key_file is not None
        shutil.copy(FILES / "second.pem", settings.tls_cert_file)
        with pytest.raises(ConfigError, match="MISMATCH"):
            make_tls(settings)
        shutil.copy(FILES / "second.key", settings.tls_key_file)
        renewed = make_tls(settings)
        assert renewed is not None
        tls.replace(renewed)
        assert await shown("second.pem") == 200
        with pytest.raises(aiohttp.ClientError):
            await shown("first.pem")


async def test_secure_pages(server: Server, settings: ServerSettings) -> None:
    """A page of our own over TLS may ask; its plain twin may not."""
    async with AsyncExitStack() as stack:
        listening = socket.create_server(("127.0.0.1", 0))
        stack.callback(listening.close)
        await start_server(server.state, [listening], stack, make_tls(settings))
        place = f"127.0.0.1:{listening.getsockname()[1]}"
        for scheme, status in (("https", 200), ("http", 403)):
            sent: Any = {"Origin": f"{scheme}://{place}"}
            async with server.session.get(
                f"https://{place}/v1/models", ssl=trusting("first.pem"), headers=sent
            ) as response:
                assert response.status == status


def test_silent_connections_are_bounded(settings: ServerSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who connects and begins no TLS is bounded like everybody else: most of many are closed, and leave room when gone.

    On the daemon's own loop: asyncio's makes the handshake's object elsewhere.
    """
    monkeypatch.setattr("colibrid.http.runner._HANDSHAKE_S", 600.0)  # none of them is closed because its time is over
    gate = Gate(LimitsSettings(connections=4), 1000)
    tls = make_tls(settings)
    client = trusting("first.pem")

    async def livez(_request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def status(place: tuple[str, int]) -> int | None:
        url = f"https://127.0.0.1:{place[1]}/livez"
        with contextlib.suppress(aiohttp.ClientError, ConnectionError):
            async with aiohttp.ClientSession() as session, session.get(url, ssl=client) as response:
                return response.status
        return None

    async def attack() -> None:
        app = web.Application()
        app.router.add_get("/livez", livez)
        async with AsyncExitStack() as stack:
            listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            await run_application(app, [listening], stack, tls=tls, gate=gate)
            place = listening.getsockname()
            silent = [stack.enter_context(socket.create_connection(place)) for _ in range(60)]
            async with asyncio.timeout(120):
                while gate.refused < 30:  # noqa: ASYNC110 - the gate has no event
                    await asyncio.sleep(0.01)
                for one in silent:
                    one.close()
                while await status(place) != 200:  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0.01)
            assert [await status(place) for _ in range(30)] == [200] * 30, "what has become a connection counts once"

    uvloop.run(attack())
