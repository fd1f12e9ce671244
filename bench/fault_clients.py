"""Rows of the faults table about clients and operators: slow readers, reloads under load."""

from __future__ import annotations

import asyncio
import json
import selectors
import signal
import socket
import statistics
import threading
import time
from typing import TYPE_CHECKING

from fault_kit import LONG, SHORT, Figure, Victim, count, require, took, wait_for
from outside import private_kib

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EACH_KIB = 64
REQUESTS = 1500  # of others, timed
MOST_SLOTS = 64  # of one engine
OTHERS = 4  # slots that no slow reader takes
GONE = 499  # in the log
LARGE = LONG | {"logprobs": 5}  # some 900 KB: more than sockets and daemon hold for a client


class Trickle:
    """Connections whose answers are read a byte a second, from one thread."""

    def __init__(self, port: int, readers: int) -> None:
        body = json.dumps(LARGE).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        self._selector = selectors.DefaultSelector()
        for _ in range(readers):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", port))
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(1.0):
            for key, _ in self._selector.select(0):
                connection = key.fileobj
                require(isinstance(connection, socket.socket), "only sockets were registered")
                try:
                    alive = bool(connection.recv(1))  # type: ignore[union-attr]
                except OSError:
                    alive = False
                if not alive:
                    self._selector.unregister(connection)
                    connection.close()  # type: ignore[union-attr]

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()


def slow_readers(folder: Path, readers: int) -> Iterator[Figure]:
    """Readers at a byte a second: little is held for each, they are cut, and others hardly notice."""
    engines = -(-(readers + OTHERS) // MOST_SLOTS)
    arguments = ["--set", f"engine.replicas={engines}", "--max-batch-size", str(MOST_SLOTS)]
    with Victim(folder, arguments) as daemon, Victim(folder, arguments) as calm:
        daemon.wait_ready()
        calm.wait_ready()
        for _ in range(3):  # what as many answers take that are read is no buffer
            asyncio.run(_read_all(daemon.port, readers))
        before, generated = private_kib(daemon.process.pid), _generated(daemon)
        began = time.perf_counter()
        crowd = Trickle(daemon.port, readers)
        try:
            most = max(_grown_until_held(daemon, before, generated + readers))
            held = readers - _cut(daemon)
            slower = _p99_ratio(daemon, calm)
            most = max(most, private_kib(daemon.process.pid) - before)
            # By the daemon, or by the system for it.
            wait_for(lambda: _cut(daemon) >= readers, "all slow readers cut", daemon, 300.0)
            cut = time.perf_counter() - began
        finally:
            crowd.stop()
        daemon.wait_idle()
        yield count("slow readers", readers, None)
        yield count("of them held while others were timed", held, None)
        yield count("memory for each of them", round(most / readers, 1), EACH_KIB, "KiB")
        yield took("all of them cut", [cut], None)
        yield Figure(
            name="p99 of others, times that of a daemon without them", value=slower, unit="", limit=1.05, kind="time"
        )


def _grown_until_held(daemon: Victim, before: int, generated: float) -> Iterator[int]:
    """Memory more than `before`, in KiB, again and again until more tokens are generated, and then none."""
    last, tokens = 0.0, 0.0
    while tokens <= generated or tokens != last:
        for _ in range(6):  # counts are a second old at times
            yield max(0, private_kib(daemon.process.pid) - before)
            time.sleep(0.5)
        last, tokens = tokens, _generated(daemon)


async def _read_all(port: int, clients: int) -> None:
    """The beginning of as many such answers, all at once."""
    body = json.dumps(LARGE | {"max_tokens": 200}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    whole = f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(whole)
        require(b"[DONE]" in await reader.read(), "an answer that was read did not end well")
        writer.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(one())


def _generated(daemon: Victim) -> float:
    """Output tokens so far, of all engines."""
    with daemon.open("GET", "/metrics") as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("colibrid_generation_tokens_total{"))


def _p99_ratio(daemon: Victim, calm: Victim) -> float:
    """The 99th percentile of the time that a request takes, over that of another daemon: both are asked in turns."""
    times: dict[Victim, list[float]] = {daemon: [], calm: []}
    for _ in range(REQUESTS):
        for asked, taken in times.items():
            began = time.perf_counter()
            asked.text()
            taken.append(time.perf_counter() - began)
    p99, usual = (statistics.quantiles(taken, n=100)[98] for taken in times.values())
    return round(p99 / usual, 2)


def _cut(daemon: Victim) -> int:
    """Clients that are gone before their answer was."""
    return sum(event["status"] == GONE for event in daemon.logged("request"))


def reloaded(folder: Path, reloads: int) -> Iterator[Figure]:
    """SIGHUP under load, every fourth time with a bad file: all or nothing, and no request notices."""
    config = folder / "reloaded.yaml"
    config.write_text("limits: {queue: 100}\n")
    with Victim(folder, ["--config", str(config)]) as daemon:
        expected = daemon.wait_ready().text()
        over, wrong, answers = threading.Event(), [], [0, 0]

        def client(number: int) -> None:
            while not over.is_set():
                status, answer = daemon.ask("POST", "/v1/completions", SHORT)
                answers[number] += 1
                if status != 200 or answer["choices"][0]["text"] != expected:
                    wrong.append(answer)

        threads = [threading.Thread(target=client, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        times = []
        try:
            for number in range(reloads):
                bad = number % 4 == 3
                config.write_text(f"limits: {{queue: {'x' if bad else 100 + number}}}\n")
                began = time.perf_counter()
                daemon.signal(signal.SIGHUP)
                name, nth = ("reload_refused", number // 4 + 1) if bad else ("reloaded", number - number // 4 + 1)
                daemon.wait_event(name, nth)
                times.append(time.perf_counter() - began)
        finally:
            over.set()
            for thread in threads:
                thread.join()
        refused = str(daemon.logged("reload_refused")[-1])
        require("reloaded.yaml:1:17" in refused, f"line and column are not told: {refused}")
        yield count("reloads", reloads, None)
        yield took("one reload", times, 1.0)
        yield count("requests that failed or changed", len(wrong))
        yield count("requests meanwhile", sum(answers), None)
