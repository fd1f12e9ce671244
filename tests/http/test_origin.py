"""colibrid.http.origin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from multidict import CIMultiDict

from colibrid.config.settings import ServerSettings
from colibrid.errors import ConfigError
from colibrid.http.errors import ForbiddenError
from colibrid.http.origin import UNIX, Origins, Peer

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.http.conftest import Server

PLAIN = Peer("127.0.0.1", secure=False)


def origins(**server: Any) -> Origins:
    return Origins(ServerSettings(**server), has_keys=True)


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


def test_hosts_are_free_on_other_binds() -> None:
    """A server with a public address is called by any name, but not by other sites' pages."""
    rules = origins()
    rules.check_host({"Host": "api.example:8080"}, "0.0.0.0")
    with pytest.raises(ForbiddenError):
        rules.check_page({"Host": "api.example", "Origin": "http://evil.example"}, PLAIN)


def test_listed_hosts() -> None:
    """A list of names holds on every address, besides the local ones of a loopback address; a path has no names."""
    rules = origins(allowed_hosts=["API.example.org", "[2001:db8::1]"])
    for bound in ("127.0.0.1", "0.0.0.0"):
        rules.check_host({"Host": "api.example.org:443"}, bound)
        rules.check_host({"Host": "[2001:db8::1]:80"}, bound)
        with pytest.raises(ForbiddenError, match="evil"):
            rules.check_host({"Host": "evil.example"}, bound)
    rules.check_host({"Host": "localhost:8080"}, "127.0.0.1")
    rules.check_host({"Host": "whatever"}, UNIX)
    with pytest.raises(ForbiddenError):
        rules.check_host({"Host": "localhost:8080"}, "0.0.0.0")


def test_listed_pages() -> None:
    """A listed origin may ask, in whatever case; with * all may, but only where keys are set."""
    rules = origins(allowed_origins=["https://App.example.org", "http://localhost:3000"])
    for page in ("https://app.example.org", "http://localhost:3000"):
        assert rules.check_page({"Origin": page, "Host": "api"}, PLAIN) == page
    for page in ("http://app.example.org", "https://app.example.org.evil", "null", "https://app.example.org:444"):
        with pytest.raises(ForbiddenError):
            rules.check_page({"Origin": page, "Host": "api"}, PLAIN)
    assert origins(allowed_origins=["*"]).check_page({"Origin": "https://any.example"}, PLAIN) == "https://any.example"
    with pytest.raises(ConfigError, match="no API key"):
        Origins(ServerSettings(allowed_origins=["*"]), has_keys=False)


def test_own_pages() -> None:
    """A page of ours is no foreign one; on TLS its plain twin, which somebody else may have written, is."""
    sent = {"Origin": "http://api:1", "Host": "api:1"}
    assert origins().check_page(sent, PLAIN) is None
    with pytest.raises(ForbiddenError):
        origins().check_page(sent, Peer("10.0.0.1", secure=True))
    with pytest.raises(ForbiddenError):
        origins().check_page({"Origin": "http://", "Host": ""}, PLAIN)


@pytest.mark.parametrize(
    ("name", "sent", "expected"),
    [
        (("127.0.0.1", 5), {}, Peer("127.0.0.1", secure=False)),
        (("127.0.0.1", 5), {"X-Forwarded-For": "1.2.3.4"}, Peer("1.2.3.4", secure=False)),
        (("127.0.0.1", 5), {"X-Forwarded-For": "6.6.6.6, 1.2.3.4, 10.1.1.1"}, Peer("1.2.3.4", secure=False)),
        (("127.0.0.1", 5), {"X-Forwarded-For": "nonsense", "X-Forwarded-Proto": "https"}, Peer("127.0.0.1", secure=True)),
        (("8.8.8.8", 5), {"X-Forwarded-For": "1.2.3.4", "X-Forwarded-Proto": "https"}, Peer("8.8.8.8", secure=False)),
        (("::ffff:127.0.0.1", 5, 0, 0), {"X-Forwarded-For": "::ffff:1.2.3.4"}, Peer("1.2.3.4", secure=False)),
        ("", {"X-Forwarded-For": "2001:db8::5"}, Peer("2001:db8::5", secure=False)),
    ],
)  # fmt: skip
def test_proxies(name: object, sent: dict[str, str], expected: Peer) -> None:
    """What X-Forwarded-For and -Proto say counts from trusted proxies only, and up to the first that is not trusted."""
    rules = origins(trusted_proxies=["127.0.0.1", "10.0.0.0/8", "unix"])
    assert rules.peer(name, CIMultiDict(sent), secure=False) == expected


@pytest.mark.parametrize(
    "server",
    [
        {"allowed_hosts": ["http://x"]},
        {"allowed_hosts": ["x:80"]},
        {"allowed_origins": ["app.example.org"]},
        {"allowed_origins": ["https://app.example.org/path"]},
        {"trusted_proxies": ["10.0.0.1/8"]},
        {"trusted_proxies": ["nginx"]},
    ],
)
def test_wrong_names(server: dict[str, Any]) -> None:
    """A name that can never match is a configuration error which names setting and value."""
    ((name, (value,)),) = server.items()
    with pytest.raises(ConfigError, match=rf"server\.{name}.*{value}"):
        origins(**server)


async def test_pages_read_answers(make_server: Callable[..., Any]) -> None:
    """A listed page may ask before it sends, and reads answers and errors; nobody else gets such headers."""
    page = "https://app.example.org"
    server = await make_server(keys=["secret-key-1"], server={"allowed_origins": [page]})
    asking = {
        "Origin": page,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    async with server.session.options(f"{server.url}/v1/completions", headers=asking) as response:
        assert response.status == 204
        assert response.headers["Access-Control-Allow-Origin"] == page
        assert "authorization" in response.headers["Access-Control-Allow-Headers"]
    refused = await server.post("/v1/completions", {"prompt": "Hi"}, Origin=page)
    assert (refused.status, refused.headers["Access-Control-Allow-Origin"]) == (401, page)
    body = {"prompt": "Hi", "stream": True}
    streamed = await server.post("/v1/completions", body, Origin=page, Authorization="Bearer secret-key-1")
    assert (streamed.status, streamed.headers["Access-Control-Allow-Origin"]) == (200, page)
    plain = await server.post("/v1/completions", {"prompt": "Hi"}, Authorization="Bearer secret-key-1")
    assert "Access-Control-Allow-Origin" not in plain.headers
    foreign = await server.get("/v1/models", Origin="https://evil.example")
    assert (foreign.status, foreign.headers.get("Access-Control-Allow-Origin")) == (403, None)


def test_a_proxy_may_add_a_line_of_its_own() -> None:
    """Of several lines the last one counts, which our proxy has written, not the first, which the client has."""
    rules = origins(trusted_proxies=["10.0.0.1"])
    lines = [("9.9.9.9", "https"), ("7.7.7.7", "http")]
    sent = CIMultiDict([(f"X-Forwarded-{name}", line[i]) for line in lines for i, name in enumerate(("For", "Proto"))])
    assert rules.peer(("10.0.0.1", 1), sent, secure=False) == Peer("7.7.7.7", secure=False)
