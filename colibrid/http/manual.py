"""GET /openapi.json and GET /docs: the description of the API, for programs and for people.

The page has no script and loads nothing, so its policy forbids both.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from html import escape
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from colibrid.http.openapi import document
from colibrid.http.schema_text import in_words
from colibrid.http.state import STATE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from colibrid.http.routes import Route

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}"
    "code{font-family:ui-monospace,monospace}h2{margin-top:2.5rem;border-top:1px solid #ccc;padding-top:1rem}"
    "table{border-collapse:collapse;width:100%}td,th{text-align:left;vertical-align:top;padding:.25rem .75rem .25rem 0;"
    "border-bottom:1px solid #eee}"
)
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
PAGE_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_manual(app: web.Application, routes: Sequence[Route]) -> None:
    """Adds both routes to `app`."""
    manual = _Manual(routes)
    app.router.add_get("/openapi.json", manual.openapi)
    app.router.add_get("/docs", manual.docs)


class _Manual:
    """Both documents, made when one is first asked for: that takes a tenth of a second, and few ask."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = routes
        self._making: asyncio.Future[tuple[bytes, str]] | None = None

    async def openapi(self, request: web.Request) -> web.Response:
        encoded, _ = await self._made(request)
        return web.Response(body=encoded, content_type="application/json")

    async def docs(self, request: web.Request) -> web.Response:
        _, page = await self._made(request)
        return web.Response(text=page, content_type="text/html", headers=PAGE_HEADERS)

    async def _made(self, request: web.Request) -> tuple[bytes, str]:
        if self._making is None:
            self._making = asyncio.get_running_loop().run_in_executor(request.app[STATE].scribe, self._make)
        return await asyncio.shield(self._making)  # others may wait for it as well

    def _make(self) -> tuple[bytes, str]:
        described = document(self._routes)
        return msgspec.json.encode(described), render_page(described)


def render_page(described: dict[str, Any]) -> str:
    """The page of the OpenAPI document `described`."""
    info, schemas = described["info"], described["components"]["schemas"]
    title = escape(f"{info['title']} {info['version']}")
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head>',
        f"<body><h1>{title}</h1><p>{escape(info['description'])}</p><p>For programs: <code>GET /openapi.json</code></p>",
    ]
    shown: list[str] = []
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}</p>")
            if "requestBody" in operation:
                name = _name(operation["requestBody"]["content"]["application/json"]["schema"])
                parts.append(_table(schemas[name]))
                shown.append(name)
    answers = [name for name in schemas if name not in shown]
    parts += [f"<h2>{escape(name)}</h2>{_table(schemas[name])}" for name in answers]
    return "".join([*parts, "</body></html>"])


def _name(schema: dict[str, str]) -> str:
    return schema["$ref"].rsplit("/", maxsplit=1)[-1]


def _table(schema: dict[str, Any]) -> str:
    about = f"<p>{escape(schema['description'])}</p>" if "description" in schema else ""
    return f"{about}<table><tr><th>field</th><th>type</th><th>notes</th></tr>{''.join(_rows(schema))}</table>"


def _rows(schema: dict[str, Any]) -> Iterator[str]:
    for name, field in schema.get("properties", {}).items():
        kind = in_words(field).replace("`", "")
        notes = "needed. " if name in schema.get("required", ()) else ""
        notes += field.get("description", "")
        yield f"<tr><td><code>{escape(name)}</code></td><td>{escape(kind)}</td><td>{escape(notes)}</td></tr>"
