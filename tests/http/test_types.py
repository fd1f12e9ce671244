"""Fields that are refused by name, one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from colibrid.http.types import CHAT_REFUSED, COMPLETION_REFUSED, GENERATE_REFUSED, Refused

if TYPE_CHECKING:
    from tests.http.conftest import Server

ROUTES: dict[str, tuple[dict[str, Any], dict[str, Refused]]] = {
    "/v1/completions": ({"prompt": "Hi"}, COMPLETION_REFUSED),
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "Hi"}]}, CHAT_REFUSED),
    "/generate": ({"prompt": "Hi"}, GENERATE_REFUSED),
}
ROWS = [(path, name) for path, (_body, refused) in ROUTES.items() for name in refused]


@pytest.mark.parametrize(("path", "name"), ROWS)
async def test_refused_field(server: Server, path: str, name: str) -> None:
    """A value that asks for something is 400 with the field's name and what to do; off values are accepted."""
    body, refused = ROUTES[path]
    for asking in ("something", 7, ["x"], {"x": 1}):
        answer = await server.post(path, body | {name: asking})
        assert (answer.status, answer.error["param"], answer.error["code"]) == (400, name, "unsupported_value")
        assert refused[name].instead in answer.error["message"]
    assert not server.service.seen
    for off in (None, *refused[name].harmless):
        answer = await server.post(path, body | {name: off})
        assert answer.status == 200
        assert "x-colibri-ignored" not in answer.headers
