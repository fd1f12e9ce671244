"""bench/tune_walk.py keeps docs/TUNE.md what the program says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tune_walk import PAGE, PICTURES, Folder, rewritten

if TYPE_CHECKING:
    from pathlib import Path

TEXT = """Before
```console
$ first --a \\
    --b 1
old output
of two lines
```
between
```sh
not run
```
```console
$ second
```
after
"""


def test_output_takes_the_place_of_output() -> None:
    """Every command of a console is run in order, with its continued lines, and nothing else of the page changes."""
    ran: list[str] = []

    def run(command: str) -> str:
        ran.append(command)
        return f"new {len(ran)} \\1\n"

    text = rewritten(TEXT, run)
    assert ran == ["first --a \\\n    --b 1", "second"]
    assert text == TEXT.replace("old output\nof two lines\n", "new 1 \\1\n").replace(
        "$ second\n", "$ second\nnew 2 \\1\n"
    )
    assert rewritten(text, lambda command: f"new {1 + (command == 'second')} \\1\n") == text


def test_folder(tmp_path: Path) -> None:
    """Commands see the data of the tests and our program; wrong usage ends the walk; the first run's files are kept."""
    folder = Folder(tmp_path)
    assert folder.run("ls tests/data | grep eval").strip() == "hummingbird-13m.eval.jsonl"
    assert folder.run("colibrid --version").startswith("colibrid ")
    folder.run("mkdir tuned && echo 1 >tuned/file")
    folder.run("echo 2 >tuned/file")
    assert (tmp_path / "shown" / "file").read_text() == "1\n"
    with pytest.raises(SystemExit, match="exit code 2"):
        folder.run("colibrid tune --nothing 2>/dev/null")


def test_page_is_whole() -> None:
    """The guide's commands have output, and its pictures are there, each below 300 kB."""
    seen: list[str] = []
    text = PAGE.read_text(encoding="utf-8")
    rewritten(text, lambda command: seen.append(command) or "")
    assert len(seen) >= 4
    for command in seen:
        assert not text.split(f"$ {command}\n")[1].startswith("```"), command
    for name in (*PICTURES, "report"):
        assert f"](tune-{name}.png)" in text
        assert (PAGE.parent / f"tune-{name}.png").stat().st_size < 300_000
