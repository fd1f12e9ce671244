"""Ten times more requests than the engine can serve, for a minute: what still gets done, and how soon the rest hears no.

    python bench/overload.py [--seconds 60] [--factor 10] [--queue 64] [--json FILE] [MODEL]

Starts a daemon whose engine has one thread, compiles the client (overload.c, needs cc) and measures in turns: the peak,
with one connection a slot and then two, each asking again when it has its answer; then `factor` times that peak as an
open loop, where requests come at their time whatever happens to those before. Goodput is answers with 200 a second. Must
hold: goodput at least 95 % of its peak, refusals within 20 ms at the median and all with Retry-After, no other status,
no broken connection, and the daemon's memory as it was after the first tenth. Exit code 1: one of these does not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from served import Served

SOURCE = Path(__file__).with_name("overload.c")
BODY = {"prompt": "The capital of Norway is", "max_tokens": 16, "ignore_eos": True, "temperature": 0}
SLOTS = 32
LEAST_SHARE = 0.95  # of the peak
MOST_REFUSAL_US = 20_000  # at the median
MOST_GROWTH_KIB = 4096
SPARE_CONNECTIONS = 256  # for refusals under way, beyond what the daemon holds


def compiled(folder: Path) -> Path:
    program = folder / "overload"
    subprocess.run(["cc", "-std=gnu11", "-O2", "-o", str(program), str(SOURCE)], check=True)
    return program


def request_file(folder: Path, host: str) -> Path:
    body = json.dumps(BODY).encode()
    lines = ["POST /v1/completions HTTP/1.1", f"Host: {host}", "Content-Type: application/json"]
    head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode()
    path = folder / "request"
    path.write_bytes(head + body)
    return path


class Client:
    """Runs the C program against one daemon."""

    def __init__(self, folder: Path, url: str) -> None:
        place = urlsplit(url)
        assert place.hostname is not None
        self._head = [str(compiled(folder)), place.hostname, str(place.port), str(request_file(folder, place.netloc))]

    def run(self, rate: float, seconds: float, connections: int) -> dict[str, Any]:
        """Rate 0: as fast as answers come."""
        command = [*self._head, f"{rate:.3f}", f"{seconds:g}", str(connections)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return dict(json.loads(done.stdout))


class Memory:
    """Resident KiB of daemon and engine while the block runs, sampled from a thread."""

    def __init__(self, daemon: Served) -> None:
        self.samples: list[int] = []
        self._daemon = daemon
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.25):
            self.samples.append(self._daemon.resident_kib())

    @property
    def growth_kib(self) -> int:
        """From the end of the first tenth to the end."""
        return self.samples[-1] - self.samples[len(self.samples) // 10]


def problems(found: dict[str, Any]) -> list[str]:
    """What does not hold."""
    over = found["overload"]
    told = []
    if found["share"] < LEAST_SHARE:
        told.append(f"goodput is {found['share']:.1%} of its peak")
    if over["refused"]["p50_us"] > MOST_REFUSAL_US:
        told.append(f"refusals take {over['refused']['p50_us'] / 1000:.1f} ms at the median")
    if found["growth_kib"] > MOST_GROWTH_KIB:
        told.append(f"memory grew by {found['growth_kib']} KiB")
    told += [f"{name}: {over[name]}" for name in ("other", "failed", "without_retry_after") if over[name]]
    if not over["refused"]["count"]:
        told.append("nothing was refused: this was no overload")
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--factor", type=float, default=10)
    parser.add_argument("--queue", type=int, default=64)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    arguments = ["--set", "engine.threads=1", "--set", f"limits.queue={given.queue}"]
    arguments += ["--max-batch-size", str(SLOTS)]
    arguments += [given.model] if given.model else []
    with tempfile.TemporaryDirectory() as folder, Served(arguments) as daemon:
        client = Client(Path(folder), daemon.url)
        peak_s = max(2.0, given.seconds / 6)
        client.run(0, peak_s / 2, SLOTS)  # warm-up
        peaks = [client.run(0, peak_s, connections)["goodput"] for connections in (SLOTS, 2 * SLOTS)]
        peak = max(peaks)
        began, before = time.perf_counter(), daemon.cpu_seconds()
        with Memory(daemon) as memory:
            connections = SLOTS + given.queue + SPARE_CONNECTIONS
            over = client.run(given.factor * peak, given.seconds, connections)
        found = {
            "peak": peak,
            "peaks": peaks,
            "overload": over,
            "share": over["goodput"] / peak,
            "growth_kib": memory.growth_kib,
            "daemon_cpu": (daemon.cpu_seconds() - before) / (time.perf_counter() - began),
            "wall_s": time.perf_counter() - began,
        }
    ok, refused = over["ok"], over["refused"]
    print(f"peak      {peak:8.1f} answers a second ({SLOTS} connections {peaks[0]:.1f}, twice as many {peaks[1]:.1f})")
    print(f"overload  {given.factor * peak:8.1f} requests a second for {given.seconds:g} s")
    print(f"goodput   {over['goodput']:8.1f} answers a second, {found['share']:.1%} of the peak")
    print(f"answers   {ok['count']:8d}  p50 {ok['p50_us'] / 1000:.1f} ms  p99 {ok['p99_us'] / 1000:.1f} ms")
    print(
        f"refusals  {refused['count']:8d}  p50 {refused['p50_us'] / 1000:.2f} ms  p99 {refused['p99_us'] / 1000:.2f} ms"
    )
    print(f"unsent    {over['unsent']:8d}  (all {connections} connections were busy)")
    print(f"daemon    {found['daemon_cpu']:8.2f} of a processor, without its engine")
    print(f"memory    {found['growth_kib']:+8d} KiB after the first tenth")
    told = problems(found)
    for line in told:
        print(f"DOES NOT HOLD: {line}")
    if given.json:
        given.json.write_text(json.dumps(found, indent=2))
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
