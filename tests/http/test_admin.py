"""colibrid.http.admin: the table of its routes, and the contract that all of them keep."""

from __future__ import annotations

import hashlib
from array import array
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import pytest

from colibrid.cli.listen import bind_path
from colibrid.config.settings import Settings
from colibrid.engine.swaps import ExpertSwaps, Outcome, SwapRefusedError, Version
from colibrid.errors import ConfigError
from colibrid.http.admin import ADMIN_ROUTES, create_admin
from colibrid.http.admin_state import AdminState
from colibrid.http.auth import KeyRing
from colibrid.http.credentials import read_keys
from colibrid.http.runner import run_application
from colibrid.ops.reload import SettingsReloader

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from tests.http.conftest import Server


class ScriptedSwaps(ExpertSwaps):
    """Does whatever it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, str | None, str | None]] = []
        self.full = False

    @property
    def weights_generation(self) -> int:
        return len(self.asked)

    @property
    def versions(self) -> tuple[Version, ...]:
        return tuple(self._version(*one) for one in self.asked)

    def _version(self, layer: int, expert: int, file: str | None, module: str | None) -> Version:
        return Version(
            layer=layer,
            expert=expert,
            version=1,
            weights_generation=1,
            module=module,
            since=1e9,
            file=file,
            sha256="0" * 64,
            precision="bf16",
        )

    async def replace(self, layer: int, expert: int, path: str | None, module: str | None) -> Outcome:
        if self.full:
            raise SwapRefusedError("no swap slot is free.", code="full", status=409)
        self.asked.append((layer, expert, path, module))
        return Outcome(self._version(layer, expert, path, module), 3, 1, 2.345)


@pytest.fixture
def swaps() -> ScriptedSwaps:
    return ScriptedSwaps()


class ScriptedDrainer:
    """Takes no time, and is complete unless it has none."""

    def __init__(self) -> None:
        self.asked: list[float | str] = []

    async def drain(self, timeout_s: float) -> bool:
        self.asked.append(timeout_s)
        return timeout_s > 0

    def exit(self) -> None:
        self.asked.append("exit")


@pytest.fixture
def drainer() -> ScriptedDrainer:
    return ScriptedDrainer()


@pytest.fixture
def wanted() -> list[Settings | str]:
    """What the next reload will find: settings, or mistakes."""
    return [Settings()]


@pytest.fixture
def reloader(wanted: list[Settings | str]) -> SettingsReloader:
    def load() -> Settings:
        found = wanted[0]
        if isinstance(found, str):
            raise ConfigError(found)
        return found

    return SettingsReloader(Settings(), load)


@pytest.fixture
async def admin(
    server: Server, swaps: ScriptedSwaps, reloader: SettingsReloader, drainer: ScriptedDrainer, tmp_path: Path
) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of the admin application in front of the scripted scheduler."""
    path = str(tmp_path / "admin.sock")
    async with AsyncExitStack() as stack:
        listening = stack.enter_context(bind_path(path, "server.admin_socket"))
        await run_application(
            create_admin(server.state, AdminState(swaps=swaps, reloader=reloader, drainer=drainer)), [listening], stack
        )
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


async def test_keys_of_scope_admin_open_the_public_server(
    make_server: Callable[..., Any], swaps: ScriptedSwaps, reloader: SettingsReloader, drainer: ScriptedDrainer
) -> None:
    """Each route of the table is 401 without a key, 403 with one for anything else, and answered with one for admin."""
    file = "\n".join(
        f"{scope} sha256:{hashlib.sha256(scope.encode()).hexdigest()} scopes={scope}"
        for scope in ("admin", "metrics", "inference")
    )
    ring = KeyRing(read_keys(file, "test"))
    parts = AdminState(swaps=swaps, reloader=reloader, drainer=drainer)
    server: Server = await make_server(ring=ring, admin=parts)
    for route in ADMIN_ROUTES:
        path = route.path.replace("{layer}", "1").replace("{expert}", "2")
        for key, status in (("", 401), ("metrics", 403), ("inference", 403), ("admin", 200)):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            body = {"json": {}} if route.method == "POST" else {}
            async with server.session.request(route.method, server.url + path, headers=headers, **body) as answer:
                assert answer.status == status, (route, key)
    assert len(swaps.asked) == len(drainer.asked) == 1


async def test_reload(admin: aiohttp.ClientSession, reloader: SettingsReloader, wanted: list[Settings | str]) -> None:
    """POST /admin/reload names what changed and what waits for a restart; all mistakes come back, and change nothing."""
    wanted[0] = msgspec.convert({"limits": {"queue": 9}, "batch": {"slots": 3}}, Settings)
    async with admin.post("/admin/reload") as answer:
        assert (answer.status, await answer.json()) == (
            200,
            {"changed": ["limits.queue"], "needs_restart": ["batch.slots"]},
        )
    assert reloader.settings.limits.queue == 9
    wanted[0] = "c.yaml:1:2: one\nc.yaml:3:4: two"
    async with admin.post("/admin/reload") as answer:
        assert answer.status == 400
        error = await error_of(answer)
    assert error["code"] == "configuration_refused"
    assert "c.yaml:1:2: one" in error["message"]
    assert "c.yaml:3:4: two" in error["message"]
    assert reloader.settings.limits.queue == 9


async def test_experts_are_replaced_and_listed(admin: aiohttp.ClientSession, swaps: ScriptedSwaps) -> None:
    """POST says what serves now, GET what was replaced so far."""
    async with admin.post("/admin/experts/3/17", json={"file": "/a/b.bin", "module": "gelu"}) as answer:
        assert answer.status == 200
        done = await answer.json()
    assert swaps.asked == [(3, 17, "/a/b.bin", "gelu")]
    assert (done["layer"], done["expert"], done["streams"], done["free_slots"], done["milliseconds"]) == (
        3,
        17,
        3,
        1,
        2.3,
    )
    async with admin.get("/admin/experts") as answer:
        listed = await answer.json()
    assert (listed["weights_generation"], listed["swap_slots"]) == (1, 0)
    assert [(one["layer"], one["expert"], one["file"]) for one in listed["replaced"]] == [(3, 17, "/a/b.bin")]


async def test_heat_map(admin: aiohttp.ClientSession, server: Server) -> None:
    """GET /admin/experts has a row for each layer with experts: what each has computed, and how evenly."""
    server.service.measures.load.add(array("I", [1, 0, 3, 0, 0, 0, 4, 4, 0]).tobytes())
    async with admin.get("/admin/experts") as answer:
        load = (await answer.json())["load"]
    assert load == [
        {"layer": 0, "assignments": [1, 0, 3], "imbalance": 2.25, "unused": 1},
        {"layer": 2, "assignments": [4, 4], "imbalance": 1.0, "unused": 0},
    ]


async def test_slots(admin: aiohttp.ClientSession) -> None:
    """GET /admin/slots says of each slot whose request it serves and how far that is."""
    async with admin.get("/admin/slots") as answer:
        (engine,) = (await answer.json())["engines"]
    assert (engine["engine"], engine["phase"], engine["queued"]) == (0, "ready", 0)
    assert [(one["state"], one["request_id"], one["output_tokens"]) for one in engine["slots"]] == [
        ("running", "cmpl-1", 2),
        ("free", None, None),
    ]


async def test_drain(admin: aiohttp.ClientSession, drainer: ScriptedDrainer) -> None:
    """POST /admin/drain waits until all has ended, says whether it has, and exits only if asked to."""
    for body, expected, asked in (
        ({}, {"draining": True, "complete": True, "exit": False}, 30.0),
        ({"timeout_s": 0}, {"draining": True, "complete": False, "exit": False}, 0.0),
        ({"exit": True}, {"draining": True, "complete": False, "exit": True}, "exit"),
    ):
        async with admin.post("/admin/drain", json=body) as answer:
            assert (answer.status, await answer.json()) == (200, expected)
        assert drainer.asked[-1] == asked
    for wrong in ({"exit": "yes"}, {"timeout_s": -1}, {"now": True}, {"exit": True, "timeout_s": 1}):
        async with admin.post("/admin/drain", json=wrong) as answer:
            assert answer.status == 400
    assert len(drainer.asked) == 3
    async with admin.post("/admin/drain") as answer:  # as `curl -X POST` asks
        assert (answer.status, await answer.json()) == (200, {"draining": True, "complete": True, "exit": False})
    assert drainer.asked[-1] == 30.0


async def test_metrics_on_the_socket(admin: aiohttp.ClientSession, server: Server) -> None:
    """The admin socket gives metrics even where the public address does not."""
    server.state.settings = msgspec.convert({"metrics": {"enabled": False}}, Settings)
    assert (await server.get("/metrics")).status == 404
    async with admin.get("/metrics") as answer:
        assert answer.status == 200
        assert "colibrid_num_requests_running" in await answer.text()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/admin/experts/x/1", {"file": "/a"}, "layer"),
        ("/admin/experts/1/-1", {"file": "/a"}, "expert"),
        ("/admin/experts/1/12345678", {"file": "/a"}, "expert"),
        ("/admin/experts/1/1", {"file": 5}, "file"),
        ("/admin/experts/1/1", {"file": ""}, "file"),
        ("/admin/experts/1/1", {"files": "/a"}, None),
    ],
)
async def test_what_is_no_swap(
    admin: aiohttp.ClientSession, swaps: ScriptedSwaps, path: str, body: Any, param: str | None
) -> None:
    """Numbers and fields of wrong kinds are 400, by name, and nothing is replaced."""
    async with admin.post(path, json=body) as answer:
        assert answer.status == 400
        assert (await error_of(answer))["param"] == param
    assert not swaps.asked


async def test_a_refused_swap(admin: aiohttp.ClientSession, swaps: ScriptedSwaps) -> None:
    """What the engines say comes back with its status."""
    swaps.full = True
    async with admin.post("/admin/experts/0/0", json={"file": "/a"}) as answer:
        assert answer.status == 409
        assert (await error_of(answer))["code"] == "full"
