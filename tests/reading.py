"""Replies read in pieces, as the tests of readers do it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from colibrid.text.tools_reader import CallStart

if TYPE_CHECKING:
    from collections.abc import Callable

    from colibrid.text.tools_reader import Event, Reader

NAMES = frozenset({"f", "get_weather"})


def joined(events: list[Event]) -> list[Event]:
    """Neighbours of one kind as one."""
    found: list[Event] = []
    for event in events:
        if found and type(found[-1]) is type(event) and not isinstance(event, CallStart):
            found[-1] = type(event)(found[-1].text + event.text)
        else:
            found.append(event)
    return found


def read(make: Callable[[], Reader], text: str, cuts: int = 20) -> list[Event]:
    """The events of a reply, the same however it is cut."""
    whole = None
    for seed in range(cuts):
        rng = random.Random(seed)
        reader, events, place = make(), [], 0
        while place < len(text):
            count = len(text) if seed == 0 else rng.randint(1, 1 if seed == 1 else 12)
            events += reader.push(text[place : place + count])
            place += count
        events = joined(events + reader.finish())
        if whole is not None and events != whole:
            raise AssertionError(f"{events} when cut one way, {whole} another")
        whole = events
    return whole or []


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
