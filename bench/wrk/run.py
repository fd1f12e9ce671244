"""Let wrk press a daemon of its own with random prompts, and watch that nothing fails and memory stays flat.

    python bench/wrk/run.py [--seconds 60] [--connections 400] [--wrk wrk] [MODEL]

Needs wrk (`apt install wrk`). Exit code 1: a request failed, none was answered, or memory grew.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SCRIPT = Path(__file__).with_name("post.lua")
SAMPLE_S = 0.25
WARM_SHARE = 0.2  # of the samples, at the start: connections open, buffers grow to their size
MOST_GROWTH = 0.01  # of memory, from the first half of the other samples to the second ...
MOST_GROWTH_KIB = 1024  # ... beyond this, which any allocator may take
READY_S = 60.0


def resident_kib(pid: int) -> int:
    """Resident memory of a process and of its children; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0
    own = next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")), 0)
    return own + sum(resident_kib(int(child)) for child in children)


def halves(samples: Sequence[int]) -> tuple[int, int]:
    """Medians of the first and of the second half, after the warm-up."""
    steady = samples[int(len(samples) * WARM_SHARE) :]
    middle = len(steady) // 2
    assert middle, "two samples at least"
    return int(statistics.median(steady[:middle])), int(statistics.median(steady[middle:]))


def is_flat(first_kib: int, last_kib: int) -> bool:
    """Whether memory stayed what it was."""
    return last_kib - first_kib <= MOST_GROWTH_KIB + MOST_GROWTH * first_kib


class MemoryWatch:
    """Samples a process tree's memory from a thread while the block runs."""

    def __init__(self, pid: int) -> None:
        self.samples: list[int] = []
        self._pid = pid
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(SAMPLE_S):
            self.samples.append(resident_kib(self._pid))


def read_wrk(text: str) -> dict[str, Any]:
    """The counts that post.lua prints, in what wrk printed."""
    lines = [line for line in text.splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit(f"wrk said nothing of post.lua's counts:\n{text}")
    counts = json.loads(lines[-1])
    assert isinstance(counts, dict)
    return counts


@contextlib.contextmanager
def daemon(arguments: Sequence[str]) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A running `colibrid serve` and its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "colibrid.cli", "serve", "--host", "127.0.0.1", "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        quiet = ["--set", "logging.level=warning"]
        process = subprocess.Popen(
            [*command, *quiet, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log
        )
        try:
            _wait_ready(process, url)
            yield process, url
        finally:
            process.terminate()
            process.wait(60)
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace")[-2000:])


def press(wrk: str, connections: int, seconds: int, arguments: Sequence[str] = ()) -> dict[str, Any]:
    """One run: post.lua's counts, and memory before and after."""
    with daemon(arguments) as (process, url):
        command = [
            wrk, f"-t{min(2, connections)}", f"-c{connections}", f"-d{seconds}s", "--timeout", "60s", "-s", str(SCRIPT), url,
        ]  # fmt: skip
        with MemoryWatch(process.pid) as watch:
            ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        first, last = halves(watch.samples)
    counts = read_wrk(ended.stdout)
    return {
        "connections": connections,
        "seconds": counts["seconds"],
        "ok": counts["ok"],
        "refused": counts["refused"],
        "failed": counts["failed"] + counts["socket_errors"],
        "ok_per_s": counts["ok"] / counts["seconds"],
        "memory_first_kib": first,
        "memory_last_kib": last,
    }


def verdict(counts: dict[str, Any]) -> list[str]:
    """What is wrong; nothing is well."""
    problems = []
    if counts["failed"]:
        problems.append(f"{counts['failed']} requests failed")
    if not counts["ok"]:
        problems.append("no request was answered")
    if not is_flat(counts["memory_first_kib"], counts["memory_last_kib"]):
        problems.append(f"memory grew from {counts['memory_first_kib']} to {counts['memory_last_kib']} KiB")
    return problems


def _wait_ready(process: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + READY_S
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/readyz", timeout=2).close()  # noqa: S310  # the daemon above
            return
        time.sleep(0.05)
    raise SystemExit(f"the daemon is not ready ({process.poll()})")


def main() -> int:
    parser = argparse.ArgumentParser(description="Press a daemon with wrk.")
    parser.add_argument("model", nargs="*", help="what `colibrid serve` is given beside; default: the bundled model")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--connections", type=int, default=400)
    parser.add_argument("--wrk", default="wrk")
    arguments = parser.parse_args()
    wrk = shutil.which(arguments.wrk)
    if wrk is None:
        print(f"{arguments.wrk} is not installed (apt install wrk), or give --wrk PATH", file=sys.stderr)
        return 1
    counts = press(wrk, arguments.connections, arguments.seconds, arguments.model)
    print(json.dumps(counts, indent=1))
    problems = verdict(counts)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
