"""The whole measurement of a machine, in under twelve minutes: the engine's sweep, llama.cpp beside it, wrk.

    python bench/measure.py --llama-bin FOLDER --converter 'python hf_to_gguf.py' --work FOLDER [--publish] [--quick]

Options are those of compare_llama_cpp.py. --publish writes bench/results/DATE-llama-cpp.{json,md}, docs/performance.png
and the measured part of docs/PERFORMANCE.md, all from this run. Needs an idle machine, wrk, numpy and matplotlib.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec
from compare_llama_cpp import (
    FULL_ENGINE,
    FULL_SERVER,
    LARGE,
    QUICK_ENGINE,
    QUICK_SERVER,
    ROOT,
    SMALL,
    add_arguments,
    compare,
    setup_of,
    write,
)
from peers import BenchError, Setup, colibrid_sweep, prepare
from report import Results, WrkResult, between, markdown
from wrk.run import press, verdict

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PAGE = ROOT / "docs" / "PERFORMANCE.md"
PLOT = ROOT / "docs" / "performance.png"
BEGIN, END = "<!-- measured by bench/measure.py: begin -->", "<!-- measured by bench/measure.py: end -->"


def sweep(setup: Setup, say: Callable[[str], None], *, quick: bool) -> list[dict[str, Any]]:
    """The engine alone over slots and context."""
    documents = []
    for model, slots, prompts in ((SMALL, "1,8,32", "128,1024"), (LARGE, "1,8,32", "128")):
        say(f"{model} fp16, slots and context")
        weights = prepare(setup, model, "fp16")
        documents.append(colibrid_sweep(setup, weights, "1,4" if quick else slots, "16" if quick else prompts))
    return documents


def publish(results: Results, page: Path, picture: Path) -> None:
    """The picture, and the tables between the two marks of the page."""
    from plot import plot  # noqa: PLC0415  # matplotlib is needed for nothing else

    plot(results, picture)
    lines = [
        f"![Ratios beside llama.cpp]({picture.name})", "", *markdown(results), "",
        f"All rounds: [bench/results](../bench/results/{name_of(results)}.json).",
    ]  # fmt: skip
    try:
        page.write_text(between(page.read_text(), BEGIN, END, lines))
    except ValueError as error:
        raise BenchError(f"{page}: {error}") from None


def name_of(results: Results) -> str:
    """Of its files."""
    return f"{results.date}-llama-cpp"


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure everything on this machine.")
    add_arguments(parser)
    parser.add_argument("--publish", action="store_true", help="put the results into the repository")
    parser.add_argument("--wrk", default="wrk", help="where wrk is")
    arguments = parser.parse_args()
    wrk = shutil.which(arguments.wrk)
    if wrk is None:
        print(f"{arguments.wrk} is not installed (apt install wrk), or give --wrk PATH", file=sys.stderr)
        return 1
    if arguments.publish and find_spec("matplotlib") is None:
        print("--publish needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 1
    setup, quick, began = setup_of(arguments), arguments.quick, time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:5.0f} s  {text}", file=sys.stderr, flush=True)

    try:
        engine, server = (QUICK_ENGINE, QUICK_SERVER) if quick else (FULL_ENGINE, FULL_SERVER)
        results = compare(setup, "quick" if quick else "full", arguments.machine, engine, server, say)
        folder = ROOT / "bench" / "results" if arguments.publish else arguments.out or arguments.work
        write(results, folder, name_of(results))  # the long part is safe now
        documents = sweep(setup, say, quick=quick)
        say("wrk")
        counts = press(wrk, 50 if quick else 400, 5 if quick else 60)
        results = msgspec.structs.replace(results, sweep=documents, wrk=msgspec.convert(counts, WrkResult))
        print(write(results, folder, name_of(results)))
        if arguments.publish:
            publish(results, PAGE, PLOT)
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(markdown(results)))
    print(json.dumps({"same_text": results.same_text}))
    say("done")
    for problem in verdict(counts):
        print(f"wrk: {problem}", file=sys.stderr)
    return 1 if verdict(counts) else 0


if __name__ == "__main__":
    sys.exit(main())
