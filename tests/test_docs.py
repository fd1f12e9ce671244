"""The documents: links lead somewhere, the index is complete, what is shown is what the program says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from colibrid.cli.main import run
from colibrid.cli.serve import serve
from colibrid.config.load import keys
from colibrid.http.routes import ROUTES

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link of a document names a file of the repository."""
    missing = [link for link in _LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert missing == []


def test_every_decision_is_in_the_index() -> None:
    """docs/decisions/README.md links all pages beside it."""
    folder = ROOT / "docs" / "decisions"
    linked = set(_LINK.findall((folder / "README.md").read_text()))
    assert {page.name for page in folder.glob("[0-9]*.md")} == linked


def test_errors_in_the_readme_are_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The configuration errors that README.md shows are those of the program."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("server:\n  prot: 9000\nbatch:\n  slots: many\n")
    assert run(["serve", "--config", "c.yaml"]) == 78
    assert capsys.readouterr().err in (ROOT / "README.md").read_text()


def test_page_for_newcomers_names_what_exists() -> None:
    """Settings, options, fields and routes of the comparison's column for us are those of the program."""
    page = (ROOT / "docs" / "coming-from-vllm-and-llama-server.md").read_text()
    ours = [row.split("|")[3] for row in page.splitlines() if row.startswith("|") and row.count("|") == 4]
    named = {name for cell in ours for name in re.findall(r"`([^`]+)`", cell)}
    settings = {name.split(":")[0].split("=")[0].removeprefix("--set ") for name in named}
    sections = {key.partition(".")[0] for key in keys()}
    assert {name for name in settings if "." in name and name.partition(".")[0] in sections} <= set(keys())
    options = {name.split()[0] for name in named if name.startswith("--") and not name.startswith("--set")}
    assert options <= {option for parameter in serve.params for option in parameter.opts}
    routes = {route.path for route in ROUTES} | {"/docs", "/openapi.json", "/metrics", "/ui", "/infill"}
    assert {name for name in named if name.startswith("/")} <= routes
