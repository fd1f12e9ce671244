"""Time of a decode step of a pack whose experts are in several formats, beside packs of one format each.

    python bench/mixed_packs.py --work FOLDER [--rounds 5] [--threads 2]

The 240 M shape; in every layer a third of the experts in fp16, in int8 and in int4 each, dense matrices in int8. A
layer that mixes formats should take what its parts take: the mean of the pure packs, weighted by experts. All packs are
measured in every round, one after the other; the ratio is the median of the rounds'. Measure on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from peers import COLIBRID
from random_checkpoint import SHAPES, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

MODEL = "qwen2-moe-240m"
EXPERTS: int = SHAPES[MODEL]["num_experts"]
# First and last expert of each format in the mixed pack.
THIRDS: Mapping[str, tuple[int, int]] = {"fp16": (0, 4), "int8": (5, 9), "int4": (10, EXPERTS - 1)}
MIXED = "mixed"
SLOTS = (1, 8)


@dataclass(frozen=True, slots=True)
class Round:
    """Milliseconds of a decode step, by pack and number of slots."""

    step_ms: dict[tuple[str, int], float]

    def ratio(self, slots: int) -> float:
        """Of the mixed pack's step and the mean of the pure ones."""
        expected = sum(
            (last - first + 1) / EXPERTS * self.step_ms[name, slots] for name, (first, last) in THIRDS.items()
        )
        return self.step_ms[MIXED, slots] / expected


def rules(name: str) -> str:
    """--precision of a pack."""
    if name != MIXED:
        return f"experts={name}, dense=int8"
    return ", ".join([*(f"expert *:{first}-{last}={kind}" for kind, (first, last) in THIRDS.items()), "dense=int8"])


def prepare(work: Path) -> dict[str, Path]:
    """The packs, made where they are not there."""
    work.mkdir(parents=True, exist_ok=True)
    source = work / MODEL
    if not (source / "config.json").exists():
        write_checkpoint(source, MODEL)
    packs = {name: work / f"{name}.colibri" for name in (*THIRDS, MIXED)}
    for name, pack in packs.items():
        if not pack.exists():
            command = [
                *COLIBRID,
                "convert",
                "-q",
                "--dtype",
                "fp16",
                "--precision",
                rules(name),
                str(source),
                str(pack),
            ]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return packs


def measure(packs: Mapping[str, Path], threads: int) -> Round:
    """Every pack once."""
    found = {}
    for name, pack in packs.items():
        command = [*COLIBRID, "bench", "engine", str(pack), "--json", "--slots", ",".join(map(str, SLOTS)),
                   "--prompt-tokens", "16", "--repeat", "3", "--set", f"engine.threads={threads}",
                   "--set", "engine.device=cpu"]  # fmt: skip
        document = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        found |= {(name, row["slots"]): row["step_ms"] for row in document["rows"]}
    return Round(found)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare a pack of several formats with packs of one.")
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoint and packs; kept, 2 GB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    packs = prepare(arguments.work)
    rounds = [measure(packs, arguments.threads) for _ in range(arguments.rounds)]
    print("| slots | fp16 ms | int8 ms | int4 ms | mixed ms | mixed / mean of its parts |\n|---|---|---|---|---|---|")
    for slots in SLOTS:
        times = [statistics.median(each.step_ms[name, slots] for each in rounds) for name in packs]
        ratio = statistics.median(each.ratio(slots) for each in rounds)
        print(f"| {slots} | {' | '.join(f'{time:.2f}' for time in times)} | **{ratio:.3f}** |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
