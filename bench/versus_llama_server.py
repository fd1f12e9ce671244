"""The daemon and llama-server on the same weights, in turns: closed loops and Poisson arrivals, with confidence intervals.

    python bench/versus_llama_server.py --llama-bin FOLDER --converter 'python hf_to_gguf.py' --work FOLDER [--publish]

Options are those of compare_llama_cpp.py. Under five minutes on two cores, of which all are the servers' and the client's;
--quick shows in one whether everything works. --publish writes bench/results/DATE-versus-llama-server.{md,json} and its
part of docs/PERFORMANCE.md. Measure on an idle machine. Needs numpy.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from compare_llama_cpp import (
    LARGE,
    QUESTION,
    ROOT,
    SMALL,
    Side,
    add_arguments,
    begin,
    order,
    serve,
    setup_of,
)
from peers import BenchError, Precision, Setup, complete, http_report, prepare
from report import MOST_BUSY, Run, between

from colibrid.cli.bench_intervals import Comparison, Figure, compare
from colibrid.cli.bench_report import arrival_words
from colibrid.cli.bench_result import HttpReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

PAGE = ROOT / "docs" / "PERFORMANCE.md"
BEGIN, END = (f"<!-- measured by bench/versus_llama_server.py: {mark} -->" for mark in ("begin", "end"))
SLOTS = 8
MOST_CLIENTS = 16
LENGTHS = ("--prompt-tokens", "lognormal:64,0.6,256", "--max-tokens", "lognormal:32,0.6,128")
COLUMNS = ("tokens/s out", "TTFT p50", "TTFT p99", "TPOT p50", "ITL p99", "e2e p99", "goodput")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One model: closed loops of `clients`, and arrivals at shares of what llama-server can take."""

    model: str
    precision: Precision
    rounds: int
    clients: tuple[int, ...]
    shares: tuple[float, ...]
    closed_s: float
    open_s: float
    slo: str


FULL = (
    Plan(
        model=SMALL, precision="fp16", rounds=3, clients=(1, 8, 16), shares=(0.5, 0.8), closed_s=3.0, open_s=6.0,
        slo="ttft_ms<50, itl_ms<20",
    ),
    Plan(
        model=LARGE, precision="fp16", rounds=2, clients=(8,), shares=(0.5,), closed_s=7.0, open_s=10.0,
        slo="ttft_ms<500, itl_ms<250",
    ),
)  # fmt: skip
QUICK = (
    Plan(
        model=SMALL, precision="fp16", rounds=2, clients=(1, 8), shares=(0.5,), closed_s=2.0, open_s=3.0,
        slo="ttft_ms<50, itl_ms<20",
    ),
)  # fmt: skip


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One load on both servers."""

    model: str
    precision: str
    load: str
    ours: list[HttpReport]  # a round each, without its requests
    theirs: list[HttpReport]
    found: Comparison  # ours against theirs


class Results(Run, frozen=True, kw_only=True):
    """Everything of one run."""

    slots: int
    seconds: float  # that the run took
    same_text: dict[str, bool]  # model and precision -> both servers gave the same greedy text
    rows: list[Row]


class Loads:
    """The loads of one plan, the same for both sides; reports are kept by load and side."""

    def __init__(self, plan: Plan) -> None:
        self.reports: dict[tuple[str, ...], dict[Side, list[HttpReport]]] = {}
        self._plan = plan
        self._rates: list[float] = []

    def calibrate(self, url: str) -> None:
        """What llama-server can take of these lengths, from which the rates of arrivals follow for both."""
        clients = str(max(self._plan.clients))
        peak = http_report(url, *LENGTHS, "--clients", clients, "--seconds", f"{self._plan.closed_s:g}").requests_per_s
        self._rates = [float(f"{share * peak:.2g}") for share in self._plan.shares]

    def run(self, url: str, side: Side, index: int) -> None:
        """Everything once. BenchError: a request failed or was refused."""
        for options in self._options():
            report = http_report(url, *LENGTHS, *options, "--slo", self._plan.slo, "--seed", str(2 * index))
            if report.failed or report.refused or not report.form.ignore_eos or report.tokens_from != "usage":
                raise BenchError(
                    f"{url}: {report.failed} requests failed, {report.refused} were refused: not the load that was meant "
                    f"({'; '.join(report.problems)})"
                )
            self.reports.setdefault(options, {"ours": [], "theirs": []})[side].append(report)

    def _options(self) -> Iterator[tuple[str, ...]]:
        plan = self._plan
        for clients in plan.clients:
            yield "--clients", str(clients), "--seconds", f"{plan.closed_s:g}"
        for rate in self._rates:
            yield "--rate", f"{rate:g}", "--seconds", f"{plan.open_s:g}"


def run_plan(setup: Setup, plan: Plan, say: Callable[[str], None]) -> tuple[list[Row], bool]:
    """All loads in every round, and whether both servers give the same greedy text."""
    weights = prepare(setup, plan.model, plan.precision)
    loads = Loads(plan)
    say(f"{plan.model} {plan.precision}: what llama-server can take")
    with serve(setup, weights, "theirs", SLOTS, MOST_CLIENTS) as url:
        loads.calibrate(url)
    texts: dict[Side, str] = {}
    for index in range(plan.rounds):
        for side in order(index):
            say(f"{plan.model} {plan.precision}, round {index + 1} of {plan.rounds}, {side}")
            with serve(setup, weights, side, SLOTS, MOST_CLIENTS) as url:
                texts[side] = complete(url, QUESTION, 8)
                loads.run(url, side, index)
    return [make_row(plan, sides) for sides in loads.reports.values()], texts["ours"] == texts["theirs"]


def make_row(plan: Plan, sides: dict[Side, list[HttpReport]]) -> Row:
    """Requests go into the comparison, and are not kept."""
    kept = {
        side: [msgspec.structs.replace(report, samples=[]) for report in reports] for side, reports in sides.items()
    }
    return Row(
        model=plan.model,
        precision=plan.precision,
        load=arrival_words(sides["ours"][0].load),
        ours=kept["ours"],
        theirs=kept["theirs"],
        found=compare(sides["theirs"], sides["ours"]),
    )


def measure(setup: Setup, mode: str, machine: str, plans: Sequence[Plan], say: Callable[[str], None]) -> Results:
    """All plans, one after the other."""
    began, run = time.monotonic(), begin(setup, mode, machine, say)
    rows: list[Row] = []
    same_text: dict[str, bool] = {}
    for plan in plans:
        found, same = run_plan(setup, plan, say)
        rows += found
        same_text[f"{plan.model} {plan.precision}"] = same
    return Results(
        **msgspec.structs.asdict(run),
        slots=SLOTS,
        seconds=time.monotonic() - began,
        same_text=same_text,
        rows=rows,
    )


def markdown(results: Results) -> Iterator[str]:
    """What was measured, and the tables."""
    yield (
        f"{results.machine}; commit {results.commit}, {results.date}, {results.mode} run of {results.seconds:.0f} s; "
        f"{results.threads} threads and {results.slots} slots on both sides. Every cell: colibrid / llama-server, "
        "their ratio, and the interval that holds it with 95 % confidence."
    )
    if results.busy > MOST_BUSY:
        yield ""
        yield f"**From a loaded machine ({results.busy:.0%} busy with other work): these numbers say nothing.**"
    for name in dict.fromkeys(f"{row.model} {row.precision}" for row in results.rows):
        rows = [row for row in results.rows if f"{row.model} {row.precision}" == name]
        text = "the same" if results.same_text[name] else "NOT the same"
        lengths = rows[0].ours[0].load
        yield ""
        yield (
            f"{name} (both servers give {text} greedy text); prompts {lengths.prompt_tokens} tokens, out "
            f"{lengths.max_tokens}; goodput within {lengths.slo}:"
        )
        yield ""
        yield from table(rows)


def table(rows: Sequence[Row]) -> Iterator[str]:
    """A line a load."""
    units = {figure.name: figure.unit for figure in rows[0].found.figures}
    heads = [f"{name}, {units[name]}" if units.get(name) else name for name in COLUMNS]
    yield f"| load | rounds | requests | {' | '.join(heads)} |"
    yield "|---" * (3 + len(COLUMNS)) + "|"
    for row in rows:
        figures = {figure.name: figure for figure in row.found.figures}
        cells = [cell(figures[name]) if name in figures else "" for name in COLUMNS]
        theirs, ours = row.found.requests
        load = row.load.removesuffix(", times count from arrival")
        yield f"| {load} | {len(row.ours)} | {ours:,} / {theirs:,} | {' | '.join(cells)} |"


def cell(figure: Figure) -> str:
    """Ours, theirs, ratio and interval."""
    both = f"{number(figure.b)} / {number(figure.a)}"
    if figure.ratio is None or figure.low is None or figure.high is None:
        return both
    return f"{both}: **{figure.ratio:.2f}** ({figure.low:.2f} to {figure.high:.2f})"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def page(results: Results) -> str:
    """The file in bench/results."""
    how = (
        "Both servers run alone, in turns at who is first, a fresh process a round; the client is `colibrid bench http` for "
        "both, with the same seeds, so that both get the same prompts and arrivals. llama-server has an HTTP thread for each "
        "client and no cache of prompts (`cache_prompt: false`, `--cache-ram 0`). Rates of arrivals are shares of what it takes in "
        "a closed loop, measured first. Intervals are of `colibrid bench compare`."
    )
    head = f"# {results.machine}: the daemon and llama-server, {results.date}"
    return "\n".join([head, "", *markdown(results), "", how, "", f"Peer: {results.peer}."]) + "\n"


def write(results: Results, folder: Path) -> Path:
    """NAME.json and NAME.md. Returns the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{results.date}-versus-llama-server.md"
    path.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    path.write_text(page(results))
    return path


def publish(results: Results, document: Path, link: str) -> None:
    """The tables between the two marks of the document."""
    lines = [*markdown(results), "", f"Everything about this run: [its page]({link})."]
    try:
        document.write_text(between(document.read_text(), BEGIN, END, lines))
    except ValueError as error:
        raise BenchError(f"{document}: {error}") from None


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the daemon with llama-server on the same weights.")
    add_arguments(parser)
    parser.add_argument("--publish", action="store_true", help="put the results into the repository")
    arguments = parser.parse_args()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:5.0f} s  {text}", file=sys.stderr, flush=True)

    try:
        plans, mode = (QUICK, "quick") if arguments.quick else (FULL, "full")
        results = measure(setup_of(arguments), mode, arguments.machine, plans, say)
        folder = ROOT / "bench" / "results" if arguments.publish else arguments.out or arguments.work
        path = write(results, folder)
        if arguments.publish:
            publish(results, PAGE, f"../bench/results/{path.name}")
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    print(path)
    print("\n".join(markdown(results)))
    say("done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
