"""The page that describes the API."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import time
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

from colibrid.http.manual import render_page
from colibrid.http.openapi import document

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from tests.http.conftest import Server


class Tags(HTMLParser):
    """Every tag with its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


async def test_page_needs_nothing_from_elsewhere(make_server: Callable[..., Any]) -> None:
    """/docs is one page without a key: no script, no address, a policy that forbids both and knows its one style."""
    server: Server = await make_server(keys=["secret-key"])
    answer = await server.get("/docs")
    assert answer.status == 200
    page, policy = answer.raw.decode(), answer.headers["Content-Security-Policy"]
    tags = Tags()
    tags.feed(page)
    assert not {tag for tag, _ in tags.found} & {"script", "link", "img", "iframe", "form", "a"}
    assert not [name for _, attributes in tags.found for name in attributes if name not in ("charset", "lang")]
    assert "http:" not in page
    assert "https:" not in page
    style = re.search("<style>(.*?)</style>", page)
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style.group(1).encode()).digest()).decode()
    assert policy.startswith("default-src 'none'; style-src 'sha256-" + digest)
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


async def test_pages_are_made_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ask at once, and after one of them has left, the documents are made a single time."""
    made: list[int] = []

    def slowly(routes: Any) -> Any:
        made.append(1)
        time.sleep(0.1)
        return document(routes)

    monkeypatch.setattr("colibrid.http.manual.document", slowly)
    first = asyncio.create_task(server.get("/docs"))
    await asyncio.sleep(0.05)
    first.cancel()
    answers = await asyncio.gather(*(server.get(path) for path in ("/docs", "/openapi.json", "/docs")))
    assert [answer.status for answer in answers] == [200] * 3
    assert made == [1]


async def test_page_lists_routes_and_fields(server: Server) -> None:
    """Every route and the fields of its body are there, with bounds and notes."""
    page = (await server.get("/docs")).raw.decode()
    for words in ("POST /v1/completions", "GET /v1/models/{id}", "repetition_penalty", "number, &gt; 0, &lt;= 100"):
        assert words in page


def test_text_is_escaped() -> None:
    """Whatever the document says is text on the page."""
    schema = {"properties": {"<b>": {"type": "string", "description": "<i>&"}}}
    described: dict[str, Any] = {
        "info": {"title": "<t>", "version": "1", "description": "<d>"},
        "paths": {},
        "components": {"schemas": {"<s>": schema}},
    }
    page = render_page(described)
    for raw, shown in (("<b>", "&lt;b&gt;"), ("<i>&<", "&lt;i&gt;&amp;<"), ("<s>", "&lt;s&gt;"), ("<t>", "&lt;t&gt;")):
        assert raw not in page
        assert shown in page
