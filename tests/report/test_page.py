"""Pages that hold all they need."""

from __future__ import annotations

import base64
import hashlib
import re

from colibrid.report.page import facts, page


def test_policy_is_that_of_the_style() -> None:
    """The style that the page holds is the one that its policy names, and scripts and networks are not in it."""
    text = page("a title", ["<p>x</p>"], "p { color: red; }")
    style = text.split("<style>")[1].split("</style>")[0]
    assert style.endswith("p { color: red; }")
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)
    assert policy is not None
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy[1].split("; ") == [
        "default-src 'none'", f"style-src 'sha256-{digest}'", "img-src data:", "base-uri 'none'", "form-action 'none'",
    ]  # fmt: skip
    assert "style=" not in text
    assert "://" not in text


def test_titles_and_facts_are_text() -> None:
    """Only the body is markup."""
    assert "<title>&lt;b&gt;</title>" in page("<b>", [], "")
    assert facts([("<a>", "1 & 2")]) == "<dl><dt>&lt;a&gt;</dt><dd>1 &amp; 2</dd></dl>"
