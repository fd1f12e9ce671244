"""Reports as one HTML file that holds all it needs, asks nobody for anything and runs no script. Pure."""

from __future__ import annotations

import base64
import hashlib
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")


def page(title: str, body: Iterable[str], style: str) -> str:
    """The whole file. `body` is markup; `style` comes after that of all pages.

    The policy in its head allows its own style and its own pictures, and nothing else.
    """
    style = _STYLE + style
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    head = (
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">',
        f"<title>{escape(title)}</title><style>{style}</style></head><body>",
    )
    return "\n".join((*head, *body, "</body></html>")) + "\n"


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Names and what they are, one below the other."""
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(text)}</dd>' for name, text in rows)}</dl>"
