"""Thousands of mixed requests over HTTP against the bundled model, and what must not change meanwhile.

    python bench/soak.py --device cuda                     20,000 requests, 48 connections, on GPU 0
    python bench/soak.py --device cpu --requests 100000    the long form; --plot docs/soak.png draws it
    python bench/soak.py --device cpu --requests 500       a short one

Starts a daemon of its own. Requests are completions, chats and embeddings, of text and of token ids, streamed and not,
of many lengths, greedy and sampled with seeds, some with several choices, log-probabilities, stop strings or penalties,
some wrong; a tenth of the streams is cut off by the client. Each of 400 different bodies is sent many times, in ever
other company: its answer must always be the same to the last bit.

The requests come in ten parts. After each, when nothing runs, the memory that only the daemon and only its engine have
is read. Exits 1 unless: every answer is whole and as it was before; the engine made no allocation after ready and its
books balance; the KV pool has given out what the daemon holds, and the device's free memory is what it was when the
daemon was ready; after the first part the engine has grown by at most 64 KiB and the daemon by at most 1 MiB, as the
least after one of the last three parts tells; the daemon ends with 0 and without an error logged.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from served import Served, ServedError
from soak_load import Seen, merge, touch, work

from colibrid.report.percentiles import spread

PARTS = 10
ENGINE_KIB = 64
DAEMON_KIB = 1024
LAST = 3  # of the parts
SHOWN = 5
SETTLE_S = 1.5  # the daemon collects garbage when it has nothing to do
# Little KV memory: prompts that are kept take all of it at once, and from then on push each other out.
KV_TOKENS = 16384


class Sample(NamedTuple):
    """What was held after so many requests, with nothing running."""

    requests: int
    seconds: float
    daemon_kib: int
    engine_kib: int
    descriptors: int


def sample(daemon: Served, requests: int, began: float) -> Sample:
    """Look when it has settled."""
    seconds = time.perf_counter() - began
    time.sleep(SETTLE_S)
    daemon_kib, engine_kib = daemon.private_kib()
    return Sample(requests, seconds, daemon_kib, engine_kib, daemon.descriptors())


def drive(daemon: Served, options: argparse.Namespace, pool: Any) -> tuple[Seen, list[Sample]]:
    """All parts, one after another."""
    began, samples, seen = time.perf_counter(), [], Seen()
    touch(daemon.url, KV_TOKENS)
    samples.append(sample(daemon, 0, began))
    for part in range(PARTS):
        numbers = range(part * options.requests // PARTS, (part + 1) * options.requests // PARTS)
        left = options.seconds - (time.perf_counter() - began)
        if left <= 0 or not numbers:
            continue
        # The first part comes over twice as many: what a burst takes of the heap, which grows by a MiB at a time, is taken.
        connections = max(1, options.connections * (1 if part else 2) // options.processes)
        shares = [numbers[i :: options.processes] for i in range(options.processes)]
        tasks = [(daemon.url, connections, share, left) for share in shares]
        seen = merge([seen, *pool.map(work, tasks, chunksize=1)])
        samples.append(sample(daemon, seen.sent, began))
    return seen, samples


def growth(samples: list[Sample]) -> tuple[int, int]:
    """KiB by which daemon and engine have grown since the first part was done; 0 where there was only one.

    The least after one of the last parts counts: what leaks stays, and what one part took for a moment does not count.
    """
    if len(samples) < 3:
        return 0, 0
    last = samples[max(2, len(samples) - LAST) :]
    daemon, engine = min(one.daemon_kib for one in last), min(one.engine_kib for one in last)
    return daemon - samples[1].daemon_kib, engine - samples[1].engine_kib


def judge(result: dict[str, Any], seen: Seen) -> list[str]:
    """What is wrong."""
    problems = list(seen.problems)
    if result["device_drift_bytes"]:
        problems.append(f"the device has {result['device_drift_bytes']} bytes less than when the daemon was ready")
    if result["engine_totals"]["allocations_after_open"]:
        problems.append(f"{result['engine_totals']['allocations_after_open']} allocations after ready")
    if result["pool_drift_bytes"]:
        problems.append(f"the KV pool has given out {result['pool_drift_bytes']} bytes that nobody holds")
    if seen.answered + seen.cut != seen.sent:
        problems.append(f"{seen.answered} answered and {seen.cut} cut of {seen.sent}")
    for name, grown, most in (
        ("daemon", result["daemon_growth_kib"], result["daemon_limit_kib"]),
        ("engine", result["engine_growth_kib"], result["engine_limit_kib"]),
    ):
        if most is not None and grown > most:
            problems.append(f"the {name} has grown by {grown} KiB after the first part; at most {most}")
    return problems


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Serve, load, stop; what was seen."""
    own = ["--max-batch-size", "32", "--set", f"memory.kv_tokens={KV_TOKENS}"]
    with (
        Served([*own, *options.serve], device=options.device) as daemon,
        multiprocessing.get_context("spawn").Pool(options.processes) as pool,
    ):
        resident, busy = daemon.resident_kib(), daemon.cpu_seconds()
        seen, samples = drive(daemon, options, pool)
        drift = daemon.device_drift()
        grown, busy = daemon.resident_kib() - resident, daemon.cpu_seconds() - busy
    elapsed = samples[-1].seconds
    latency = spread([seconds * 1e3 for seconds in seen.seconds])
    daemon_growth, engine_growth = growth(samples)
    result = {
        "device": options.device,
        "asked": options.requests,
        "requests": seen.sent,
        "connections": options.connections,
        "answered": seen.answered,
        "cut_off": seen.cut,
        "different_answers": len(seen.exact),
        "seconds": elapsed,
        "requests_per_s": seen.sent / elapsed,
        "tokens": seen.tokens,
        "latency_ms": None if latency is None else msgspec.to_builtins(latency),
        "device_drift_bytes": drift,
        "pool_drift_bytes": daemon.totals["kv_bytes_used"] - daemon.drained["kv_bytes_held"],
        "resident_growth_kib": grown,
        "daemon_growth_kib": daemon_growth,
        "daemon_limit_kib": DAEMON_KIB * options.memory_slack if options.memory_slack else None,
        "engine_growth_kib": engine_growth,
        "engine_limit_kib": ENGINE_KIB * options.memory_slack
        if options.memory_slack and options.device == "cpu"
        else None,
        "samples": [one._asdict() for one in samples],
        "daemon_cpu_s": busy,
        "engine_totals": daemon.totals,
    }
    problems = judge(result, seen)
    return result | {"errors": len(problems), "problems": problems[:SHOWN]}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--connections", type=int, default=48)
    parser.add_argument("--processes", type=int, default=2, help="that send; their connections are shared out")
    parser.add_argument("--seconds", type=float, default=7200.0, help="no request begins later")
    parser.add_argument(
        "--memory-slack", type=float, default=1.0, help="times the memory may grow by more than its limits; 0: no limit"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="the result as one object")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="memory over requests; needs matplotlib")
    parser.add_argument("serve", nargs="*", help="behind --: more arguments of colibrid serve")
    options = parser.parse_args(arguments)
    try:
        result = run(options)
    except ServedError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot is not None:
        from soak_plot import plot  # noqa: PLC0415  # matplotlib is needed for nothing else

        plot(result, options.plot)
    print(
        f"soak {result['device']}: {result['answered']} answered and {result['cut_off']} cut off of {result['requests']} "
        f"in {result['seconds']:.1f} s ({result['requests_per_s']:.0f}/s), {result['errors']} errors; device memory "
        f"{-result['device_drift_bytes']:+d} B, pool {result['pool_drift_bytes']:+d} B, "
        f"{result['engine_totals']['allocations_after_open']} allocations after ready; after the first part the daemon "
        f"has grown by {result['daemon_growth_kib']:+d} KiB and the engine by {result['engine_growth_kib']:+d} KiB"
    )
    for problem in result["problems"]:
        print(f"  {problem}")
    return 1 if result["errors"] else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
