"""Run colibrid and llama.cpp on the same weights, one after the other in every round, and compare.

    python bench/compare_llama_cpp.py --llama-bin FOLDER --converter 'python hf_to_gguf.py' --work FOLDER [--quick]

The folder of --llama-bin holds llama-bench, llama-quantize and llama-server; the converter is given HF_DIR OUT.gguf f32|f16. Both
sides run with the same number of threads; the same client asks both servers. Measure on an idle machine: with a
compiler beside it, llama.cpp decodes ten times slower. Writes NAME.json and NAME.md into --out. Needs numpy.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
from peers import (
    BenchError,
    Precision,
    Setup,
    Weights,
    colibrid_bench,
    colibrid_server,
    complete,
    gguf_bytes,
    http_load,
    llama_bench,
    llama_server,
    llama_version,
    prepare,
)
from report import MOST_BUSY, EngineResult, Pair, Results, Run, ServerResult, markdown

from colibrid.cli.bench_report import machine_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from colibrid.cli.bench_result import HttpReport

ROOT = Path(__file__).resolve().parents[1]
SMALL, LARGE = "hummingbird-13m", "qwen2-moe-240m"
PROMPT_TOKENS, MAX_TOKENS = 24, 32  # over HTTP
QUESTION = "The capital of Norway is"

Side = Literal["ours", "theirs"]
SIDES: tuple[Side, Side] = ("ours", "theirs")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """One model and precision without HTTP."""

    model: str
    precision: Precision
    rounds: int
    repeat: int  # within a round
    prompts: tuple[int, ...] = (128, 512)
    steps: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """One model and precision over HTTP."""

    model: str
    precision: Precision
    rounds: int
    seconds: float  # of each number of clients
    slots: tuple[int, ...] = (4, 8)
    clients: tuple[int, ...] = (8, 16)


FULL_ENGINE = (
    EnginePlan(model=SMALL, precision="fp32", rounds=5, repeat=3),
    EnginePlan(model=SMALL, precision="fp16", rounds=5, repeat=3),
    EnginePlan(model=LARGE, precision="fp32", rounds=5, repeat=2),
    EnginePlan(model=LARGE, precision="fp16", rounds=5, repeat=2),
    EnginePlan(model=LARGE, precision="int8-g128", rounds=5, repeat=2),
    EnginePlan(model=LARGE, precision="int4-g32", rounds=5, repeat=2),
)
FULL_SERVER = (
    ServerPlan(model=SMALL, precision="fp32", rounds=3, seconds=4),
    ServerPlan(model=SMALL, precision="fp16", rounds=2, seconds=4),
    ServerPlan(model=LARGE, precision="fp32", rounds=1, seconds=8),
)
QUICK_ENGINE = (
    EnginePlan(model=SMALL, precision="fp32", rounds=2, repeat=1),
    EnginePlan(model=SMALL, precision="fp16", rounds=2, repeat=1),
    EnginePlan(model=LARGE, precision="fp32", rounds=1, repeat=1, steps=32),
    EnginePlan(model=LARGE, precision="fp16", rounds=1, repeat=1, steps=32),
    EnginePlan(model=LARGE, precision="int8-g128", rounds=1, repeat=1, steps=32),
    EnginePlan(model=LARGE, precision="int4-g32", rounds=1, repeat=1, steps=32),
)
QUICK_SERVER = (ServerPlan(model=SMALL, precision="fp32", rounds=1, seconds=2),)


def order(index: int) -> Sequence[Side]:
    """Who comes first takes turns."""
    return SIDES if index % 2 == 0 else SIDES[::-1]


def compare_engine(setup: Setup, plan: EnginePlan, say: Callable[[str], None]) -> EngineResult:
    """Prefill and decode at one slot."""
    weights = prepare(setup, plan.model, plan.precision)
    ours, theirs = [], []
    for index in range(plan.rounds):
        say(f"{plan.model} {plan.precision}, engine, round {index + 1} of {plan.rounds}")
        for side in order(index):
            if side == "ours":
                ours.append(colibrid_bench(setup, weights, plan.prompts, plan.steps, plan.repeat))
            else:
                theirs.append(llama_bench(setup, weights, plan.prompts, plan.steps, plan.repeat))
    names = [f"decode {plan.steps}", *(f"prefill {length}" for length in plan.prompts)]
    return EngineResult(
        model=plan.model,
        precision=plan.precision,
        rates={
            name: Pair(ours=[each["rates"][name] for each in ours], theirs=[each[name] for each in theirs])
            for name in names
        },
        floor_share=[each["decode"]["floor_share"] for each in ours],
        layer_us_above_floor=[each["decode"]["layer_us_above_floor"] for each in ours],
        read_bandwidth=[each["decode"]["read_bandwidth"] for each in ours],
        bytes_ratio=ours[0]["weights_bytes"] / gguf_bytes(weights),
    )


def compare_server(setup: Setup, plan: ServerPlan, say: Callable[[str], None]) -> tuple[list[ServerResult], bool]:
    """Requests over HTTP, and whether both servers give the same greedy text."""
    weights = prepare(setup, plan.model, plan.precision)
    reports: dict[tuple[int, int], dict[Side, list[HttpReport]]] = {}
    texts: dict[Side, str] = {}
    for index in range(plan.rounds):
        for slots in plan.slots:
            say(f"{plan.model} {plan.precision}, server with {slots} slots, round {index + 1} of {plan.rounds}")
            for side in order(index):
                with serve(setup, weights, side, slots, max(plan.clients)) as url:
                    texts[side] = complete(url, QUESTION, 8)
                    for clients in plan.clients:
                        report = http_load(
                            url, clients=clients, seconds=plan.seconds, prompt_tokens=PROMPT_TOKENS,
                            max_tokens=MAX_TOKENS, seed=2 * index,
                        )  # fmt: skip
                        sides = reports.setdefault((slots, clients), {"ours": [], "theirs": []})
                        sides[side].append(report)
    rows = [server_result(plan, slots, clients, sides) for (slots, clients), sides in reports.items()]
    return rows, texts["ours"] == texts["theirs"]


def serve(setup: Setup, weights: Weights, side: Side, slots: int, clients: int) -> AbstractContextManager[str]:
    """A running server of one side."""
    if side == "ours":
        return colibrid_server(setup, weights, slots)
    return llama_server(setup, weights, slots, clients)


def server_result(plan: ServerPlan, slots: int, clients: int, reports: dict[Side, list[HttpReport]]) -> ServerResult:
    """One row out of both sides' reports."""

    def pair(value: Callable[[HttpReport], float]) -> Pair:
        return Pair(ours=[value(each) for each in reports["ours"]], theirs=[value(each) for each in reports["theirs"]])

    def at(share: str) -> Callable[[HttpReport], float]:
        return lambda report: float(getattr(report.e2e_ms, share))

    return ServerResult(
        model=plan.model,
        precision=plan.precision,
        slots=slots,
        clients=clients,
        requests_per_s=pair(lambda report: report.requests_per_s),
        p50_ms=pair(at("p50")),
        p99_ms=pair(at("p99")),
    )


def begin(setup: Setup, mode: str, machine: str, say: Callable[[str], None]) -> Run:
    """Looks at the machine, and warns where it is busy."""
    busy = busy_share()
    if busy > MOST_BUSY:
        say(f"the machine is {busy:.0%} busy with other work: numbers of this run will say nothing")
    return Run(
        date=dt.datetime.now(tz=dt.UTC).date().isoformat(),
        commit=commit(),
        machine=machine,
        mode=mode,
        threads=setup.threads,
        busy=busy,
        peer=llama_version(setup),
    )


def compare(
    setup: Setup, mode: str, machine: str, engine: Sequence[EnginePlan], server: Sequence[ServerPlan],
    say: Callable[[str], None],
) -> Results:  # fmt: skip
    """All plans, one after the other."""
    run = begin(setup, mode, machine, say)
    engines = [compare_engine(setup, plan, say) for plan in engine]
    servers: list[ServerResult] = []
    same_text: dict[str, bool] = {}
    for plan in server:
        rows, same = compare_server(setup, plan, say)
        servers += rows
        same_text[f"{plan.model} {plan.precision}"] = same
    return Results(
        **msgspec.structs.asdict(run),
        prompt_tokens=PROMPT_TOKENS,
        max_tokens=MAX_TOKENS,
        engine=engines,
        server=servers,
        same_text=same_text,
    )


def busy_share(seconds: float = 1.0) -> float:
    """The share of all CPUs' time that is used while this process sleeps."""

    def ticks() -> tuple[int, int]:
        fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return sum(fields), fields[3] + fields[4]  # idle, and idle while a disk works

    total, idle = ticks()
    time.sleep(seconds)
    later, idle_later = ticks()
    return 1 - (idle_later - idle) / max(1, later - total)


def commit() -> str:
    """The short id of the source tree, with `+` where files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", ROOT, *arguments],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write(results: Results, folder: Path, name: str) -> Path:
    """NAME.json and NAME.md. Returns the first."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    title = f"# {results.machine}: beside llama.cpp, {results.date}"
    (folder / f"{name}.md").write_text("\n".join([title, "", *markdown(results), "", f"Peer: {results.peer}."]) + "\n")
    return path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What every script that measures beside llama.cpp needs to know."""
    parser.add_argument(
        "--llama-bin", type=Path, required=True, help="folder of llama-bench, llama-quantize and llama-server"
    )
    parser.add_argument("--converter", required=True, help="command that is given HF_DIR OUT.gguf f32|f16")
    parser.add_argument("--work", type=Path, required=True, help="folder for weights; kept, 4 GB")
    parser.add_argument("--out", type=Path, help="folder of the results; default: that of --work")
    parser.add_argument("--threads", type=int, default=2, help="of both sides (default 2)")
    parser.add_argument("--machine", default=machine_name(len(os.sched_getaffinity(0))), help="its name in the results")
    parser.add_argument("--quick", action="store_true", help="a short run that shows whether everything works")


def setup_of(arguments: argparse.Namespace) -> Setup:
    return Setup(
        llama_bin=arguments.llama_bin.resolve(),
        converter=arguments.converter,
        work=arguments.work.resolve(),
        threads=arguments.threads,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare colibrid with llama.cpp on the same weights.")
    add_arguments(parser)
    arguments = parser.parse_args()
    engine, server = (QUICK_ENGINE, QUICK_SERVER) if arguments.quick else (FULL_ENGINE, FULL_SERVER)
    mode = "quick" if arguments.quick else "full"
    say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    try:
        results = compare(setup_of(arguments), mode, arguments.machine, engine, server, say)
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    print(write(results, arguments.out or arguments.work, f"{results.date}-llama-cpp"))
    print("\n".join(markdown(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
