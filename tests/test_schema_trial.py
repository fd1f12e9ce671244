"""The daemon against requests made from its own description."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from daemon_process import DaemonProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

TRIAL = Path(__file__).with_name("schema_trial.py")
CASES = 2000  # `make fuzz-http` makes ten times as many


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path, "--max-seq-len", "128") as process:
        yield process.wait_ready()


@pytest.mark.slow
def test_no_request_breaks_the_server(daemon: DaemonProcess) -> None:
    """Thousands of right and wrong requests: no server error, every answer as described, wrong ones refused, the canary
    the same to the last bit, and nothing in the log but what clients did wrong."""
    done = subprocess.run(
        [sys.executable, str(TRIAL), f"http://127.0.0.1:{daemon.port}", "--cases", str(CASES)],
        capture_output=True,
        text=True,
        timeout=3000,
        env=os.environ | {"PYTHONSAFEPATH": ""},  # the script's neighbours are in its own folder
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    count = int(done.stdout.split(" cases", 1)[0].rsplit(maxsplit=1)[-1])
    assert count >= CASES * 0.95
    assert not [event for event in daemon.events if event["level"] == "error"]
