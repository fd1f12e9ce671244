"""The printed references of the command line."""

from __future__ import annotations

import ast
from pathlib import Path

import click
import pytest

from colibrid.cli.main import cli, run
from colibrid.cli.reference import EXITS, cli_reference, commands, exit_reference

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "reference"


def test_pages_are_current() -> None:
    """docs/reference/cli.md and exit-codes.md are what the options say; `make docs` prints them again."""
    assert (PAGES / "cli.md").read_text(encoding="utf-8") == cli_reference()
    assert (PAGES / "exit-codes.md").read_text(encoding="utf-8") == exit_reference()


def test_every_verb_is_there() -> None:
    """No verb of the front door is missing, nor one without an explanation."""
    found = dict(commands())
    assert {path.split()[1] for path in found} == set(cli.list_commands(click.Context(cli)))
    assert all(command.help for command in found.values())


def test_every_exit_code_is_told() -> None:
    """Each code that the command line has a name for is in the table, once."""
    named = {click.UsageError.exit_code, 0}
    for path in (ROOT / "colibrid" / "cli").glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                named |= {
                    node.value.value
                    for name in node.targets
                    if isinstance(name, ast.Name) and name.id.startswith("EXIT_") and isinstance(node.value.value, int)
                }
    assert [one.code for one in EXITS] == sorted(named)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--version"], 0),
        (["config", "reload", "--admin-socket", "nowhere"], 1),
        (["serve", "--no-such-option"], 2),
        (["inspect", "no-such-folder/"], 78),
    ],
)
def test_codes_are_those_of_the_program(
    arguments: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command line for each code ends with it."""
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == code
    assert code in {one.code for one in EXITS}
