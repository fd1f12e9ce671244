"""gcc -fanalyzer over engine_c/src: every path through every function, for leaks, double frees, null and dead memory.

Usage: check_analyzer.py BUILD   (BUILD holds crc32c_tables.h; exits 1 and lists what is wrong)

A false alarm is silenced by its reason at the end of the line: /* analyzer: the reason */
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# With gcc's default budget half of the files are given up early, which it says only under -Wanalyzer-too-complex.
COMMAND = ["gcc", "-std=c11", "-D_GNU_SOURCE", "-c", "-o", os.devnull, "-fanalyzer", "-Wanalyzer-too-complex"]
COMMAND += ["-fdiagnostics-plain-output", "--param=analyzer-bb-explosion-factor=100"]
COMMAND += ["-Iengine_c/include", "-Iengine_c/src", "-Iengine_c/cpu"]
WARNING = re.compile(r"^(\S+?):(\d+):\d+: (?:warning|error): (.*)$", re.MULTILINE)


def analyze(source: str, build: str) -> set[str]:
    done = subprocess.run([*COMMAND, f"-I{build}", source], cwd=ROOT, capture_output=True, text=True, check=False)
    found = {
        f"{file}:{line}: {text}"
        for file, line, text in WARNING.findall(done.stderr)
        if "terminating analysis for this program point" not in text and not explained(ROOT / file, int(line))
    }
    return found or ({f"{source}: gcc failed: {done.stderr}"} if done.returncode != 0 else set())


def explained(file: Path, line: int) -> bool:
    return re.search(r"/\* analyzer: \w.* \*/$", file.read_text(encoding="utf-8").splitlines()[line - 1]) is not None


def main() -> int:
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "engine_c" / "src").glob("*.c"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = sorted(set().union(*pool.map(analyze, sources, [sys.argv[1]] * len(sources))))
    for line in found:
        print(line)  # noqa: T201  # what a check script is for
    print(f"gcc -fanalyzer: {len(sources)} files, {len(found)} findings")  # noqa: T201
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
