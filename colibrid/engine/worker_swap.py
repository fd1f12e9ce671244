"""The worker's part in replacing experts: a thread that reads, checks and hands over, while the C loop serves.

    control thread   Stage, Commit, Cancel frames ─▶ queue
    swap thread      queue ─▶ clb_engine_swap_* ─▶ Staged, Swapped, NotSwapped frames

One frame after another; the daemon waits for the answer to each.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from typing import TYPE_CHECKING

from colibrid.engine import abi, control
from colibrid.engine.tables import ExpertTables

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from colibrid.engine.library import Library


class SwapDesk:
    """Between attach and detach it has an engine; detach waits for the call that runs."""

    def __init__(self, library: Library, sock: socket.socket) -> None:
        self._library = library
        self._sock = sock
        self._queue: queue.SimpleQueue[tuple[control.Question, list[int]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._engine: ctypes.c_void_p | None = None
        self._modules: Sequence[str] = ()

    def attach(self, engine: ctypes.c_void_p, modules: Sequence[str]) -> None:
        """The engine is open. `modules`: names of its kernel modules, in the order of its configuration."""
        self._engine, self._modules = engine, modules
        threading.Thread(target=self._serve, name="swap", daemon=True).start()

    def detach(self) -> None:
        """The C loop has ended, and the engine is about to be closed."""
        with self._lock:
            self._engine = None

    def put(self, request: control.Question, fds: list[int]) -> None:
        """Take a frame; the descriptors are ours from now on."""
        self._queue.put((request, fds))

    def _serve(self) -> None:
        while True:
            request, fds = self._queue.get()
            with self._lock:
                answer = self._answer(request, fds)
            for fd in fds:
                os.close(fd)
            try:
                control.send(self._sock, answer)
            except OSError:
                return  # the daemon is gone, and soon so are we

    def _answer(self, request: control.Question, fds: list[int]) -> control.Answer:
        if self._engine is None:
            return _refused(request, abi.Status.STATE, "the engine has ended")
        if isinstance(request, control.Stage):
            return self._stage(request, fds)
        if isinstance(request, control.Cancel):
            self._library.c.clb_engine_swap_cancel(self._engine)
            return control.Staged(id=request.id)
        return self._commit(request)

    def _stage(self, request: control.Stage, fds: list[int]) -> control.Answer:
        if len(fds) != (request.file is not None):
            return _refused(request, abi.Status.ARGUMENT, f"a file and {len(fds)} descriptors do not fit together")
        if request.module is not None and request.module not in self._modules:
            known = ", ".join(name for name in self._modules if not name.startswith("cpu_")) or "none"
            return _refused(request, abi.Status.MODULE, f"no kernel module {request.module}; modules.load has: {known}")
        desc = abi.SwapDesc(
            abi_version=abi.ABI_VERSION,
            struct_bytes=ctypes.sizeof(abi.SwapDesc),
            layer=request.layer,
            expert=request.expert,
            fd=fds[0] if fds else -1,
            module=0 if request.module is None else 1 + self._modules.index(request.module),
        )
        if request.file is not None:
            tables = ExpertTables(request.file, request.layer, request.expert)
            desc.file = ctypes.pointer(tables.file)
            desc.sections = tables.sections
        error = abi.Error()
        status = self._library.c.clb_engine_swap_stage(self._engine, ctypes.byref(desc), ctypes.byref(error))
        return control.Staged(id=request.id) if status == abi.Status.OK else _failed(request, status, error)

    def _commit(self, request: control.Commit) -> control.Answer:
        report, error = abi.SwapReport(), abi.Error()
        if self._library.c.clb_engine_swap_post(self._engine, request.weights_generation) != abi.Status.OK:
            return _refused(request, abi.Status.STATE, "nothing is staged")
        status = self._library.c.clb_engine_swap_wait(
            self._engine, request.timeout_ms, ctypes.byref(report), ctypes.byref(error)
        )
        if status != abi.Status.OK:
            return _failed(request, status, error)
        return control.Swapped(
            id=request.id,
            weights_generation=report.weights_generation,
            streams=report.streams,
            free_slots=report.free_blocks,
        )


def _refused(request: control.Question, status: abi.Status, message: str) -> control.NotSwapped:
    return control.NotSwapped(id=request.id, status=status, message=message)


def _failed(request: control.Question, status: int, error: abi.Error) -> control.NotSwapped:
    message = control.shorten(error.message.decode("utf-8", "replace"))
    return control.NotSwapped(id=request.id, status=status, message=message)
