"""The command line with faults built in, by name: FAULTS='block_loop=2' fault_launcher.py serve ...

    block_loop=SECONDS   SIGUSR1 holds the daemon's event loop for so long; the log says loop_held and loop_turns

For bench/faults.py and the tests only; the package itself knows of no faults.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from colibrid.cli.main import main


def block_loop(seconds: float) -> None:
    """A signal handler of Python runs where the loop runs."""

    def hold(*_: object) -> None:
        os.write(2, b'{"event":"loop_held","level":"info"}\n')
        time.sleep(seconds)
        os.write(2, b'{"event":"loop_turns","level":"info"}\n')

    signal.signal(signal.SIGUSR1, hold)


FAULTS = {"block_loop": block_loop}

if __name__ == "__main__":
    for entry in os.environ.pop("FAULTS", "").split(","):
        name, _, value = entry.partition("=")
        FAULTS[name](float(value))
    sys.exit(main())
