"""MISRA C:2012 by cppcheck's addon: nothing but what docs/MISRA.md names.

Usage: check_misra.py   (from anywhere; exits 1 and lists what is wrong; exits 0 with a word where cppcheck is missing)

The table of docs/MISRA.md is the only list of deviations. A row that nothing needs any more is an error too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "MISRA.md"
MOST_ROWS = 12
INCLUDES = ("engine_c/include", "engine_c/src", "engine_c/cpu")
VECTORS = re.compile(r"immintrin\.h|vector_size|\bclb_(lanes|float4|float8|float16)\w*")
GCC_CHECKS = {"11.8"}  # -Wcast-qual does; cppcheck takes a structure's const for that of what its members point to


@dataclass(frozen=True)
class Finding:
    file: str
    line: int
    rule: str  # "15.5", or the name of one of cppcheck's own checks
    text: str

    def source(self) -> str:
        return (ROOT / self.file).read_text(encoding="utf-8").splitlines()[self.line - 1]

    def __str__(self) -> str:
        what = f"rule {self.rule}" if self.rule[0].isdigit() else f"{self.rule}: {self.text}"
        return f"{self.file}:{self.line}: {what}: {self.source().strip()}"


def deviations() -> dict[str, set[str]]:
    """rule -> files in which it may be broken; {"everywhere"} for all."""
    rows = re.findall(
        r"^\| (\d+\.\d+) \| (?:required|advisory) \| .+ \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    return {rule: set(re.findall(r"`([^`]+)`", where)) or {where} for rule, where in rows}


def excepted(file: str) -> bool:
    """Intrinsics and vectors under engine_c/cpu, and headers that are CUDA's as well as ours."""
    if file.startswith("kernels_cu/"):
        return True
    return file.startswith("engine_c/cpu/") and VECTORS.search((ROOT / file).read_text(encoding="utf-8")) is not None


def run_cppcheck(cppcheck: str) -> list[Finding]:
    sources = sorted(
        str(path.relative_to(ROOT))
        for folder in ("engine_c/src", "engine_c/cpu")
        for path in (ROOT / folder).glob("*.c")
        if not excepted(str(path.relative_to(ROOT)))
    )
    with tempfile.TemporaryDirectory() as folder:
        # A text for each rule of our own: of findings in one line with one text, cppcheck reports only the first.
        texts = Path(folder) / "texts"
        rules = [
            f"Rule {chapter}.{number} Required\nRule {chapter}.{number}\n"
            for chapter in range(1, 23)
            for number in range(1, 25)
        ]
        texts.write_text("Appendix A Summary of guidelines\n" + "\n".join(rules), encoding="ascii")
        addon = Path(folder) / "misra.json"
        addon.write_text(json.dumps({"script": "misra.py", "args": [f"--rule-texts={texts}"]}), encoding="ascii")
        command = [
            cppcheck,
            f"--addon={addon}",
            "-U__CUDACC__",
            "-U__cplusplus",
            "--std=c11",
            "--quiet",
            "--inline-suppr",
            f"-j{os.cpu_count() or 1}",
        ]
        command += [
            "--template={file}\t{line}\t{id}\t{message}",
            "--template-location=",
            "--enable=warning,performance,portability",
        ]
        command += [f"-I{include}" for include in INCLUDES]
        done = subprocess.run([*command, *sources], cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line.split("\t") for line in done.stderr.splitlines() if line.count("\t") == 3]
    if (
        done.returncode != 0 or not lines
    ):  # the code we have breaks some rule for sure: silence is a failure of the tool
        sys.exit(f"cppcheck failed with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    return [Finding(file, int(line), name.removeprefix("misra-c2012-"), text) for file, line, name, text in lines]


def mistaken(finding: Finding) -> bool:
    """What the addon gets wrong, each with its proof."""
    if finding.rule in GCC_CHECKS:
        return True
    source = finding.source()
    if finding.rule in {"2.4", "5.7"}:  # about tags: an enumeration or structure without one has none to be used
        return re.search(r"\b(enum|struct) \{", source) is not None
    if finding.rule in {"2.3", "2.4", "2.5", "8.7"}:  # used elsewhere: in a test, by Python, in a kernel module
        name = re.search(r"#define (\w+)|\b(clb_\w+)\(|(?:struct|enum) (\w+) \{|\} (\w+);", source)
        return name is not None and used_elsewhere(next(filter(None, name.groups())), finding.file)
    return False


def used_elsewhere(name: str, file: str) -> bool:
    paths = [*ROOT.glob("engine_c/*/*.[ch]"), *ROOT.glob("kernels_cu/*.cu*"), *ROOT.glob("colibrid/engine/*.py")]
    unit = (ROOT / file).with_suffix("").name
    word = re.compile(rf"\b{name}\b")
    return any(word.search(path.read_text(encoding="utf-8")) for path in paths if path.stem != unit)


def unexplained_suppressions() -> list[str]:
    """A suppression stands on a line of its own and says why: /* cppcheck-suppress misra-c2012-1.2 ; the reason */"""
    return [
        f"{path.relative_to(ROOT)}:{number}: a suppression without a reason behind ';'"
        for path in sorted(ROOT.glob("engine_c/*/*.[ch]"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if "cppcheck-suppress" in line and not re.search(r"cppcheck-suppress \S+ ; \w+", line)
    ]


def problems(findings: list[Finding], table: dict[str, set[str]]) -> list[str]:
    found: list[str] = []
    needed: set[tuple[str, str]] = set()
    for finding in findings:
        places = table.get(finding.rule, set())
        place = "everywhere" if "everywhere" in places else finding.file
        if excepted(finding.file) or mistaken(finding):
            continue
        if place in places:
            needed.add((finding.rule, place))
        else:
            found.append(str(finding))
    if not table or len(table) > MOST_ROWS:
        found.append(f"docs/MISRA.md: {len(table)} deviations, must be 1 to {MOST_ROWS}")
    found += [
        f"docs/MISRA.md: rule {rule} is kept in {place}: strike the row or the file"
        for rule, places in table.items()
        for place in sorted(places)
        if (rule, place) not in needed
    ]
    return found + unexplained_suppressions()


def main() -> int:
    cppcheck = shutil.which("cppcheck")
    if cppcheck is None:
        print("cppcheck is not installed: MISRA C is not checked")  # noqa: T201  # what a check script is for
        return 0
    table = deviations()
    findings = run_cppcheck(cppcheck)
    wrong = problems(findings, table)
    for line in wrong:
        print(line)  # noqa: T201
    print(f"MISRA C:2012: {len(table)} rules with deviations, {len(wrong)} violations outside the table")  # noqa: T201
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
