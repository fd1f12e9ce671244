"""Rows of the faults table that kill, stop, flood and leave. Each takes a folder and a size, and yields figures.

A row raises FaultError when something that must be true is not; numbers with limits are left to the caller.
"""

from __future__ import annotations

import asyncio
import calendar
import contextlib
import os
import random
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fault_kit import (
    LONG,
    SHORT,
    Figure,
    Poller,
    Victim,
    count,
    require,
    shared_memory_files,
    took,
    wait_for,
)
from outside import private_kib

if TYPE_CHECKING:
    from collections.abc import Iterator

LAUNCHER = str(Path(__file__).with_name("fault_launcher.py"))
MEMORY_KIB = 1024  # of the daemon, over a whole row
ENGINE_KIB = 64
KV_TOKENS = 16384  # where the engine's memory is looked at: little, so that all of it is soon in use


def touch_all_memory(daemon: Victim, kv_tokens: int) -> None:
    """Prompts that are kept until every page of the KV memory was used: a page is the system's until then."""
    length = 1900
    for number in range(2 * kv_tokens // length):
        ids = [100 + number, *range(200, 200 + length - 1)]
        status, answer = daemon.ask("POST", "/v1/completions", {"prompt": ids, "max_tokens": 1})
        require(status == 200, f"a long prompt is {status}: {answer}")


def engine_killed(folder: Path, kills: int) -> Iterator[Figure]:
    """Kill -9 of the engine in mid-stream, each after a completed request: errors, 503, a new engine, nothing left."""
    warm_up = max(1, kills // 10)
    noticed, unready, errors, again = [], [], [], []
    with Victim(folder) as daemon:
        expected = daemon.wait_ready().text()
        before = (0, 0, 0, shared_memory_files())
        for number in range(kills):
            if number == warm_up:
                before = (daemon.descriptors(), daemon.children(), private_kib(daemon.process.pid), before[3])
            with Poller(daemon, "/readyz") as poller, daemon.open("POST", "/v1/completions", LONG) as stream:
                stream.readline()
                (pid,) = daemon.engine_pids()
                killed, wall = time.perf_counter(), time.time()
                os.kill(pid, signal.SIGKILL)
                rest = stream.read()
                errors.append(time.perf_counter() - killed)
                require(b'"error"' in rest and b"[DONE]" not in rest, f"the stream ended with {rest[-200:]!r}")
                gone, back = out_and_back(poller, killed, daemon)
                unready.append(gone)
                again.append(back)
            noticed.append(_logged_after(daemon.wait_event("engine_died", number + 1)["time"], wall))
            require(daemon.text() == expected, "another answer than before the kill")
        daemon.wait_idle()
        yield took("death noticed", noticed, 0.1)
        yield took("/readyz 503", unready, 0.2)
        yield took("running stream ended with an error", errors, 0.5)
        yield took("ready again", again, 2.0)
        yield count("engines killed", kills, None)
        if kills > warm_up:
            yield count("descriptors left", daemon.descriptors() - before[0])
            yield count("children left", daemon.children() - before[1])
            grown = private_kib(daemon.process.pid) - before[2]
            yield count("private memory of the daemon", grown, MEMORY_KIB, "KiB")
        yield count("files left in /dev/shm", len(shared_memory_files() - before[3]))
        daemon.signal(signal.SIGTERM)
        require(daemon.wait() == 0, "the daemon did not end with 0")


def out_and_back(poller: Poller, since: float, daemon: Victim) -> tuple[float, float]:
    """Seconds from `since` until /readyz was 503, and until it was 200 again."""
    gone = wait_for(lambda: poller.first(503, since), "/readyz 503", daemon)
    back = wait_for(lambda: poller.first(200, since + gone), "/readyz 200", daemon)
    return gone, gone + back


def _logged_after(stamp: str, wall: float) -> float:
    """Seconds from `wall` until a log line's time, which has milliseconds."""
    day, _, fraction = stamp.rstrip("Z").partition(".")
    parsed = time.strptime(day, "%Y-%m-%dT%H:%M:%S")
    return max(0.0, calendar.timegm(parsed) + int(fraction) / 1000 - wall)


def one_of_two_killed(folder: Path, kills: int) -> Iterator[Figure]:
    """Kill -9 of one engine of two: only its requests fail, /readyz never says 503."""
    with Victim(folder, ["--set", "engine.replicas=2"]) as daemon:
        daemon.wait_ready()
        lost = 0
        for _ in range(kills):
            wait_for(lambda: daemon.health()["engines_ready"] == 2, "both engines ready", daemon)
            daemon.text()
            with Poller(daemon, "/readyz") as poller, daemon.open("POST", "/v1/completions", LONG) as stream:
                stream.readline()
                victim = next(engine["index"] for engine in daemon.health()["engines"] if engine["running"])
                started = [event for event in daemon.logged("engine_started") if event["engine"] == victim]
                os.kill(started[-1]["pid"], signal.SIGKILL)
                require(daemon.ask("POST", "/v1/completions", SHORT)[0] == 200, "the other engine does not serve")
                require(b'"error"' in stream.read(), "the stream of the dead engine ended without an error")
            lost += sum(status != 200 for _, status in poller.changes)
        yield count("engines killed", kills, None)
        yield count("/readyz other than 200", lost)


def engine_stalled(folder: Path, stops: int) -> Iterator[Figure]:
    """SIGSTOP: the stall is seen by the progress counter, the engine is killed and replaced; an idle one never is."""
    timeout = 4.0  # an idle engine shows each second that it is there
    found, again = [], []
    with Victim(folder, ["--set", f"engine.stall_timeout_s={timeout}"]) as daemon:
        daemon.wait_ready()
        time.sleep(timeout + 1.0)
        require(not daemon.logged("engine_died"), "an idle engine was killed")
        for _ in range(stops):
            daemon.text()
            with Poller(daemon, "/readyz") as poller, Poller(daemon, "/livez") as alive:
                (pid,) = daemon.engine_pids()
                stopped = time.perf_counter()
                os.kill(pid, signal.SIGSTOP)
                gone, back = out_and_back(poller, stopped, daemon)
                found.append(gone - timeout)
                again.append(back - timeout)
            require([status for _, status in alive.changes] == [200], "/livez was not always 200")
        yield took("stall found, beyond engine.stall_timeout_s", found, 1.0)
        yield took("ready again, beyond engine.stall_timeout_s", again, 3.0)


def crash_loop(folder: Path, _size: int) -> Iterator[Figure]:
    """Five engines that die before a request end the daemon with 1 and a named reason; a broken model with 78."""
    with Victim(folder) as daemon:
        daemon.wait_ready()
        began, killed = time.perf_counter(), set[int]()
        while daemon.process.poll() is None:
            for pid in set(daemon.engine_pids()) - killed:
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
        yield took("gave up", [time.perf_counter() - began], 15.0)
        require(daemon.wait() == 1, f"exit code {daemon.wait()}")
        require("5 engines died" in daemon.stderr_path.read_text(), "the reason is not named")
        yield count("engines that died", len(killed), 5)
    with Victim(folder, ["--set", "memory.tiers.kv.bytes=1"]) as daemon:
        require(daemon.wait() == 78, f"settings that C refuses: exit code {daemon.wait()}")
        require(len(daemon.logged("engine_started")) <= 1, "wrong settings were tried again")


def clients_leave(folder: Path, clients: int) -> Iterator[Figure]:
    """Clients close their connection before, in and behind the first bytes of answers, streamed or not."""
    with Victim(folder, ["--set", f"memory.kv_tokens={KV_TOKENS}"]) as daemon:
        daemon.wait_ready()
        touch_all_memory(daemon, KV_TOKENS)
        asyncio.run(_leave(daemon.port, max(64, clients // 10)))
        daemon.wait_idle()
        (engine,) = daemon.engine_pids()
        before = (daemon.descriptors(), private_kib(daemon.process.pid), private_kib(engine))
        asyncio.run(_leave(daemon.port, clients))
        freed = [daemon.wait_idle()]
        for _ in range(10):
            with daemon.open("POST", "/v1/completions", LONG) as stream:
                stream.readline()
            freed.append(daemon.wait_idle())
        daemon.text()
        yield count("clients that left", clients, None)
        yield took("slot free", freed, 0.1)
        yield count("descriptors left", daemon.descriptors() - before[0])
        yield count("private memory of the daemon", private_kib(daemon.process.pid) - before[1], MEMORY_KIB, "KiB")
        yield count("private memory of the engine", private_kib(engine) - before[2], ENGINE_KIB, "KiB")
        daemon.signal(signal.SIGTERM)
        require(daemon.wait() == 0, "the daemon did not end with 0")
        totals = daemon.logged("engine_totals")[-1]
        yield count("allocations of the engine after ready", totals["allocations_after_open"])
        require(not [event for event in daemon.events if event["level"] == "error"], "errors were logged")


async def _leave(port: int, clients: int, at_once: int = 48) -> None:
    numbers = iter(range(clients))

    async def one(number: int) -> None:
        draw = random.Random(number)  # noqa: S311 (repeatable, no secrets)
        body = b'{"prompt":"Once upon","max_tokens":400,"ignore_eos":true,"stream":%b}' % draw.choice(
            [b"true", b"false"]
        )
        head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\n" % port
        whole = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        place = draw.randrange(4)
        writer.write(whole if place else whole[: draw.randrange(len(whole))])
        await writer.drain()
        if place > 1:
            with contextlib.suppress(TimeoutError):  # an answer that is not streamed comes late
                await asyncio.wait_for(reader.read(1 if place == 2 else 2000), 0.05)
        if draw.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()

    async def client() -> None:
        for number in numbers:
            await one(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(client())


def terminated(folder: Path, _size: int) -> Iterator[Figure]:
    """SIGTERM drains and ends with 0; the second one ends now; with a dead engine the exit code is not 0."""
    with Victim(folder) as daemon:
        daemon.wait_ready()
        with daemon.open("POST", "/v1/completions", LONG | {"max_tokens": 200}) as stream:
            stream.readline()
            daemon.signal(signal.SIGTERM)
            daemon.wait_event("draining")
            with daemon.open("POST", "/v1/completions", SHORT) as refused:
                require(refused.status == 503, f"a request while draining is {refused.status}")
                require(refused.headers["connection"] == "close", "the connection of a refused request stays open")
            require(stream.read().rstrip().endswith(b"data: [DONE]"), "a running stream was cut off")
        done = time.perf_counter()
        require(daemon.wait() == 0, "drained, but the exit code is not 0")
        yield took("ended after the last answer", [time.perf_counter() - done], 1.0)
    with Victim(folder, ["--set", "server.drain_timeout_s=3600"]) as daemon:
        daemon.wait_ready()
        with daemon.open("POST", "/v1/completions", LONG) as stream:
            stream.readline()
            daemon.signal(signal.SIGTERM)
            daemon.wait_event("draining")
            again = time.perf_counter()
            daemon.signal(signal.SIGTERM)
            require(b"[DONE]" not in stream.read(), "the second SIGTERM waited for the stream")
            require(daemon.wait() == 0, "stopped, but the exit code is not 0")
            yield took("ended after the second SIGTERM", [time.perf_counter() - again], 1.0)


def damaged_weights(folder: Path, size: int) -> Iterator[Figure]:
    """Files truncated at every 4 KiB, and flipped bits: refused with the file and both hashes named."""
    from fault_weights import bundled_copy, flips, truncations  # noqa: PLC0415  # numpy: for this row only

    pack = bundled_copy(folder)
    yield count("truncations refused", truncations(pack, size), None)
    said = list(flips(pack, size))
    yield count("flipped bits refused", len(said), None)
    broken = shutil.copytree(pack, folder / "broken.colibri")
    data = bytearray((broken / "dense.bin").read_bytes())
    data[len(data) // 2] ^= 1
    (broken / "dense.bin").write_bytes(data)
    with Victim(folder, [str(broken)]) as daemon:
        require(daemon.wait() == 78, f"a flipped bit: exit code {daemon.wait()}")
        error = daemon.stderr_path.read_text()
        require("dense.bin: bytes" in error and "expected" in error, f"the error is: {error[-500:]}")
        require(not daemon.logged("serving"), "a damaged model was served")


def loop_blocked(folder: Path, _size: int) -> Iterator[Figure]:
    """An event loop that stands sends no watchdog pings, so that the manager acts; one that turns again sends them."""
    address = str(folder / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "600000"}
        with Victim(folder, program=(LAUNCHER,), environment={**environment, "FAULTS": "block_loop=4"}) as daemon:
            daemon.wait_ready()
            daemon.text()
            wait_for(lambda: _pings(manager) >= 3, "pings while all is well", daemon)
            daemon.signal(signal.SIGUSR1)
            daemon.wait_event("loop_held")
            blocked = _pings(manager)
            require(not daemon.logged("loop_turns"), "this machine is too slow for this row")
            daemon.wait_event("loop_turns")
            wait_for(lambda: _pings(manager) >= 3, "pings after the loop turns again", daemon)
            require(not daemon.logged("engine_died"), "an engine was blamed for the daemon's loop")
            yield count("pings while the loop stands", blocked)


def _pings(manager: socket.socket) -> int:
    """Watchdog pings of a second and a half, without those that came before."""
    _received(manager)
    time.sleep(1.5)
    return _received(manager)


def _received(manager: socket.socket) -> int:
    """Watchdog pings that nobody has asked for yet."""
    seen = 0
    while True:
        try:
            seen += manager.recv(4096, socket.MSG_DONTWAIT).count(b"WATCHDOG=1")
        except BlockingIOError:
            return seen
