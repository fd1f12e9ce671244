"""Gates that no linter has: size of files and C functions, and things that must never be in the source.

Usage: check_style.py   (from anywhere; exits 1 and lists what is wrong)
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES = 400  # the goal for every file ...
LONG_SHARE = 0.06  # ... which share of them may be longer ...
LONGEST_FILE = 700  # ... and how long those may get; header contracts and tables of cases are why
FUNCTION_LINES = 70
C_FOLDERS = ("engine_c/src", "engine_c/cpu", "engine_c/tests")
BANNED_IMPORTS = {"pickle", "marshal", "shelve", "dill", "torch", "transformers"}  # data must never become code
BANNED_CALLS = {"eval", "exec", "compile", "__import__"}


def source_files() -> Iterator[Path]:
    for folder in ("colibrid", "engine_c", "kernels_cu", "tests", "bench", ".ci"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".py", ".c", ".h", ".cu", ".cuh"} and "__pycache__" not in path.parts:
                yield path


def count_lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def long_files() -> Iterator[str]:
    """More long files than allowed, or one that is too long whatever the reason."""
    files = sorted((count_lines(path), path.relative_to(ROOT)) for path in source_files())
    long = [(lines, path) for lines, path in files if lines > FILE_LINES]
    if len(long) > LONG_SHARE * len(files):
        names = ", ".join(f"{path} ({lines})" for lines, path in long)
        yield f"{len(long)} of {len(files)} files have more than {FILE_LINES} lines, too many: {names}"
    for lines, path in long:
        if lines > LONGEST_FILE:
            yield f"{path}: {lines} lines, at most {LONGEST_FILE}"


def long_functions() -> Iterator[str]:
    """A C function of the formatted source: from a line that ends in `) {` at column 0 to the next `}` there."""
    for folder in C_FOLDERS:
        for path in sorted((ROOT / folder).glob("*.[ch]")):
            start = 0
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                if re.match(r"\S.*\) \{$", line) or (re.match(r"\s+.*\) \{$", line) and start < 0):
                    start = number
                elif re.match(r"[A-Za-z_].*\($|[A-Za-z_].*,$", line):
                    start = -1  # a signature over several lines
                elif line.startswith("}") and start > 0:
                    if number - start - 1 > FUNCTION_LINES:
                        yield f"{path.relative_to(ROOT)}:{start}: {number - start - 1} lines, at most {FUNCTION_LINES}"
                    start = 0


def banned_code() -> Iterator[str]:
    for path in sorted((ROOT / "colibrid").rglob("*.py")):
        where = path.relative_to(ROOT)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for name in names:
                if name.split(".")[0] in BANNED_IMPORTS:
                    yield f"{where}:{node.lineno}: import of {name}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BANNED_CALLS:
                yield f"{where}:{node.lineno}: call of {node.func.id}"


def main() -> int:
    problems = [*long_files(), *long_functions(), *banned_code()]
    for problem in problems:
        print(problem)  # noqa: T201  # what a check script is for
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
