"""docs/reference/errors.md against the source: each code that can be sent has its row, and each row a code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from colibrid.engine.abi import Status
from colibrid.engine.swaps import _OURS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "errors.md"
PARTS = ("batch", "engine", "http", "model", "text")
NO_REFUSAL = {Status.OK, Status.NO_TOKEN} | _OURS


def codes_of_the_source() -> set[str]:
    """Every constant that is given as `code=`."""
    return {
        keyword.value.value
        for part in PARTS
        for path in [*(ROOT / "colibrid" / part).rglob("*.py"), ROOT / "colibrid" / "plugin_host.py"]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "code" and isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, str)
    }


def codes_of_the_page() -> set[str]:
    rows = [line.split("|") for line in PAGE.read_text(encoding="utf-8").splitlines() if re.match(r"\| \d{3} \|", line)]
    return {code for row in rows for code in re.findall(r"`([a-z_]+)`", row[3])}


def test_every_code_has_a_row() -> None:
    """The page lists exactly the codes that the server sends; a refused swap's are the engine's words."""
    of_swaps = {status.name.lower() for status in set(Status) - NO_REFUSAL}
    assert codes_of_the_page() == codes_of_the_source() | of_swaps
    assert {"slow_down", "server_is_overloaded", "invalid_api_key"} <= codes_of_the_page()
