"""A daemon looked at from outside, for tests and scripts: what it has logged so far, and memory that it alone holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def log_events(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a log, decoded.

    The last line counts once its end is there: a reader may find half of what one write adds.
    """
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in whole.split(b"\n") if line.startswith(b"{")]


def private_kib(pid: int) -> int:
    """Memory of a process alone: stacks, heaps, pages that it has written and that belong to no file.

    Pages of files and of the channel are left out: whether they count as private depends on who else has touched them.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
