"""Tables in Markdown."""

from __future__ import annotations

import pytest

from colibrid.report.table import table_lines


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    """Heads and cells alike decide, and a rule stands between them."""
    assert list(table_lines(("a", "long"), [("three", "1"), ("", "22")])) == [
        "| a     | long |",
        "| ----- | ---- |",
        "| three | 1    |",
        "|       | 22   |",
    ]


def test_a_table_without_rows_has_a_head() -> None:
    """So that it is still seen what is missing."""
    assert list(table_lines(["a"], [])) == ["| a |", "| - |"]


def test_a_bar_is_no_border() -> None:
    """What a cell says stays in its column."""
    assert list(table_lines(["a"], [["x|y"]])) == ["| a    |", "| ---- |", r"| x\|y |"]


def test_rows_of_another_length_are_refused() -> None:
    """No cell is lost without a word."""
    with pytest.raises(ValueError, match="zip"):
        list(table_lines(["a", "b"], [["1"]]))
