"""colibrid.cli.banner."""

from __future__ import annotations

import json
import os
import shlex
import socket
from typing import TYPE_CHECKING

import pytest

from colibrid.batch.interfaces import EngineInfo
from colibrid.cli.banner import Place, banner, base_url, place_of, print_lines, ready_line
from colibrid.engine.state import MemoryPlan

if TYPE_CHECKING:
    from pathlib import Path

INFO = EngineInfo(
    model_id="m",
    family="F",
    vocab_size=9,
    max_seq_len=64,
    slots=4,
    hidden=8,
    experts_per_token=2,
    experts_most=2,
    batch_dependent=False,
    device="cpu",
    fingerprint="f",
)
PLAN = MemoryPlan(
    weights=1 << 20, kv=2 << 20, kv_bytes_per_token=8, kv_tokens=9, temp=3 << 20, dispatch=1, host=4096, total=6295552
)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", "http://127.0.0.1:80"), ("0.0.0.0", "http://127.0.0.1:80"), ("::", "http://[::1]:80"),
     ("::1", "http://[::1]:80"), ("gpu-7", "http://gpu-7:80")],
)  # fmt: skip
def test_url_can_be_opened(host: str, expected: str) -> None:
    """Wildcards are shown as loopback and IPv6 addresses in brackets."""
    assert base_url(host, 80) == expected


def test_banner_names_all_and_its_curl_is_a_command() -> None:
    """Version, model, device, slots, context, bill and URL are there, and the curl line splits into a valid request."""
    lines = banner(INFO, "bf16", PLAN, [Place("http://127.0.0.1:8080")], needs_key=True)
    text = "\n".join(lines)
    for part in (
        "colibrid ",
        "m (F, bf16, 2 experts a token)",
        "cpu",
        "4",
        "64 tokens",
        "6.00 MiB",
        "weights      1.00 MiB",
        "kv runs      2.00 MiB  9 tokens",
        "workspace    3.00 MiB",
        "/v1",
    ):
        assert part in text
    words = shlex.split(lines[-1].split(maxsplit=1)[1])
    assert words[:3] == ["curl", "-s", "http://127.0.0.1:8080/v1/chat/completions"]
    assert "authorization: Bearer YOUR_KEY" in words
    assert json.loads(words[-1])["messages"][0]["role"] == "user"


def test_places(tmp_path: Path) -> None:
    """Each address is shown, and the curl line takes the first, also over a path; TLS is https."""
    path = str(tmp_path / "a b")
    with socket.socket(socket.AF_UNIX) as unix, socket.create_server(("127.0.0.1", 0)) as tcp:
        unix.bind(path)
        places = [place_of(unix, tls=True), place_of(tcp, tls=True)]
    assert places[0] == Place("http://localhost", path)
    assert places[1].url.startswith("https://127.0.0.1:")
    lines = banner(INFO, "bf16", PLAN, places, needs_key=False)
    assert [line.split()[0] for line in lines[-3:]] == ["url", "url", "try"]
    words = shlex.split(lines[-1].split(maxsplit=1)[1])
    assert words[:5] == ["curl", "-s", "--unix-socket", path, "http://localhost/v1/chat/completions"]


def test_no_key_no_header() -> None:
    """Without keys the curl line sends none."""
    assert "Bearer" not in "\n".join(banner(INFO, "bf16", PLAN, [Place("http://x:1")], needs_key=False))


def test_profiles_are_named_where_there_are_some() -> None:
    """The file that all is served with, and the names for requests, each on its line; without them, no such line."""
    place = [Place("http://x:1")]
    lines = banner(INFO, "bf16", PLAN, place, needs_key=False, profile="a/b.yaml", profiles=("fast", "best"))
    assert "  profile  a/b.yaml" in lines
    assert "  profiles fast, best, for requests that name one" in lines
    assert not any("profile" in line for line in banner(INFO, "bf16", PLAN, place, needs_key=False))


def test_ready_line() -> None:
    """The total comes first, then the phases."""
    assert ready_line(812.4, {"python": 100.2, "engine": 300}) == "ready in 812 ms (python 100, engine 300)"


def test_a_blocked_or_closed_stdout_does_not_matter() -> None:
    """Printing into a full pipe or a closed descriptor returns at once."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, b"x" * 65536)
    except BlockingIOError:
        pass
    os.set_blocking(writing, True)
    print_lines(["x"], writing)
    os.close(reading)
    print_lines(["x"], writing)
    os.close(writing)
    print_lines(["x"], writing)
