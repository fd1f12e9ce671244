"""colibrid.cli.progress."""

from __future__ import annotations

import io

from colibrid.cli.progress import Progress


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_output_is_a_few_lines() -> None:
    """Without a terminal there is at most a line every ten percent, and the last one says 100."""
    file = io.StringIO()
    progress = Progress("converting", file)
    for done in range(1001):
        progress(done, 1000, "x")
    progress.close()
    lines = file.getvalue().splitlines()
    assert len(lines) == 11
    assert lines[-1] == "converting: 100% of 1000 B"


def test_a_terminal_shows_one_line() -> None:
    """On a terminal the bar is redrawn in place and ended by close."""
    file = _Terminal()
    progress = Progress("converting", file)
    progress(1, 2, "dense.bin")
    progress(2, 2, "expert_0_0.bin")
    progress.close()
    assert file.getvalue().count("\n") == 1
    assert "100% 2 B of 2 B expert_0_0.bin" in file.getvalue()


def test_an_empty_job_is_done() -> None:
    """Nothing to do is 100 percent."""
    file = io.StringIO()
    Progress("converting", file)(0, 0, "")
    assert "100%" in file.getvalue()
