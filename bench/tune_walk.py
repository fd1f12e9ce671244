"""Runs the commands that docs/TUNE.md shows, and puts their output and their pictures into it.

    PYTHONPATH=. python bench/tune_walk.py [--keep FOLDER]

Every block of the page that begins with `$ ` is run, one after another, in a new folder beside which `tests` is that of the
repository; what it writes to standard output takes the place of what stands there. Quality is the same wherever this runs;
the costs want an idle machine. Takes some five minutes on two cores. Wants matplotlib and chromium.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from chromium import BINARY, tab  # noqa: E402 - found through the path above

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = ROOT / "docs" / "TUNE.md"
FIRST = "tuned"  # the folder of the run whose pictures the page shows
PICTURES = ("front", "experts", "load", "entropy", "cut")
_BLOCK = re.compile(r"(```console\n\$ )((?:[^\n]*\\\n)*[^\n]*\n)(.*?)(```)", re.DOTALL)
_CAN_BE = (0, 1)  # 1: nothing keeps the limits


def rewritten(page: str, run: Callable[[str], str]) -> str:
    """The page with the output that `run` gives for each of its commands, from the first to the last."""
    return _BLOCK.sub(lambda found: f"{found[1]}{found[2]}{run(found[2].strip())}{found[4]}", page)


class Folder:
    """Where the commands run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "tests").symlink_to(ROOT / "tests")
        (path / "bin").mkdir()
        command = path / "bin" / "colibrid"
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m colibrid.cli "$@"\n')
        command.chmod(0o755)
        self._environment = {**os.environ, "PATH": f"{path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def run(self, command: str) -> str:
        """Its standard output; progress goes to the terminal. Pictures of the first run are kept."""
        print(f"$ {command}", flush=True)
        done = subprocess.run(
            ["sh", "-c", command], cwd=self.path, env=self._environment, stdout=subprocess.PIPE, check=False
        )
        if done.returncode not in _CAN_BE:
            raise SystemExit(f"{command}: exit code {done.returncode}")
        made = self.path / FIRST
        if made.is_dir() and not (self.path / "shown").exists():
            shutil.copytree(made, self.path / "shown")
        return done.stdout.decode()


async def photograph(report: Path, target: Path) -> None:
    """The upper part of a report."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as browser:
        await _photograph(report, target, Path(browser))


async def _photograph(report: Path, target: Path, browser: Path) -> None:
    async with tab(browser, width=1180, height=1010) as page:
        await page.call("Page.navigate", url=report.as_uri())
        await page.until("document.images.length > 0 && [...document.images].every(one => one.complete)")
        await page.screenshot(target)


def main() -> int:
    parser = argparse.ArgumentParser(description="The guide's commands, output and pictures.")
    parser.add_argument("--keep", type=Path, help="a new folder to run in, which stays")
    options = parser.parse_args()
    if BINARY is None:
        raise SystemExit("chromium is not installed")
    with tempfile.TemporaryDirectory() as temporary:
        if options.keep is not None:
            options.keep.mkdir(parents=True)
        folder = Folder(options.keep or Path(temporary))
        text = rewritten(PAGE.read_text(encoding="utf-8"), folder.run)
        for name in PICTURES:
            shutil.copyfile(folder.path / "shown" / f"{name}.png", PAGE.parent / f"tune-{name}.png")
        asyncio.run(photograph(folder.path / "shown" / "report.html", PAGE.parent / "tune-report.png"))
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
