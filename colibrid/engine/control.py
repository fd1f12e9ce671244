"""Control frames between daemon and worker over one SOCK_SEQPACKET pair, descriptors by SCM_RIGHTS.

frame: | "CLBF" | version u16 | descriptors u16 | payload bytes u32 | payload: msgpack of one tagged struct |

One packet is one frame of at most FRAME_BYTES. Both sides check magic, version, size and types.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
from typing import TYPE_CHECKING, Literal

import msgspec

from colibrid.engine.channel import ChannelShape
from colibrid.engine.spec import EngineSpec
from colibrid.engine.state import MemoryPlan
from colibrid.errors import EngineError
from colibrid.model.manifest import PackFile

if TYPE_CHECKING:
    from collections.abc import Sequence

PROTOCOL_VERSION = 2
FRAME_BYTES = 64 << 10
MAX_DESCRIPTORS = 4
_MAGIC = b"CLBF"
_HEADER = struct.Struct("<4sHHI")
_TEXT_BYTES = 8 << 10  # longest text that is put into a frame

FailureKind = Literal["config", "model", "engine"]


class Open(msgspec.Struct, frozen=True, kw_only=True, tag="open", forbid_unknown_fields=True):
    """Daemon: load this. Carries three descriptors: channel memfd, command eventfd, event eventfd."""

    spec: EngineSpec
    channel: ChannelShape
    daemon_pid: int


class Stop(msgspec.Struct, frozen=True, tag="stop", forbid_unknown_fields=True):
    """Daemon: leave the loop and exit with 0."""


class Check(msgspec.Struct, frozen=True, tag="check", forbid_unknown_fields=True):
    """Daemon: verify the engine's invariants at the next step boundary."""


class Stage(msgspec.Struct, frozen=True, kw_only=True, tag="stage", forbid_unknown_fields=True):
    """Daemon: read an expert into a swap slot. Carries its file's descriptor, unless only the kernel changes."""

    id: int
    layer: int
    expert: int
    file: PackFile | None  # None: the weights stay
    module: str | None  # of EngineSpec.modules; None: the best that fits


class Commit(msgspec.Struct, frozen=True, kw_only=True, tag="commit", forbid_unknown_fields=True):
    """Daemon: put what is staged in place, between two steps."""

    id: int
    weights_generation: int  # that it begins
    timeout_ms: int


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel", forbid_unknown_fields=True):
    """Daemon: forget what is staged."""

    id: int


class Staged(msgspec.Struct, frozen=True, kw_only=True, tag="staged", forbid_unknown_fields=True):
    """Worker: the expert is read and checked, or forgotten, as it was asked."""

    id: int


class Swapped(msgspec.Struct, frozen=True, kw_only=True, tag="swapped", forbid_unknown_fields=True):
    """Worker: the new expert serves (clb_swap_report)."""

    id: int
    weights_generation: int
    streams: int
    free_slots: int


class NotSwapped(msgspec.Struct, frozen=True, kw_only=True, tag="not_swapped", forbid_unknown_fields=True):
    """Worker: the old expert serves on, and nothing is staged."""

    id: int
    status: int  # clb_status
    message: str


class Opening(msgspec.Struct, frozen=True, tag="opening", forbid_unknown_fields=True):
    """Worker: the Open frame was read; the weights are being loaded."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready", forbid_unknown_fields=True):
    """Worker: requests can be pushed."""

    memory: MemoryPlan
    device: str
    pack_ms: float
    open_ms: float


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed", forbid_unknown_fields=True):
    """Worker: it is about to exit. `config` and `model` errors are final, `engine` errors are not."""

    kind: FailureKind
    message: str


class Log(msgspec.Struct, frozen=True, kw_only=True, tag="log", forbid_unknown_fields=True):
    """Worker: one log event for the daemon's log."""

    level: Literal["debug", "info", "warning", "error"]
    event: str
    fields: dict[str, str | int | float | bool]


Message = Open | Stop | Check | Stage | Commit | Cancel | Staged | Swapped | NotSwapped | Opening | Ready | Failed | Log
Question = Stage | Commit | Cancel
Answer = Staged | Swapped | NotSwapped


class FrameError(EngineError):
    """A frame is malformed: the other side is of another version or broken."""


def shorten(text: str) -> str:
    """`text` cut to what a frame may carry."""
    return text if len(text.encode()) <= _TEXT_BYTES else text.encode()[:_TEXT_BYTES].decode(errors="ignore") + "…"


def send(sock: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send one frame. FrameError if it is too large; OSError if the other side is gone."""
    payload = msgspec.msgpack.encode(message)
    size = _HEADER.size + len(payload)
    if size > FRAME_BYTES or len(fds) > MAX_DESCRIPTORS:
        raise FrameError(
            f"a frame of {size} bytes and {len(fds)} descriptors exceeds {FRAME_BYTES} and {MAX_DESCRIPTORS}"
        )
    header = _HEADER.pack(_MAGIC, PROTOCOL_VERSION, len(fds), len(payload))
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([header, payload], ancillary)


def receive(sock: socket.socket) -> tuple[Message, list[int]] | None:
    """Take one frame and its descriptors, which the caller then owns. None at the end of the stream.

    FrameError if it is malformed (descriptors are closed then); BlockingIOError if nothing has arrived.
    """
    space = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
    data, ancillary, flags, _ = sock.recvmsg(FRAME_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    fds = _descriptors(ancillary)
    if not data:
        return None
    try:
        return _decode(data, flags, len(fds)), fds
    except BaseException:
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        raise


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()


def _decode(data: bytes, flags: int, fd_count: int) -> Message:
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise FrameError(f"a control frame exceeds {FRAME_BYTES} bytes or {MAX_DESCRIPTORS} descriptors")
    if len(data) < _HEADER.size:
        raise FrameError(f"a control frame has {len(data)} bytes, fewer than its header's {_HEADER.size}")
    magic, version, descriptors, size = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != PROTOCOL_VERSION:
        raise FrameError(f"a control frame has version {version}, expected {PROTOCOL_VERSION}; reinstall colibrid")
    if size != len(data) - _HEADER.size or descriptors != fd_count:
        raise FrameError(f"a control frame says {size} bytes and {descriptors} descriptors, but brings others")
    try:
        return msgspec.msgpack.decode(data[_HEADER.size :], type=Message)
    except msgspec.MsgspecError as error:
        raise FrameError(f"a control frame cannot be read ({error}); reinstall colibrid") from error
