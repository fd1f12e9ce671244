"""The engine process: `python -m colibrid.engine.worker --control-fd N`. Started by the supervisor only.

Reads one Open frame, opens the engine and stays in one C call until it is told to stop:

    main thread      Open frame -> pack -> clb_engine_open -> Ready frame -> clb_engine_run -> clb_engine_close
    control thread   frames -> clb_engine_post; end of the stream -> exit
    swap thread      frames about experts to replace (worker_swap.py)

SIGINT, SIGTERM and SIGHUP are ignored: the daemon decides when an engine ends, and if the daemon dies, the kernel kills it.
Exit codes: 0 told to stop, 70 the engine failed, 78 settings or model are wrong (final). Its last frame says why.

Imports are few on purpose: they are on the way from start to the first token.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from colibrid.engine import abi, control
from colibrid.engine.channel import EngineChannel
from colibrid.engine.configure import EngineSetup
from colibrid.engine.cubins import DeviceError
from colibrid.engine.host_memory import available_bytes
from colibrid.engine.library import InstallError, KernelModules, Library
from colibrid.engine.spec import device_name
from colibrid.engine.worker_swap import SwapDesk
from colibrid.errors import ColibridError, ConfigError, EngineError, ModelError
from colibrid.model.pack import open_pack

if TYPE_CHECKING:
    from colibrid.engine.device_cuda import CudaDevice
    from colibrid.engine.spec import EngineSpec
    from colibrid.engine.state import MemoryPlan

EXIT_STOPPED = 0
EXIT_ENGINE = 70
EXIT_CONFIG = 78
_PR_SET_PDEATHSIG = 1


class _Mailbox:
    """Hands the control thread an engine to post to, once there is one."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._lock = threading.Lock()
        self._engine: ctypes.c_void_p | None = None

    def attach(self, engine: ctypes.c_void_p | None) -> None:
        """None: the engine is about to be closed."""
        with self._lock:
            self._engine = engine

    def post(self, mail: abi.Mail) -> bool:
        """False if there is no engine (yet, or any more)."""
        with self._lock:
            if self._engine is None:
                return False
            self._library.c.clb_engine_post(self._engine, mail)
            return True


def main(arguments: list[str]) -> int:
    """Serve until told to stop; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if len(arguments) != 2 or arguments[0] != "--control-fd" or not arguments[1].isdecimal():
        sys.stderr.write("usage: python -m colibrid.engine.worker --control-fd N (started by colibrid)\n")
        return EXIT_CONFIG
    with socket.socket(fileno=int(arguments[1])) as sock:
        try:
            return _serve(sock)
        except (ConfigError, InstallError) as error:
            return _fail(sock, "config", error, EXIT_CONFIG)
        except ModelError as error:
            return _fail(sock, "model", error, EXIT_CONFIG)
        except ColibridError as error:
            return _fail(sock, "engine", error, EXIT_ENGINE)


def _serve(sock: socket.socket) -> int:
    received = control.receive(sock)
    if received is None:
        return EXIT_STOPPED
    message, fds = received
    if not isinstance(message, control.Open) or len(fds) != 3:
        raise control.FrameError(
            f"expected an open frame with 3 descriptors, got {type(message).__name__} with {len(fds)}"
        )
    _die_with_daemon(message.daemon_pid)
    if message.spec.cpu_set:  # before memory is touched: the system then takes it from near these CPUs
        os.sched_setaffinity(0, message.spec.cpu_set)
    control.send(sock, control.Opening())
    library = Library()
    mailbox = _Mailbox(library)
    desk = SwapDesk(library, sock)
    threading.Thread(target=_control_loop, args=(sock, mailbox, desk), name="control", daemon=True).start()
    with ExitStack() as stack:
        engine, modules = _open_engine(sock, message, fds, library, stack)
        mailbox.attach(engine)
        desk.attach(engine, modules)
        try:
            status = library.c.clb_engine_run(engine)
            unbalanced = _audit(library, engine) if status == abi.Status.OK else None
        finally:
            mailbox.attach(None)
            desk.detach()
            library.c.clb_engine_close(engine)
    if status != abi.Status.OK:
        raise EngineError(f"the engine stopped by itself ({library.status_name(status)})")
    if unbalanced is not None:
        raise EngineError(f"the engine was stopped with broken books: {unbalanced}; report this as a bug")
    return EXIT_STOPPED


def _audit(library: Library, engine: ctypes.c_void_p) -> str | None:
    """What does not add up in pools, runs and slots; None: everything does."""
    error = abi.Error()
    status = library.c.clb_engine_check(engine, ctypes.byref(error))
    return None if status == abi.Status.OK else error.message.decode("utf-8", "replace")


def _open_engine(
    sock: socket.socket, message: control.Open, fds: list[int], library: Library, stack: ExitStack
) -> tuple[ctypes.c_void_p, list[str]]:
    """Everything from the pack's description to a Ready frame: the engine, and its modules by name.

    What must outlive the engine goes to `stack`.
    """
    spec = message.spec
    channel_fd, command_fd, event_fd = fds
    started = time.monotonic()
    pack = open_pack(Path(spec.pack_dir), backend=spec.device, check_files=spec.weights == "files")
    setup = EngineSetup(library, spec, pack.manifest)
    pack_ms = _since(started)
    channel = EngineChannel(library, channel_fd, message.channel)
    stack.callback(channel.close)
    plan, gpu = _take_device(sock, setup, spec, channel, stack)
    _log(sock, "memory_plan", **{name.replace(" ", "_"): size for name, size in plan.parts()}, total=plan.total)
    wanted = spec.slots * spec.max_seq_len
    if plan.kv_tokens < wanted:
        _log(sock, "kv_memory_limited", kv_tokens=plan.kv_tokens, all_slots_at_full_length=wanted)
    started = time.monotonic()
    free = 0 if gpu is None else gpu.free_bytes()
    with KernelModules(custom=spec.modules) as modules:
        setup.use_modules(modules)
        setup.config.command_fd = command_fd
        setup.config.event_fd = event_fd
        setup.config.channel_base = channel.base
        setup.config.channel_bytes = channel.size
        engine = _open(library, setup, spec.pack_dir if spec.weights == "files" else None)
    device = device_name(spec)
    if gpu is not None:
        device = f"cuda {gpu.info.index}, {gpu.info.name}" if spec.device_index else f"cuda, {gpu.info.name}"
        _log(sock, "gpu_memory", beside_the_arena=free - gpu.free_bytes(), planned=plan.graphs, free=gpu.free_bytes())
    ready = control.Ready(memory=plan, device=device, pack_ms=pack_ms, open_ms=_since(started))
    control.send(sock, ready)
    return engine, modules.names


def _take_device(
    sock: socket.socket, setup: EngineSetup, spec: EngineSpec, channel: EngineChannel, stack: ExitStack
) -> tuple[MemoryPlan, CudaDevice | None]:
    """The engine's memory bill on the device that the spec names, and the device unless it is the CPU."""
    if spec.device == "cpu":
        return setup.fit(available_bytes()), None
    # Imported here: a CPU engine does without.
    from colibrid.engine.gpu import attach_gpu  # noqa: PLC0415

    def warn(text: str) -> None:
        control.send(sock, control.Log(level="warning", event="gpu", fields={"text": text}))

    try:
        gpu = attach_gpu(setup, channel, stack, index=spec.device_index, warn=warn)
    except DeviceError as error:
        raise ConfigError(str(error)) from error
    return gpu.plan, gpu.device


def _log(sock: socket.socket, event: str, **fields: int) -> None:
    control.send(sock, control.Log(level="info", event=event, fields=dict(fields)))


def _open(library: Library, setup: EngineSetup, pack_dir: str | None) -> ctypes.c_void_p:
    engine, error = ctypes.c_void_p(), abi.Error()
    dir_fd = -1 if pack_dir is None else os.open(pack_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        setup.config.dir_fd = dir_fd
        status = library.c.clb_engine_open(ctypes.byref(setup.config), ctypes.byref(engine), ctypes.byref(error))
    finally:
        if dir_fd >= 0:
            os.close(dir_fd)
    if status != abi.Status.OK:
        raise setup.error(status, error)
    return engine


def _control_loop(sock: socket.socket, mailbox: _Mailbox, desk: SwapDesk) -> None:
    """Ends the process at the end of the stream, at a bad frame, and at Stop while there is no engine to stop."""
    while True:
        try:
            received = control.receive(sock)
        except (ColibridError, OSError):
            received = None
        if received is None:
            os._exit(EXIT_ENGINE)
        message, fds = received
        if isinstance(message, control.Stage | control.Commit | control.Cancel):
            desk.put(message, fds)
            continue
        for fd in fds:  # no other frame brings any
            os.close(fd)
        if isinstance(message, control.Stop):
            if not mailbox.post(abi.Mail.STOP):
                os._exit(EXIT_STOPPED)
        elif isinstance(message, control.Check):
            mailbox.post(abi.Mail.CHECK)


def _die_with_daemon(daemon_pid: int) -> None:
    """Have the kernel kill this process when the daemon ends, however it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0) != 0:
        raise EngineError(f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != daemon_pid:
        os._exit(EXIT_STOPPED)


def _fail(sock: socket.socket, kind: control.FailureKind, error: ColibridError, code: int) -> int:
    message = control.Failed(kind=kind, message=control.shorten(str(error)))
    try:
        control.send(sock, message)
    except OSError:
        sys.stderr.write(f"colibrid engine: {error}\n")
    return code


def _since(started: float) -> float:
    return (time.monotonic() - started) * 1000.0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
