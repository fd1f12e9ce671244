"""colibrid.http.admin: the table of its routes, and the contract that all of them keep."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from colibrid.cli.listen import bind_path
from colibrid.http.admin import ADMIN_ROUTES, create_admin
from colibrid.http.runner import run_application

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.http.conftest import Server


@pytest.fixture
async def admin(server: Server, tmp_path: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of the admin application in front of the scripted scheduler."""
    path = str(tmp_path / "admin.sock")
    async with AsyncExitStack() as stack:
        listening = stack.enter_context(bind_path(path, "server.admin_socket"))
        await run_application(create_admin(server.state), [listening], stack)
        session = aiohttp.ClientSession("http://localhost", connector=aiohttp.UnixConnector(path))
        yield await stack.enter_async_context(session)


async def error_of(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    error: dict[str, Any] = (await answer.json())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_the_table_is_listed(admin: aiohttp.ClientSession) -> None:
    """GET /admin names every route of the table."""
    async with admin.get("/admin") as answer:
        listed = (await answer.json())["routes"]
    assert [(route["method"], route["path"]) for route in listed] == [(r.method, r.path) for r in ADMIN_ROUTES]
    assert all(route["summary"] for route in listed)


async def test_unknown_routes_and_methods(admin: aiohttp.ClientSession) -> None:
    """What is not in the table is 404 or 405 in the error contract, public routes too."""
    async with admin.get("/v1/models") as answer:
        assert answer.status == 404
        assert (await error_of(answer))["code"] == "unknown_url"
    async with admin.delete("/admin") as answer:
        assert (answer.status, answer.headers["Allow"]) == (405, "GET")
        assert (await error_of(answer))["code"] == "method_not_allowed"


async def test_answers_carry_the_request_id(admin: aiohttp.ClientSession) -> None:
    """A sane x-request-id comes back, so that a log line can be found."""
    async with admin.get("/admin", headers={"x-request-id": "mine-1"}) as answer:
        assert answer.headers["x-request-id"] == "mine-1"


async def test_the_public_server_has_no_admin_routes(server: Server) -> None:
    """Nothing under /admin is answered on the public address of a server without keys of scope admin."""
    for route in ADMIN_ROUTES:
        assert (await server.get(route.path)).status == 403
