"""Every row of the faults table, injected into real daemons, with exact figures: run it on an idle machine.

    python bench/faults.py --out bench/results/DATE-faults        all rows, some four minutes
    python bench/faults.py --quick                                each row small, about a minute and a half
    python bench/faults.py engine_killed clock_jumps              these rows only

Exits 1 if a row does not hold or a figure is above its limit. Needs tests/in_process.py on the path and a C compiler.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import fault_clients
import fault_host
import fault_rows
import msgspec
from fault_kit import FaultError, Figure

import colibrid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Row(NamedTuple):
    """One fault, and how often it is injected."""

    run: Callable[[Path, int], Iterator[Figure]]
    full: int
    quick: int


ROWS = {
    row.run.__name__: row
    for row in (
        Row(fault_rows.engine_killed, 100, 4),
        Row(fault_rows.one_of_two_killed, 20, 2),
        Row(fault_rows.engine_stalled, 5, 1),
        Row(fault_rows.loop_blocked, 1, 1),
        Row(fault_rows.crash_loop, 1, 1),
        Row(fault_rows.clients_leave, 10_000, 300),
        Row(fault_clients.slow_readers, 200, 24),
        Row(fault_rows.terminated, 1, 1),
        Row(fault_clients.reloaded, 1_000, 12),
        Row(fault_rows.damaged_weights, 2_000, 60),
        Row(fault_host.disk_full, 1, 1),
        Row(fault_host.read_only, 1, 1),
        Row(fault_host.blocked_stdout, 1, 1),
        Row(fault_host.few_descriptors, 1, 1),
        Row(fault_host.clock_jumps, 20, 4),
    )
}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one row gave."""

    row: str
    fault: str  # what is injected, and what must hold
    seconds: float
    figures: list[Figure]
    error: str | None = None

    def holds(self, slack: float) -> bool:
        """Everything that must be true is, and every figure is within its limit."""
        return self.error is None and all(figure.holds(slack) for figure in self.figures)


def run_row(name: str, *, quick: bool) -> Outcome:
    """One row, in a folder of its own."""
    row = ROWS[name]
    figures: list[Figure] = []
    error = None
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            figures.extend(row.run(Path(folder), row.quick if quick else row.full))  # those before an error, too
        except FaultError as broken:
            error = str(broken)
    said = (row.run.__doc__ or "").split("\n", maxsplit=1)[0]
    return Outcome(row=name, fault=said, seconds=round(time.monotonic() - began, 1), figures=figures, error=error)


def markdown(outcomes: list[Outcome], head: str) -> str:
    """The outcomes as a page."""
    lines = [f"# Faults: {head}", "", "| row | figure | measured | limit |", "|---|---|---|---|"]
    for outcome in outcomes:
        for figure in outcome.figures:
            limit = "" if figure.limit is None else f"{figure.limit:g} {figure.unit}".strip()
            lines.append(
                f"| {outcome.row} | {figure.name} | {figure.value:g} {figure.unit} | {limit} |".replace("  ", " ")
            )
        if outcome.error is not None:
            lines.append(f"| {outcome.row} | **does not hold** | {outcome.error.splitlines()[0]} | |")
    lines += ["", *(f"- `{outcome.row}` ({outcome.seconds:g} s): {outcome.fault}" for outcome in outcomes)]
    return "\n".join(lines) + "\n"


def _head() -> str:
    cpus = len(os.sched_getaffinity(0))
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    return f"colibrid {colibrid.__version__}, {today}, {cpus} CPUs ({platform.machine()}), the bundled model"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("rows", nargs="*", choices=[[], *ROWS], metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--quick", action="store_true", help="each fault a few times only")
    parser.add_argument(
        "--slack", type=float, default=1.0, help="times may be so many times their limit (busy machine)"
    )
    parser.add_argument("--out", type=Path, metavar="PATH", help="writes PATH.json and PATH.md")
    options = parser.parse_args(arguments)
    outcomes = []
    for name in options.rows or ROWS:
        outcome = run_row(name, quick=options.quick)
        outcomes.append(outcome)
        print(
            f"{name} {'holds' if outcome.holds(options.slack) else 'DOES NOT HOLD'} ({outcome.seconds:g} s)", flush=True
        )
        for figure in outcome.figures:
            limit = "" if figure.limit is None else f" (at most {figure.limit:g})"
            print(f"  {figure.name}: {figure.value:g} {figure.unit}{limit}", flush=True)
        if outcome.error is not None:
            print(f"  {outcome.error}", flush=True)
    if options.out is not None:
        options.out.with_suffix(".json").write_bytes(
            msgspec.json.format(msgspec.json.encode(outcomes), indent=1) + b"\n"
        )
        options.out.with_suffix(".md").write_text(markdown(outcomes, _head()))
    return 0 if all(outcome.holds(options.slack) for outcome in outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
