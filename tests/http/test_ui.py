"""colibrid.http.ui: the static files, and who may see what they show. tests/test_ui_browser.py opens them in a browser."""

from __future__ import annotations

import hashlib
import re
from array import array
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from colibrid.http.answers import UiState
from colibrid.http.auth import KeyRing
from colibrid.http.credentials import read_keys
from colibrid.http.ui import UI_PATHS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.http.conftest import Server


@pytest.mark.parametrize("path", UI_PATHS)
async def test_files_need_no_key_and_nobody_else(make_server: Callable[..., Any], path: str) -> None:
    """Each file is answered without a key, under a policy without exceptions, and names no other address."""
    server: Server = await make_server(keys=["secret-key"])
    answer = await server.get(path)
    assert answer.status == 200
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert not re.search(rb"https?:|//\w+\.", answer.raw)
    assert not re.search(rb"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|localStorage", answer.raw)


async def test_page_has_nothing_inline(server: Server) -> None:
    """No inline script, style or handler: the policy would refuse them."""
    page = (await server.get("/ui")).raw.decode()
    assert re.findall(r"<script[^>]*>", page) == ['<script src="ui/ui.js" defer>']
    assert not re.search(r"<style|\sstyle=|\son\w+=", page)
    script = (await server.get("/ui/ui.js")).raw.decode()
    assert set(re.findall(r'\$\("([a-z-]+)"\)', script)) <= set(re.findall(r'id="([a-z-]+)"', page))


async def test_state(server: Server) -> None:
    """What the page looks at has its declared shape, and no ids of requests."""
    server.service.measures.load.add(array("I", [1, 0, 3, 0, 0, 0, 4, 4, 0]).tobytes())
    server.service.measures.output_tokens = 7
    answer = await server.get("/ui/state")
    state = msgspec.json.decode(answer.raw, type=UiState, strict=True)
    assert (state.model, state.output_tokens) == ("hummingbird-13m", 7)
    assert [row.assignments for row in state.load] == [[1, 0, 3], [4, 4]]
    assert [(slot.state, slot.request_id) for slot in state.engines[0].slots] == [("running", None), ("free", None)]
    assert b"cmpl-1" not in answer.raw


async def test_state_needs_a_key_that_may_look(make_server: Callable[..., Any]) -> None:
    """401 without a key, 403 with one for inference only."""
    file = "\n".join(
        f"{scope} sha256:{hashlib.sha256(scope.encode()).hexdigest()} scopes={scope}"
        for scope in ("metrics", "inference")
    )
    server: Server = await make_server(ring=KeyRing(read_keys(file, "test")))
    assert (await server.get("/ui/state")).status == 401
    assert (await server.get("/ui/state", Authorization="Bearer inference")).status == 403
    assert (await server.get("/ui/state", Authorization="Bearer metrics")).status == 200


async def test_switched_off(make_server: Callable[..., Any]) -> None:
    """server.ui: false takes page and state away, and says so."""
    server: Server = await make_server(server={"ui": False})
    for path in (*UI_PATHS, "/ui/state"):
        answer = await server.get(path)
        assert (answer.status, answer.error["code"]) == (404, "unknown_url")
        assert "server.ui" in answer.error["message"]
