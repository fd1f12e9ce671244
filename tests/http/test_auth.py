"""colibrid.http.auth."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from colibrid.config.settings import KeyLimits
from colibrid.errors import ConfigError
from colibrid.http.auth import KeyRing, limits_of, read_key_file
from colibrid.http.credentials import Key, digest_of
from colibrid.http.errors import ForbiddenError, InvalidKeyError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from colibrid.http.credentials import Scope

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


def key_line(key: str, *options: str) -> str:
    return " ".join([f"id-{key}", f"sha256:{digest_of(key).hex()}", *options])


def test_key_file(tmp_path: Path) -> None:
    """A file has hashed and plain keys, one a line; comments and blank lines do not count, and a hash is no key."""
    path = tmp_path / "keys"
    path.write_text(f"# mine\n\n  {KEY}  \n{key_line('other-key-2')}  # hers\n")
    ring = read_key_file(path, "auth.keys_file")
    first, second = ring.find(KEY), ring.find("other-key-2")
    assert first is not None
    assert second is not None
    assert (first.plain, first.id, second.plain, second.id) == (True, "plain-1", False, "id-other-key-2")
    assert first.tenant != second.tenant
    assert KEY not in f"{ring.keys}"
    assert ring.find("# mine") is ring.find("") is ring.find(digest_of("other-key-2").hex()) is None


def test_key_file_with_a_mark(tmp_path: Path) -> None:
    """The mark that some editors write in front is no part of the first key."""
    path = tmp_path / "keys"
    path.write_text("secret-key-1\n", encoding="utf-8-sig")
    assert read_key_file(path, "auth.keys_file").find("secret-key-1") is not None


@pytest.mark.parametrize("content", ["", "# only a comment\n", "short\n", "a b\n", "x" * (1 << 20) + "\nx", None])
def test_bad_key_file(tmp_path: Path, content: Any) -> None:
    """A file that is missing, empty, huge, or has a weak or strange key is a configuration error that names both."""
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=f"auth.keys_file {path}"):
        read_key_file(path, "auth.keys_file")


def test_scopes() -> None:
    """A key opens what its scopes name, and nothing else; admin is closed where there are no keys."""
    ring = KeyRing([Key(id="m", digest=digest_of(KEY), scopes=frozenset({"metrics"}))])
    sent = {"Authorization": f"Bearer {KEY}"}
    found = ring.check(sent, "metrics")
    assert found is not None
    assert found.id == "m"
    closed: tuple[Scope, ...] = ("inference", "admin")
    for scope in closed:
        with pytest.raises(ForbiddenError, match=f"metrics, and the route needs {scope}"):
            ring.check(sent, scope)
    assert KeyRing().check({}, "inference") is None
    with pytest.raises(ForbiddenError):
        KeyRing().check({}, "admin")


def test_expiry() -> None:
    """A key is refused from its time of expiry on, and says so."""
    sent = {"Authorization": f"Bearer {KEY}"}
    later = KeyRing([Key(id="m", digest=digest_of(KEY), expires=time.time() + 60)])
    assert later.check(sent, "inference") is not None
    over = KeyRing([Key(id="m", digest=digest_of(KEY), expires=time.time() - 1)])
    with pytest.raises(InvalidKeyError, match="expired"):
        over.check(sent, "inference")


async def test_routes_need_their_scope(make_server: Callable[..., Any]) -> None:
    """Over HTTP a key without the scope is 403, whatever the path's spelling; /admin is closed to inference keys."""
    lines = [
        Key(id="m", digest=digest_of(KEY), scopes=frozenset({"metrics"})),
        Key(id="i", digest=digest_of("other-key-2")),
    ]
    server = await make_server(ring=KeyRing(lines))
    answer = await server.post("/v1/completions", {"prompt": "Hi"}, Authorization=f"Bearer {KEY}")
    assert (answer.status, answer.error["code"]) == (403, "insufficient_scope")
    for path in ("/admin", "/admin/", "/admin/experts", "/%61dmin/slots", "/admin%2Fslots"):
        answer = await server.get(path, Authorization="Bearer other-key-2")
        assert (answer.status, answer.error["code"]) == (403, "insufficient_scope"), path
    assert (await server.post("/v1/completions", {"prompt": "Hi"}, Authorization="Bearer other-key-2")).status == 200


async def test_keys_change_while_serving(make_server: Callable[..., Any]) -> None:
    """After a reload the new keys are accepted and the old ones are not, without a restart."""
    server = await make_server(keys=[KEY])
    assert (await server.get("/v1/models", Authorization=f"Bearer {KEY}")).status == 200
    server.state.follow(server.state.settings, KeyRing.of_plain(["other-key-2"], "test"), {})
    assert (await server.get("/v1/models", Authorization=f"Bearer {KEY}")).status == 401
    assert (await server.get("/v1/models", Authorization="Bearer other-key-2")).status == 200


def test_limits_of_a_key() -> None:
    """What a key says of itself wins; what it does not say is as for all keys."""
    key = Key(id="a", digest=b"", limits=KeyLimits(requests_per_minute=5))
    found = limits_of(key, KeyLimits(requests_per_minute=60, tokens_per_day=1000))
    assert found == KeyLimits(requests_per_minute=5, tokens_per_day=1000)
