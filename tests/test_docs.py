"""The documents: links lead somewhere, the index is complete, what is shown is what the program says."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from colibrid.cli.main import run
from colibrid.cli.reference import commands
from colibrid.cli.serve import serve
from colibrid.config.load import keys
from colibrid.http.routes import ROUTES

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
# Pages about today's program; decisions and changes may name what is gone.
GUIDES = [page for page in PAGES if "decisions" not in page.parts and page.name != "CHANGELOG.md"]
_CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
_COMMAND = re.compile(r"^(?:\$ )?(?:[A-Z_]+=\S+ )?colibrid(?!:)((?: +[a-z][\w./-]*)*)((?:[ \t]+\S+)*)")
_SETTING = re.compile(r"(?<![\w./-])(?:--set )?([a-z]+(?:\.[a-z_]+)+)(?![\w/-]|\.\w)")
_SUFFIXES = (
    "py",
    "c",
    "h",
    "cu",
    "cuh",
    "md",
    "yaml",
    "json",
    "service",
    "socket",
    "sh",
    "so",
    "bin",
    "key",
    "jsonl",
    "png",
    "weight",
    "bias",
)
_NO_SETTINGS = {"server.prot"}  # the README's example of a mistake


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link of a document names a file of the repository."""
    missing = [link for link in _LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert missing == []


def test_files_of_the_architecture_exist() -> None:
    """Every source file that docs/ARCHITECTURE.md names is there."""
    named = set(re.findall(r"[\w/]+\.(?:py|c|h|cu)\b", (ROOT / "docs" / "ARCHITECTURE.md").read_text()))
    found = [path for part in ("colibrid", "engine_c", "kernels_cu", "tests") for path in (ROOT / part).rglob("*.*")]
    assert {name for name in named if not any(f"/{path.as_posix()}".endswith(f"/{name}") for path in found)} == set()
    assert len(named) > 40


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


def _code(page: Path) -> list[str]:
    return [piece.strip("`") for piece in _CODE.findall(page.read_text().replace("\\\n", " "))]


@cache
def _verbs() -> dict[str, set[str]]:
    """Options by what is typed; of groups, too."""
    found = {
        path: {option for each in one.params for option in (*each.opts, *each.secondary_opts)}
        for path, one in commands()
    }
    groups = {path.rpartition(" ")[0]: set[str]() for path in found}
    return {**groups, **found, "colibrid": {"--version", "-V", "--help", "-h"}}


def test_index_leads_to_every_page() -> None:
    """docs/README.md links every page of docs/ and docs/reference."""
    folder = ROOT / "docs"
    linked = {(folder / link).resolve() for link in _LINK.findall((folder / "README.md").read_text())}
    pages = {*folder.glob("*.md"), *(folder / "reference").glob("*.md")} - {folder / "README.md"}
    assert {str(page.relative_to(ROOT)) for page in pages - linked} == set()


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist(page: Path) -> None:
    """Verbs and options of the commands that a page shows are those of the program, and make's targets those of Makefile."""
    groups = {path for path in _verbs() if any(other.startswith(f"{path} ") for other in _verbs())}
    wrong = []
    for line in (line for piece in _code(page) for line in piece.splitlines()):
        for words, rest in _COMMAND.findall(line.split(" # ")[0]):
            path = "colibrid"
            for word in words.split():
                if path not in groups:
                    break
                path = f"{path} {word}"
            if path not in _verbs():
                wrong.append(path)
                continue
            command = re.split(r"[|;>&]|\bcolibrid ", f"{words} {rest}")[0]
            options = {option.split("=")[0] for option in re.findall(r"(?<=[\s\[])--[a-z-]+", command)} - {"--help"}
            wrong += [f"{path} {option}" for option in sorted(options - _verbs()[path])]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for piece in _code(page):
        wrong += [f"make {name}" for name in re.findall(r"(?:^|\n)make ([a-z][a-z-]*)", piece) if name not in targets]
    assert wrong == []


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
def test_settings_exist(page: Path) -> None:
    """A word such as server.port in code is a setting, or a group of them, if its first part is a section."""
    known = set(keys()) | {key.rsplit(".", depth)[0] for key in keys() for depth in range(1, key.count("."))}
    sections = {key.partition(".")[0] for key in keys()}
    named = {name for piece in _code(page) for name in _SETTING.findall(piece)}
    named = {name for name in named if name.partition(".")[0] in sections and name.rpartition(".")[2] not in _SUFFIXES}
    assert sorted(named - known - _NO_SETTINGS) == []


@cache
def _texts() -> str:
    """All texts of the package's source, values as …, a line each."""
    found = []
    for path in (ROOT / "colibrid").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                found.append("".join(str(part) for part in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_messages_of_troubleshooting_are_real() -> None:
    """Every message that docs/TROUBLESHOOTING.md quotes is in the source; of those that end with …, the beginning."""
    page = (ROOT / "docs" / "TROUBLESHOOTING.md").read_text()
    tables = re.findall(r"\| message \|.*?(?=\n\n|\Z)", page, re.DOTALL)
    cells = [row.split(" | ")[0] for table in tables for row in table.splitlines()[2:]]
    cells += re.findall(
        r"^\| (`no daemon.+?`|`the admin socket.+?`|`the old settings.+?in the log) \|", page, re.MULTILINE
    )
    messages = [cell.removeprefix("| ").removesuffix(" in the log")[1:-1].removesuffix("…").strip() for cell in cells]
    assert len(messages) > 35
    assert [message for message in messages if message not in _texts()] == []
