"""Control frames: what is sent arrives, and what is malformed is refused."""

from __future__ import annotations

import os
import socket
import struct
from typing import TYPE_CHECKING

import pytest
from descriptors import open_descriptors

from colibrid.config.settings import Settings
from colibrid.engine import control
from colibrid.engine.spec import channel_shape, make_spec
from colibrid.engine.state import MemoryPlan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from colibrid.model.pack import Pack

PLAN = MemoryPlan(weights=1, kv=2, kv_bytes_per_token=3, kv_tokens=4, temp=5, dispatch=6, host=7, total=8)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.setblocking(False)
        yield ours, theirs


@pytest.mark.parametrize(
    "message",
    [
        control.Stop(),
        control.Check(),
        control.Opening(),
        control.Ready(memory=PLAN, device="cpu", pack_ms=1.5, open_ms=2.5),
        control.Failed(kind="model", message="dense.bin: 12 bytes expected"),
        control.Log(level="warning", event="something", fields={"a": 1, "b": "x", "c": 0.5, "d": True}),
    ],
)
def test_messages_arrive_as_sent(message: control.Message, pair: tuple[socket.socket, socket.socket]) -> None:
    """Every kind of message survives the way."""
    control.send(pair[0], message)
    assert control.receive(pair[1]) == (message, [])


def test_open_brings_its_descriptors(pair: tuple[socket.socket, socket.socket], bundled_pack: Pack) -> None:
    """Descriptors arrive as new ones for the same files, closed on exec."""
    spec = make_spec(Settings(), "folder", bundled_pack.manifest)
    message = control.Open(spec=spec, channel=channel_shape(spec, bundled_pack.manifest), daemon_pid=7)
    fds = [os.memfd_create("a"), os.eventfd(0), os.eventfd(0)]
    control.send(pair[0], message, fds)
    received = control.receive(pair[1])
    assert received is not None
    assert received[0] == message
    assert [os.fstat(fd).st_ino for fd in received[1]] == [os.fstat(fd).st_ino for fd in fds]
    assert not any(os.get_inheritable(fd) for fd in received[1])
    for fd in [*fds, *received[1]]:
        os.close(fd)


def test_end_and_emptiness_are_told_apart(pair: tuple[socket.socket, socket.socket]) -> None:
    """Nothing there raises BlockingIOError, the other side's end gives None."""
    with pytest.raises(BlockingIOError):
        control.receive(pair[1])
    pair[0].close()
    assert control.receive(pair[1]) is None


def frame(
    payload: bytes,
    *,
    magic: bytes = b"CLBF",
    version: int = control.PROTOCOL_VERSION,
    fds: int = 0,
    size: int | None = None,
) -> bytes:
    return struct.pack("<4sHHI", magic, version, fds, len(payload) if size is None else size) + payload


STOP = b"\x81\xa4type\xa4stop"


@pytest.mark.parametrize(
    "data",
    [
        b"x",
        frame(STOP, magic=b"XXXX"),
        frame(STOP, version=control.PROTOCOL_VERSION + 1),
        frame(STOP, size=3),
        frame(STOP, fds=1),
        frame(b"\x81\xa4type\xa4none"),
        frame(b"\x82\xa4type\xa4stop\xa1x\x01"),
        frame(b"\xc1"),
        frame(b""),
    ],
)
def test_malformed_frames_are_refused(data: bytes, pair: tuple[socket.socket, socket.socket]) -> None:
    """Magic, version, sizes, tag and fields are all checked."""
    pair[0].send(data)
    with pytest.raises(control.FrameError):
        control.receive(pair[1])


def test_descriptors_of_a_refused_frame_are_closed(pair: tuple[socket.socket, socket.socket]) -> None:
    """A frame that is refused leaves no descriptor behind."""
    fd = os.eventfd(0)
    before = open_descriptors()
    socket.send_fds(pair[0], [frame(STOP)], [fd])
    with pytest.raises(control.FrameError):
        control.receive(pair[1])
    assert open_descriptors() == before
    os.close(fd)


def test_frames_have_a_limit(pair: tuple[socket.socket, socket.socket]) -> None:
    """A frame over the limit is refused by its sender, and by its receiver if one comes nevertheless."""
    with pytest.raises(control.FrameError):
        control.send(pair[0], control.Failed(kind="engine", message="x" * control.FRAME_BYTES))
    pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    pair[0].send(frame(b"x" * control.FRAME_BYTES))
    with pytest.raises(control.FrameError, match="exceeds"):
        control.receive(pair[1])


def test_long_messages_are_shortened_on_character_borders() -> None:
    """An error text of any length fits into a frame and stays valid text."""
    text = control.shorten("ü" * 100_000)
    assert len(text.encode()) < control.FRAME_BYTES // 2
    assert text.endswith("…")
    assert control.shorten("short") == "short"
