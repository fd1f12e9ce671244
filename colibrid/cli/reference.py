"""Prints the references of the command line: python -m colibrid.cli.reference FOLDER, or `make docs`.

cli.md           every verb with its options, as `--help` has them
exit-codes.md    what the program ends with, and what to do then
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from colibrid.cli.main import EXIT_CONFIG, EXIT_FAILED, EXIT_INTERRUPTED, cli

if TYPE_CHECKING:
    from collections.abc import Iterator

_CLI_HEAD = """\
# Command line reference

Printed from the options themselves by `make docs`; do not edit. `colibrid VERB --help` shows the same. What the program
ends with: [exit codes](exit-codes.md). Every setting of [the configuration](configuration.md) can be given as
`--set section.key=value`.
"""
_EXIT_HEAD = """\
# Exit codes

Printed from `colibrid/cli/reference.py` by `make docs`; do not edit. An error is one line on stderr, `colibrid: …`, never a
traceback; errors of the configuration are a line each.

| code | meaning | what to do | systemd |
|---|---|---|---|
"""
_EXIT_FOOT = """
A process that a signal ended has no code of its own; shells show 128 and the signal's number (SIGKILL: 137). The engine
process, which the daemon watches, ends with 0, 78 for settings and models, and 70 for everything else; the daemon's log has it.
"""


class _Exit(NamedTuple):
    code: int
    meaning: str
    action: str
    unit: str


EXITS = (
    _Exit(0, "done; `serve`: stopped on request, running answers were finished", "nothing", "not restarted"),
    _Exit(
        EXIT_FAILED,
        "failed: an engine that died again and again, an address in use, a damaged pack that `verify` found, a failed"
        " request of `bench http`, a refused `config reload`, something of the host that `doctor`"
        " found, limits of `tune` that no point keeps",
        "read the last line of the log; [Troubleshooting](../TROUBLESHOOTING.md)",
        "restarted",
    ),
    _Exit(
        click.UsageError.exit_code,
        "wrong usage: an unknown verb or option, a missing argument",
        "`--help`",
        "not restarted",
    ),
    _Exit(
        EXIT_CONFIG,
        "the configuration or the model is wrong",
        "correct what the line names; starting again changes nothing. `colibrid config check FILE`, `colibrid doctor`",
        "not restarted (`RestartPreventExitStatus=2 78`)",
    ),
    _Exit(
        EXIT_INTERRUPTED,
        "interrupted by Ctrl-C, other than `serve`, which drains; `bench http`, by SIGTERM as well, after it has reported what"
        " finished",
        "nothing",
        "",
    ),
)


def exit_reference() -> str:
    """docs/reference/exit-codes.md."""
    rows = (f"| {one.code} | {one.meaning} | {one.action} | {one.unit} |\n" for one in EXITS)
    return _EXIT_HEAD + "".join(rows) + _EXIT_FOOT


def cli_reference() -> str:
    """docs/reference/cli.md."""
    found = list(commands())
    index = "".join(f"- [`{path}`](#{path.replace(' ', '-')}): {_first_sentence(one)}\n" for path, one in found)
    return _CLI_HEAD + "\n" + index + "".join(_section(path, one) for path, one in found)


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, by what is typed."""
    yield from _below("colibrid", cli)


def _below(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command, info_name=path)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None
        yield from _below(f"{path} {name}", found)


def _first_sentence(command: click.Command) -> str:
    paragraph = inspect.cleandoc(command.help or "").split("\n\n", maxsplit=1)[0]
    return _escaped(paragraph.replace("\n", " "))


def _section(path: str, command: click.Command) -> str:
    context = click.Context(command, info_name=path)
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    options = [each for each in command.params if isinstance(each, click.Option)]
    records = [record for each in options if (record := each.get_help_record(context)) is not None]
    table = "".join(f"| `{option.replace('|', '¦')}` | {_escaped(about)} |\n" for option, about in records)
    head = "| option | |\n|---|---|\n" if table else ""
    return f"\n## {path}\n\n```\n{usage}\n```\n\n{_escaped(inspect.cleandoc(command.help or ''))}\n\n{head}{table}"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def main() -> None:
    """Write both pages into the folder that is given."""
    folder = Path(sys.argv[1])
    (folder / "cli.md").write_text(cli_reference(), encoding="utf-8")
    (folder / "exit-codes.md").write_text(exit_reference(), encoding="utf-8")


if __name__ == "__main__":
    main()
