"""The message of a chat choice, written down whole or as deltas."""

from __future__ import annotations

import secrets
import string
from typing import TYPE_CHECKING, Any

import msgspec

from colibrid.text.tools_reader import CallArguments, CallStart, Content, Reasoning

if TYPE_CHECKING:
    from collections.abc import Iterable

    from colibrid.text.tools_reader import Event

_encode = msgspec.json.encode
_MANY = 64  # small pieces: joined, they take less memory
_EVENT_CHARS = 200  # of a call's beginning, about
_SHORT = string.ascii_letters + string.digits


class MessageWriter:
    """Collects what is new, in order; `take_deltas` or, for all at once, `whole`."""

    __slots__ = ("_calls", "_events", "_reasons", "_short_ids")

    def __init__(self, *, reasons: bool, short_ids: bool) -> None:
        """`reasons`: the message has reasoning_content; `short_ids`: ids of calls have nine characters."""
        self._reasons = reasons
        self._short_ids = short_ids
        self._events: list[Event] = []
        self._calls = 0  # written so far

    def add(self, events: Iterable[Event]) -> None:
        """Adds what is new."""
        self._events += events
        if len(self._events) >= _MANY:
            self._events = _joined(self._events)

    @property
    def chars(self) -> int:
        """That wait to be taken, about."""
        return sum(_EVENT_CHARS if isinstance(event, CallStart) else len(event.text) for event in self._events)

    def __bool__(self) -> bool:
        """True iff there is something to take."""
        return bool(self._events)

    def take_deltas(self) -> list[bytes]:
        """Deltas of what was added since the last time: neighbours of one kind joined, a call's name on its own."""
        deltas = [self._delta(event) for event in _joined(self._events)]
        self._events = []
        return deltas

    def _delta(self, event: Event) -> bytes:
        if isinstance(event, Content):
            return b'{"content":%b}' % _encode(event.text)
        if isinstance(event, Reasoning):
            return b'{"reasoning_content":%b}' % _encode(event.text)
        if isinstance(event, CallStart):
            self._calls += 1
            call = {"index": self._calls - 1} | self._call(event.name)
        else:
            call = {"index": self._calls - 1, "function": {"arguments": event.text}}
        return _encode({"tool_calls": [call]})

    def _call(self, name: str) -> dict[str, Any]:
        made = "".join(secrets.choice(_SHORT) for _ in range(9)) if self._short_ids else f"call_{secrets.token_hex(12)}"
        return {"id": made, "type": "function", "function": {"name": name, "arguments": ""}}

    def whole(self) -> dict[str, Any]:
        """The message as an object."""
        content: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for event in _joined(self._events):
            if isinstance(event, Content):
                content.append(event.text)
            elif isinstance(event, Reasoning):
                thoughts.append(event.text)
            elif isinstance(event, CallStart):
                calls.append(self._call(event.name))
            else:
                calls[-1]["function"]["arguments"] += event.text
        text = "".join(content)
        found: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if self._reasons:
            found["reasoning_content"] = "".join(thoughts) or None
        if calls:
            found["tool_calls"] = calls
        return found


def _joined(events: list[Event]) -> list[Event]:
    """Neighbours of one kind as one."""
    if len(events) == 1:
        return events
    joined: list[Event] = []
    run: list[str] = []
    for event in events:
        if isinstance(event, CallStart):
            run = _close(joined, run)
            joined.append(event)
            continue
        if run and type(event) is not type(joined[-1]):
            run = _close(joined, run)
        if not run:
            joined.append(event)
        run.append(event.text)
    _close(joined, run)
    return joined


def _close(joined: list[Event], run: list[str]) -> list[str]:
    if run:
        kind = type(joined[-1])
        assert issubclass(kind, Content | Reasoning | CallArguments), "calls start on their own"
        joined[-1] = kind("".join(run))
    return []
