"""Imports of the package point one way: cli -> http -> text, batch -> engine -> C library."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "colibrid"

# What each part may import of ours, besides itself and the package's own __version__.
VALUES = {"errors", "paths", "config.settings", "config.sizes", "config.live"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "paths": {"errors"},
    "config": {"errors", "paths"},
    "report": {"errors"},
    "text": VALUES,
    "model": VALUES,
    "ops": VALUES,
    "engine": VALUES | {"config.environment", "model", "ops"},
    "batch": VALUES | {"engine", "model"},
    "tune": VALUES | {"report", "config", "text", "batch", "engine", "model"},
    "plugins": VALUES | {"text", "model"},
    "plugin_host": VALUES | {"plugins", "text", "model"},
    "http": VALUES | {"plugins", "plugin_host", "text", "batch", "engine", "model", "ops"},
    "cli": VALUES
    | {"plugins", "plugin_host", "report", "config", "http", "tune", "text", "batch", "engine", "model", "ops"},
}


def part_of(module: str) -> str:
    """`colibrid.http.server` -> `http`; the package itself -> ``."""
    return module.removeprefix("colibrid").removeprefix(".").split(".")[0]


def imports_of(path: Path) -> list[tuple[int, str]]:
    """Line and full name of every import of ours, in functions and type-checking blocks too."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are written in full"
            if node.module == "colibrid":
                found += [(node.lineno, f"colibrid.{alias.name}") for alias in node.names]
            elif node.module:
                found.append((node.lineno, node.module))
    return [(line, name) for line, name in found if name.split(".")[0] == "colibrid"]


def allowed(part: str, module: str) -> bool:
    target = module.removeprefix("colibrid.")
    if part_of(module) in {part, ""} or target == "__version__":
        return True
    return any(target == name or target.startswith(f"{name}.") for name in ALLOWED[part])


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    """A module imports only parts below its own; errors and config values import nothing of ours."""
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if part == "__init__":
        assert imports_of(path) == []
        return
    wrong = [f"line {line}: {name}" for line, name in imports_of(path) if not allowed(part, name)]
    assert wrong == []


def test_settings_import_nothing_of_ours() -> None:
    """The typed configuration values can be used anywhere."""
    assert imports_of(PACKAGE / "config" / "settings.py") == []


def test_rule_refuses_an_import_upwards() -> None:
    """The check itself can fail: the engine may not know HTTP, and values may not know their users."""
    assert not allowed("engine", "colibrid.http.server")
    assert not allowed("batch", "colibrid.text.tokenizer")
    assert not allowed("text", "colibrid.config.load")
    assert not allowed("http", "colibrid.tune.runner")
    assert not allowed("batch", "colibrid.tune.result")
    assert allowed("http", "colibrid.batch.request")
