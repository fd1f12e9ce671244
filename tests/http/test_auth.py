"""Keys, Host and Origin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from colibrid.errors import ConfigError
from colibrid.http.auth import HostPolicy, KeyRing, check_bind, is_loopback
from colibrid.http.errors import ForbiddenError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.http.conftest import Server

KEY = "secret-key-1"


async def test_every_route_but_health_needs_the_key(make_server: Callable[..., Any]) -> None:
    """With keys set, everything but the health routes is 401 without one, unknown routes too."""
    server = await make_server(keys=[KEY, "other-key-2"])
    for path in ("/livez", "/readyz", "/health"):
        assert (await server.get(path)).status == 200
    for path in ("/v1/models", "/v1/models/x", "/nothing"):
        answer = await server.get(path)
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
    for header in ("Bearer wrong-key", f"Basic {KEY}", KEY, "Bearer", f"Bearer {KEY}x"):
        assert (await server.post("/v1/completions", {"prompt": "Hi"}, Authorization=header)).status == 401
    assert not server.service.seen
    for key in (KEY, "other-key-2"):
        assert (await server.post("/v1/completions", {"prompt": "Hi"}, Authorization=f"Bearer {key}")).status == 200


async def test_foreign_hosts_are_refused_on_loopback(server: Server) -> None:
    """A loopback server answers to its own names only, whatever the port."""
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:8080", "[::1]:80"):
        assert (await server.get("/v1/models", Host=host)).status == 200
    for host in (
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example:8080",
        "[::1]evil.example",
        "[::1]:80@evil.example",
        "localhost:x@evil.example",
        "localhost:80:80",
        "user@localhost",
        "",
    ):
        answer = await server.get("/v1/models", Host=host)
        assert (answer.status, answer.error["code"]) == (403, "host_not_allowed")


async def test_foreign_pages_are_refused(server: Server) -> None:
    """A request with the Origin of another site, or null, is 403; the server's own is fine."""
    for origin in ("http://evil.example", "null", "http://localhost:1"):
        answer = await server.get("/v1/models", Origin=origin)
        assert (answer.status, answer.error["code"]) == (403, "origin_not_allowed")
    assert (await server.get("/v1/models", Origin=server.url)).status == 200


def test_open_bind_needs_keys() -> None:
    """Binding an address that others reach refuses to start without keys."""
    check_bind("127.0.0.1", KeyRing())
    check_bind("0.0.0.0", KeyRing([KEY]))
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(ConfigError, match="api_key_file"):
            check_bind(host, KeyRing())


def test_loopback() -> None:
    """Loopback addresses of both families and localhost are told from others."""
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "localhost.example")))


def test_hosts_are_free_on_other_binds() -> None:
    """A server with a public address is called by any name, but not by other sites' pages."""
    policy = HostPolicy("0.0.0.0")
    policy.check({"Host": "api.example:8080"})
    with pytest.raises(ForbiddenError):
        policy.check({"Host": "api.example", "Origin": "http://evil.example"})


def test_key_file(tmp_path: Path) -> None:
    """A key file has one key a line; comments and blank lines do not count."""
    path = tmp_path / "keys"
    path.write_text(f"# mine\n\n  {KEY}  \nother-key-2\n")
    ring = KeyRing.from_file(path)
    tenants = {ring.tenant_of(KEY), ring.tenant_of("other-key-2")}
    assert len(tenants - {None}) == 2
    assert not any(KEY in tenant for tenant in tenants if tenant)
    assert ring.tenant_of("# mine") is None
    assert ring.tenant_of("") is None


@pytest.mark.parametrize("content", ["", "# only a comment\n", "short\n", None])
def test_bad_key_file(tmp_path: Path, content: Any) -> None:
    """A key file that is missing, empty or has a weak key is a configuration error that names it."""
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=str(path)):
        KeyRing.from_file(path)
