"""Reloads of a daemon under load: none fails a request, each is all or nothing."""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING

from daemon_process import DEADLINE_S, DaemonProcess

if TYPE_CHECKING:
    from pathlib import Path

    from colibrid.model.pack import Pack

RELOADS = 1000
CLIENTS = 3
ASK = {"prompt": "The capital of Norway", "max_tokens": 4, "temperature": 0}


class _Outcomes:
    """Counts the outcomes of reloads in the daemon's log, reading on where it stopped."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self._path = daemon.stderr_path
        self._read = 0
        self.done = self.refused = 0

    def wait_more(self) -> None:
        """Until there is one more than before."""
        before, end = self.done + self.refused, time.monotonic() + DEADLINE_S
        while self.done + self.refused == before:
            assert time.monotonic() < end, "a reload was not answered"
            with self._path.open("rb") as log:
                log.seek(self._read)
                text = log.read()
            text = text[: text.rfind(b"\n") + 1]
            self._read += len(text)
            self.done += text.count(b'"event":"reloaded"')
            self.refused += text.count(b'"event":"reload_refused"')
            time.sleep(0.0005)


def test_reloads_under_load_fail_no_request(bundled_pack: Pack, tmp_path: Path) -> None:
    """A thousand reloads, every fourth of a bad file, while clients stream: every answer is complete and the same."""
    config = tmp_path / "c.yaml"
    config.write_text("limits: {queue: 100}\n")
    arguments = (str(bundled_pack.path), "--device", "cpu", "--config", str(config), "--set", "engine.threads=1")
    with DaemonProcess(tmp_path, *arguments) as daemon:
        expected = daemon.wait_ready().request("POST", "/v1/completions", ASK)[1]["choices"]
        wrong: list[object] = []
        over = threading.Event()
        answers = [0] * CLIENTS

        def client(number: int) -> None:
            while not over.is_set():
                status, answer = daemon.request("POST", "/v1/completions", ASK)
                answers[number] += 1
                if status != 200 or answer["choices"] != expected:
                    wrong.append((status, answer))

        clients = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
        for thread in clients:
            thread.start()
        outcomes = _Outcomes(daemon)
        for number in range(RELOADS):
            bad = number % 4 == 3
            config.write_text(
                f"limits: {{queue: {'x' if bad else 100 + number}}}\nbatch: {{window_ms: {number % 3}}}\n"
            )
            daemon.signal(signal.SIGHUP)
            outcomes.wait_more()
        over.set()
        for thread in clients:
            thread.join()
        assert wrong == []
        assert (outcomes.done, outcomes.refused) == (RELOADS * 3 // 4, RELOADS // 4)
        assert min(answers) > 0
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0
