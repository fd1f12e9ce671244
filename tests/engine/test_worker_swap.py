"""colibrid.engine.worker_swap: frames about experts in, answers out, and no call into an engine that is closed."""

from __future__ import annotations

import ctypes
import os
import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from colibrid.engine import abi, control
from colibrid.engine.worker_swap import SwapDesk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from colibrid.engine.library import Library


class ScriptedLibrary:
    """Keeps the calls; answers `status`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.status = abi.Status.OK
        self.desc: Any = None
        self.c = SimpleNamespace(
            clb_engine_swap_stage=self._stage,
            clb_engine_swap_post=lambda _engine, generation: self._note(f"post {generation}"),
            clb_engine_swap_wait=self._wait,
            clb_engine_swap_cancel=lambda _engine: self._note("cancel"),
        )

    def _note(self, text: str) -> int:
        self.calls.append(text)
        return self.status

    def _stage(self, _engine: object, desc: Any, error: Any) -> int:
        self.desc = desc._obj
        error._obj.message = b"no room"
        return self._note("stage")

    def _wait(self, _engine: object, timeout_ms: int, report: Any, _error: Any) -> int:
        report._obj.weights_generation, report._obj.streams, report._obj.free_blocks = 4, 3, 2
        return self._note(f"wait {timeout_ms}")


class Desk:
    def __init__(self) -> None:
        self.library = ScriptedLibrary()
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ours.settimeout(60)
        self.theirs = theirs
        self.desk = SwapDesk(cast("Library", self.library), theirs)

    def ask(self, question: control.Question, fds: list[int] | None = None) -> control.Message:
        self.desk.put(question, fds or [])
        received = control.receive(self.ours)
        assert received is not None
        return received[0]


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    made.desk.attach(ctypes.c_void_p(1), ["cpu_generic_bf16", "gelu"])
    yield made
    made.theirs.close()
    made.ours.close()


def stage(**changes: Any) -> control.Stage:
    return control.Stage(**{"id": 1, "layer": 2, "expert": 3, "file": None, "module": "gelu", **changes})


def test_frames_become_calls(desk: Desk) -> None:
    """Stage, commit and cancel reach C with their numbers, and its answers come back under their ids."""
    assert desk.ask(stage()) == control.Staged(id=1)
    assert (desk.library.desc.layer, desk.library.desc.expert, desk.library.desc.module) == (2, 3, 2)
    assert desk.library.desc.fd == -1
    done = desk.ask(control.Commit(id=2, weights_generation=4, timeout_ms=50))
    assert done == control.Swapped(id=2, weights_generation=4, streams=3, free_slots=2)
    assert desk.ask(control.Cancel(id=3)) == control.Staged(id=3)
    assert desk.library.calls == ["stage", "post 4", "wait 50", "cancel"]


def test_refusals_carry_status_and_words(desk: Desk) -> None:
    """What C refuses, an unknown module, and descriptors that do not fit the frame."""
    desk.library.status = abi.Status.FULL
    assert desk.ask(stage()) == control.NotSwapped(id=1, status=abi.Status.FULL, message="no room")
    refused = desk.ask(stage(module="none"))
    assert isinstance(refused, control.NotSwapped)
    assert (refused.status, refused.message) == (abi.Status.MODULE, "no kernel module none; modules.load has: gelu")
    reader, writer = os.pipe()
    os.close(writer)
    refused = desk.ask(stage(), [reader])
    assert isinstance(refused, control.NotSwapped)
    assert refused.status == abi.Status.ARGUMENT
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reader)


def test_a_detached_engine_is_not_touched(desk: Desk) -> None:
    """After detach every question is refused."""
    desk.desk.detach()
    for question in (stage(), control.Commit(id=1, weights_generation=1, timeout_ms=1), control.Cancel(id=1)):
        refused = desk.ask(question)
        assert isinstance(refused, control.NotSwapped)
        assert refused.status == abi.Status.STATE
    assert desk.library.calls == []
