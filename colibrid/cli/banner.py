"""What `colibrid serve` prints when it is ready. Pure but for print_lines."""

from __future__ import annotations

import os
import shlex
import socket
from typing import TYPE_CHECKING, NamedTuple

from colibrid import __version__
from colibrid.cli.say import say_to
from colibrid.config.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from colibrid.batch.interfaces import EngineInfo
    from colibrid.engine.state import MemoryPlan

_EXAMPLE = '{"messages":[{"role":"user","content":"What is the capital of Norway?"}]}'


class Place(NamedTuple):
    """Where a client on this machine can ask."""

    url: str
    path: str | None = None  # of a socket that the URL is asked over


def place_of(listening: socket.socket, *, tls: bool) -> Place:
    """Where `listening` is reached."""
    name = listening.getsockname()
    if listening.family == socket.AF_UNIX:
        return Place("http://localhost", os.fsdecode(name))
    return Place(base_url(name[0], name[1], tls=tls))


def base_url(host: str, port: int, *, tls: bool = False) -> str:
    """What a client on this machine can open: wildcard addresses become loopback."""
    scheme = "https" if tls else "http"
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104 (compared, not bound)
    return f"{scheme}://[{shown}]:{port}" if ":" in shown else f"{scheme}://{shown}:{port}"


def banner(
    info: EngineInfo,
    formats: str,
    memory: MemoryPlan,
    places: Sequence[Place],
    *,
    needs_key: bool,
    engines: int = 1,
    profile: str | None = None,
    profiles: Iterable[str] = (),
) -> list[str]:
    """The lines about one served model; `memory` is the bill of one engine, `profile` the file it is served with, and
    `profiles` are the names that requests may give.
    """
    experts = f", {info.experts_per_token} experts a token" if info.experts_per_token else ""
    first = places[0]
    way = [] if first.path is None else ["--unix-socket", first.path]
    curl = ["curl", "-s", *way, f"{first.url}/v1/chat/completions", "-H", "content-type: application/json"]
    total, *parts = memory_lines(memory)
    key = [] if not needs_key else ["-H", "authorization: Bearer YOUR_KEY"]
    return [
        f"colibrid {__version__}",
        f"  model    {info.model_id} ({info.family}, {formats}{experts})",
        *([] if profile is None else [f"  profile  {profile}"]),
        *([] if not profiles else [f"  profiles {', '.join(profiles)}, for requests that name one"]),
        f"  device   {info.device}",
        *([] if engines == 1 else [f"  engines  {engines}, each with a device, slots and memory as shown here"]),
        f"  slots    {info.slots}",
        f"  context  {info.max_seq_len} tokens",
        f"  memory   {total}",
        *(f"         {line}" for line in parts),
        *(f"  url      {place.url}/v1" + (f" over {place.path}" if place.path else "") for place in places),
        f"  try      {shlex.join([*curl, *key, '-d', _EXAMPLE])}",
    ]


def memory_lines(plan: MemoryPlan) -> list[str]:
    """The bill: the sum, then a line a part."""
    notes = {"kv runs": f"{plan.kv_tokens} tokens"}
    if plan.dispatch:
        notes["workspace"] = f"of which {format_bytes(plan.dispatch)} for experts, partials of (token, rank) included"
    if plan.graphs:
        notes["graphs"] = "at most"
    if plan.pinned:
        notes["engine"] = f"on the host, {format_bytes(plan.pinned)} of it page-locked"
    rows = ((name, format_bytes(size), notes.get(name, "")) for name, size in plan.parts())
    return [format_bytes(plan.total), *(f"  {name:<10} {size:>10}  {note}".rstrip() for name, size, note in rows)]


def ready_line(total_ms: float, phases: Mapping[str, float]) -> str:
    """Give a line such as `ready in 812 ms (python 120, engine 300)`; phases overlap, so they need not add up."""
    shown = ", ".join(f"{name} {ms:.0f}" for name, ms in phases.items())
    return f"ready in {total_ms:.0f} ms ({shown})"


def print_lines(lines: Iterable[str], descriptor: int = 1) -> None:
    """To stdout if somebody takes it: a blocked, closed or full stdout must not stop a daemon."""
    say_to("\n".join(lines) + "\n", descriptor)
