"""The script that measures the daemon beside llama-server: a real run of ours on both sides, and its page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
import versus_llama_server as script
from llama_stand_ins import make_setup

if TYPE_CHECKING:
    from pathlib import Path

PLAN = script.Plan(
    model="tiny", precision="fp32", rounds=2, clients=(2,), shares=(0.5,), closed_s=0.5, open_s=2.0,
    slo="ttft_ms<60000, itl_ms<60000",
)  # fmt: skip


@pytest.mark.slow
def test_a_whole_run(tmp_path: Path) -> None:
    """Both sides get every load in every round, taking turns; figures have intervals; the page and its tables say it."""
    said: list[str] = []
    results = script.measure(make_setup(tmp_path), "test", "a machine", [PLAN], said.append)
    assert [line for line in said if "round" in line] == [
        f"tiny fp32, round {number} of 2, {side}"
        for number, sides in ((1, ("ours", "theirs")), (2, ("theirs", "ours")))
        for side in sides
    ]
    closed, arriving = results.rows
    assert closed.load == "closed loop, 2 clients, 0.5 s"
    assert arriving.load.startswith("open loop, ")
    for row in results.rows:
        assert (len(row.ours), len(row.theirs)) == (2, 2)
        assert row.ours[0].load.rate == row.theirs[1].load.rate
        assert row.ours[0].load.seed == row.theirs[0].load.seed != row.ours[1].load.seed
        assert row.found.requests == (sum(each.ok for each in row.theirs), sum(each.ok for each in row.ours))
        assert row.found.warnings == [one for one in row.found.warnings if "independent parts" in one]  # a short test
        assert not row.ours[0].samples
    assert results.same_text == {"tiny fp32": True}
    path = script.write(results, tmp_path / "out")
    assert path.name == f"{results.date}-versus-llama-server.md"
    assert msgspec.json.decode(path.with_suffix(".json").read_bytes(), type=script.Results) == results
    text = path.read_text()
    assert "tiny fp32 (both servers give the same greedy text); prompts about 64 (lognormal" in text
    assert "| closed loop, 2 clients, 0.5 s | 2 | " in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    document = tmp_path / "page.md"
    document.write_text(f"before\n{script.BEGIN}\nof yesterday\n{script.END}\nafter\n")
    script.publish(results, document, "a.md")
    published = document.read_text()
    assert published.startswith(f"before\n{script.BEGIN}\na machine; commit ")
    assert published.endswith(f"[its page](a.md).\n{script.END}\nafter\n")
    assert "yesterday" not in published
    loaded = "\n".join(script.markdown(msgspec.structs.replace(results, busy=0.4)))
    assert "**From a loaded machine (40% busy" in loaded
    assert "loaded machine" not in "\n".join(script.markdown(msgspec.structs.replace(results, busy=0.01)))


def test_a_page_without_marks_is_an_error(tmp_path: Path) -> None:
    """It is left as it is."""
    results = script.Results(
        date="2026-01-02", commit="a", machine="m", mode="full", threads=2, busy=0.0, peer="p", slots=8, seconds=1.0,
        same_text={}, rows=[],
    )  # fmt: skip
    document = tmp_path / "page.md"
    document.write_text("text")
    with pytest.raises(script.BenchError, match="marks are missing"):
        script.publish(results, document, "a.md")
    assert document.read_text() == "text"


def test_the_page_of_the_documents_has_the_marks() -> None:
    """What publishing rewrites can be rewritten."""
    text = script.PAGE.read_text()
    assert text.index(script.BEGIN) < text.index(script.END)


def test_the_full_plan_is_short() -> None:
    """Loads alone take less than four minutes, so that everything does less than five."""
    seconds = sum(
        plan.closed_s + 2 * plan.rounds * (len(plan.clients) * plan.closed_s + len(plan.shares) * plan.open_s)
        for plan in script.FULL
    )
    assert seconds < 240


@pytest.mark.parametrize(("value", "text"), [(1234.5, "1,234"), (99.94, "99.9"), (9.876, "9.88")])
def test_numbers_have_three_digits(value: float, text: str) -> None:
    """Or all that stand before the point."""
    assert script.number(value) == text
