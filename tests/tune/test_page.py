"""The words of the report's page."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import msgspec
from made_result import made_result

from colibrid.tune.page import report_page
from colibrid.tune.points import point_name

LIMITS = "p99_itl_ms<10.5, kl<0.025"


class Tables(HTMLParser):
    """Cells of all tables, row by row; elements that were not closed stay in `open`."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in {"meta", "img", "source"}:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in {"td", "th"}:
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in {"td", "th", "span"} and self.rows:
            self.rows[-1][-1] += data


def test_nothing_of_it_is_elsewhere() -> None:
    """No address, and no style that the page's policy would refuse."""
    text = report_page(made_result(slo=LIMITS), [])
    assert "style=" not in text
    assert "://" not in text


def test_every_point_is_a_row() -> None:
    """All points in order, with mark, figures and why one was stopped; all elements are closed."""
    result = made_result(slo=LIMITS)
    read = Tables(report_page(result, []))
    assert read.open == []
    numbered = [row for row in read.rows if row[0].split() and row[0].split()[0].isdigit()]
    rows = {row[0].split()[0]: row for row in reversed(numbered)}  # layers have numbers, too, and come later
    for number, tried in enumerate(result.tried):
        row = rows[str(number)]
        assert row[1] == point_name(tried.point)
        assert ("★" in row[0]) == (number == result.chosen)
        assert ("●" in row[0]) == (number in result.front and number != result.chosen)
        assert f"{tried.quality.kl:,.5f}" in row
    assert rows[str(len(result.tried) - 1)][2] == "stopped early: kl<0.02: kl is 0.196"
    assert rows["1"][2] == "✗ kl<0.025: kl is 0.1"


def test_choice_is_said() -> None:
    """The chosen point, its reason, its limits and its figures beside the own ones; or that nothing meets the limits."""
    result = made_result(slo=LIMITS)
    text = report_page(result, [])
    assert result.chosen
    assert f"<strong>{point_name(result.tried[result.chosen].point)}</strong>" in text
    assert "✓ kl&lt;0.025" in text
    row = next(row for row in Tables(text).rows if row[0] == "KL" and len(row) == 4)
    kl = result.tried[result.chosen].quality.kl
    assert kl is not None
    assert row[1:] == ["0.00000", f"{kl:.5f}", f"{kl:+.2g}"]
    nobody = made_result(slo="p99_itl_ms<1")
    text = report_page(nobody, [])
    assert nobody.chosen is None
    assert "Nothing meets the limits" in text
    assert "p99_itl_ms&lt;1" in text


def test_evidence_is_whole() -> None:
    """What a figure must be judged by is there: pack, data, machine, version, time, positions, requests."""
    text = report_page(made_result(), [])
    for words in ("made of nothing", "SHA-256 " + "0" * 64, "no machine", "colibrid 0.0.0", "2000-01-01T00:00:00Z"):
        assert words in text
    assert "20,000 positions, KL over 2,048" in text
    assert "64 requests a point, 8 at a time" in text


def test_texts_from_outside_stay_texts() -> None:
    """No name can put an element into the page."""
    bad = "</title><script>x</script>\"'&"
    result = msgspec.structs.replace(
        made_result(), model=bad, machine=bad, data=bad, reason=bad, pack=bad, device=bad, version=bad, made=bad
    )
    text = report_page(result, [])
    assert "<script" not in text
    assert text.count("&lt;script&gt;") == 12
