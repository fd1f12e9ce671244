"""The MISRA gate: a table of few rows, and nothing beside it."""

from __future__ import annotations

import check_misra
import pytest
from check_misra import Finding, problems

HERE = "engine_c/src/crc32c.c"
TABLE = {"15.5": {"everywhere"}, "21.9": {HERE}}
NEEDED = [Finding("engine_c/src/loop.c", 1, "15.5", ""), Finding(HERE, 1, "21.9", "")]


def test_the_table_names_files_that_exist() -> None:
    """docs/MISRA.md has at most twelve rows, and their files are there."""
    table = check_misra.deviations()
    assert 1 <= len(table) <= check_misra.MOST_ROWS
    files = set().union(*table.values()) - {"everywhere"}
    assert [file for file in sorted(files) if not (check_misra.ROOT / file).is_file()] == []


def test_findings_of_the_table_are_accepted() -> None:
    """A rule may be broken where its row says so."""
    assert problems(NEEDED, TABLE) == []


@pytest.mark.parametrize(
    "finding",
    [
        Finding(HERE, 1, "17.7", ""),
        Finding("engine_c/src/loop.c", 1, "21.9", ""),
        Finding(HERE, 1, "uninitvar", "Uninitialized variable"),
    ],
    ids=["another rule", "another file", "no rule"],
)
def test_any_other_finding_is_an_error(finding: Finding) -> None:
    """A rule without a row, a file that the row does not name, and cppcheck's own findings are reported."""
    assert problems([*NEEDED, finding], TABLE) == [str(finding)]


def test_a_row_that_nothing_needs_is_an_error() -> None:
    """A deviation that is gone must leave the table."""
    assert [line for line in problems(NEEDED[:1], TABLE) if "strike" in line] == [
        f"docs/MISRA.md: rule 21.9 is kept in {HERE}: strike the row or the file"
    ]


def test_vectors_are_excepted_and_plain_code_beside_them_is_not() -> None:
    """Only files that hold vector types are left out under engine_c/cpu."""
    assert check_misra.excepted("engine_c/cpu/lanes16_avx2.h")
    assert not check_misra.excepted("engine_c/cpu/rope.c")
    assert not check_misra.excepted("engine_c/src/routing.c")
