"""One engine process and everything that belongs to it: pidfd, control socket, channel, eventfds. No policy."""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from colibrid.config.environment import child_environment
from colibrid.engine import control
from colibrid.engine.channel import ChannelShape, DaemonChannel

if TYPE_CHECKING:
    from colibrid.engine.library import Library
    from colibrid.engine.spec import EngineSpec

PACKAGE_ROOT = Path(__file__).resolve().parent.parent.parent
_EVENTFD_FLAGS = os.EFD_CLOEXEC | os.EFD_NONBLOCK


class EngineProcess:
    """A child from spawn to release. All descriptors are this object's; the event loop must not watch them after release()."""

    def __init__(self, library: Library, spec: EngineSpec, shape: ChannelShape) -> None:
        """Spawn a worker and send it its Open frame. OSError or EngineError if that fails; nothing is left then."""
        self._status: int | None = None
        with ExitStack() as stack:
            self.channel = DaemonChannel(library, shape)
            stack.callback(self.channel.close)
            self._command_fd = _descriptor(stack, os.eventfd(0, _EVENTFD_FLAGS))
            self.event_fd = _descriptor(stack, os.eventfd(0, _EVENTFD_FLAGS))
            self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.callback(self.sock.close)
            with theirs:
                self.sock.setblocking(False)
                opening = control.Open(spec=spec, channel=shape, daemon_pid=os.getpid())
                control.send(self.sock, opening, (self.channel.fd, self._command_fd, self.event_fd))
                self.pid = _spawn(theirs.fileno())
            stack.callback(self._end)
            self.pidfd = _descriptor(stack, os.pidfd_open(self.pid))
            self._held = stack.pop_all()

    def wake(self) -> None:
        """Tell the engine that commands were pushed or results were read."""
        os.eventfd_write(self._command_fd, 1)

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        if self._status is None:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def poll(self) -> int | None:
        """None while it runs; else its exit code, or minus the number of the signal that ended it."""
        if self._status is None:
            found = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
            if found is not None:
                status: int = found.si_status
                self._status = status if found.si_code == os.CLD_EXITED else -status
        return self._status

    def release(self) -> None:
        """Give everything back; kills and reaps the process if it still runs."""
        self._held.close()

    def _end(self) -> None:
        # The only blocking wait: SIGKILL cannot be ignored, so it takes as long as the kernel needs to free its memory.
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _descriptor(stack: ExitStack, fd: int) -> int:
    stack.callback(os.close, fd)
    return fd


def _spawn(control_fd: int) -> int:
    """Start the worker with `control_fd` as its only inherited descriptor beyond stderr, which is also its stdout."""
    target = 3
    arguments = [sys.executable, "-P", "-m", "colibrid.engine.worker", "--control-fd", str(target)]
    actions = [
        (os.POSIX_SPAWN_DUP2, control_fd, target),  # clears close-on-exec, also where both are the same
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, 2, 1),
    ]
    return os.posix_spawn(
        sys.executable,
        arguments,
        child_environment(PACKAGE_ROOT),
        file_actions=actions,
        setsigmask=(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),  # until the worker ignores them
        setsigdef=(signal.SIGPIPE,),
    )
