"""Finds tool calls in a reply that arrives in pieces. Pure; no I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from colibrid.text.tools import Layout, ToolFormat


class Content(NamedTuple):
    """Text for the user."""

    text: str


class Reasoning(NamedTuple):
    """Text of the model's thinking."""

    text: str


class CallStart(NamedTuple):
    """The next call: its name is known."""

    name: str


class CallArguments(NamedTuple):
    """More of the newest call's arguments."""

    text: str


Event = Content | Reasoning | CallStart | CallArguments


class Reader(Protocol):
    """One reply being read. Push pieces of text in order, then finish once."""

    def push(self, text: str) -> list[Event]:
        """What is certain now."""

    def finish(self) -> list[Event]:
        """The rest."""


class PlainReader:
    """For requests without tools: all is content."""

    def push(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


class SteppingReader:
    """A reader that keeps what is not decided yet and takes one decision after another."""

    _text = ""  # not decided yet

    def push(self, text: str) -> list[Event]:
        self._text += text
        events: list[Event] = []
        while self._step(events):
            pass
        return events

    def _step(self, events: list[Event]) -> bool:
        """One decision; False when it takes more text."""
        raise NotImplementedError


class FreeReader(SteppingReader):
    """Calls among text that no grammar bounds. A section that is not complete and right to the last character is content.

    White space around sections is dropped.
    """

    def __init__(self, form: ToolFormat, names: frozenset[str], *, single: bool = False) -> None:
        """`single`: of several calls in one section only the first counts."""
        self._form = form
        self._names = names
        self._single = single
        self._searched = 0  # of it, within a section
        self._inside = False
        self._plain = False  # no section can begin any more
        self._called = False  # white space that follows is dropped unless text comes

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._inside:
            self._end_section(len(self._text), events, complete=self._form.end is None)
        if self._text and not (self._called and self._text.isspace()):
            events.append(Content(self._text))
        return events

    def _step(self, events: list[Event]) -> bool:
        if not self._inside:
            return self._find_begin(events)
        if self._form.end is None:
            return False
        place = self._text.find(self._form.end, max(0, self._searched - len(self._form.end)))
        self._searched = len(self._text)
        if place < 0:
            return False
        self._end_section(place + len(self._form.end), events, complete=True)
        return True

    def _find_begin(self, events: list[Event]) -> bool:
        form = self._form
        if self._plain:
            place, keep = -1, 0
        elif form.at_start:
            text = self._text.lstrip()
            place = len(self._text) - len(text) if text.startswith(form.begins) else -1
            undecided = any(begin.startswith(text) for begin in form.begins)
            keep = len(self._text) if undecided else 0
            self._plain = place < 0 and not undecided
        else:
            found = [found for begin in form.begins if (found := self._text.find(begin)) >= 0]
            place = min(found, default=-1)
            keep = unfinished(self._text, form.begins)
        if place >= 0:
            before = self._text[:place].rstrip()
            if before:
                events.append(Content(before))
            self._text, self._inside, self._searched = self._text[place:], True, 0
            return True
        certain = len(self._text) - keep
        if not self._plain:
            certain = len(self._text[:certain].rstrip())  # dropped if a section follows
        if certain > 0:
            events.append(Content(self._text[:certain]))
            self._text, self._called = self._text[certain:], False
        return False

    def _end_section(self, length: int, events: list[Event], *, complete: bool) -> None:
        section, self._text, self._inside = self._text[:length], self._text[length:], False
        calls = self._form.parse(section, self._names) if complete else None
        if calls is None:
            events.append(Content(section))
            return
        self._called = True
        for call in calls[:1] if self._single else calls:
            events += [CallStart(call.name), CallArguments(call.arguments)]


def unfinished(text: str, markers: Sequence[str]) -> int:
    """Length of the longest tail of `text` that one of `markers` begins with, none being there as a whole."""
    most = max(map(len, markers)) - 1
    for count in range(min(most, len(text)), 0, -1):
        if any(marker.startswith(text[-count:]) for marker in markers):
            return count
    return 0


class LayoutReader(SteppingReader):
    """Calls that a grammar forces to a layout: names and arguments are passed on as they come."""

    def __init__(self, layout: Layout, names: frozenset[str]) -> None:
        self._layout = layout
        self._openings = {layout.opening.replace("{}", name): name for name in names}
        self._state: Callable[[list[Event]], bool] = self._start
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def finish(self) -> list[Event]:
        return []  # cut within words of the layout: they mean nothing

    def _step(self, events: list[Event]) -> bool:
        return self._state(events)

    def _take(self, literal: str) -> bool:
        if not self._text.startswith(literal):
            return False
        self._text = self._text[len(literal) :]
        return True

    def _start(self, _events: list[Event]) -> bool:
        if self._take(self._layout.start):
            self._state = self._opening
            return True
        return False

    def _opening(self, events: list[Event]) -> bool:
        for opening, name in self._openings.items():
            if self._take(opening):
                events.append(CallStart(name))
                self._state = self._arguments
                return True
        return False

    def _arguments(self, events: list[Event]) -> bool:
        for place, character in enumerate(self._text):
            if self._ends_with(character):
                events.append(CallArguments(self._text[: place + 1]))
                self._text = self._text[place + 1 :]
                self._state = self._closing
                return True
        if self._text:
            events.append(CallArguments(self._text))
            self._text = ""
        return False

    def _ends_with(self, character: str) -> bool:
        """True iff this character closes the object of the arguments."""
        if self._quoted:
            self._quoted = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
        elif character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth == 0
        return False

    def _closing(self, _events: list[Event]) -> bool:
        if self._take(self._layout.closing):
            self._state = self._next
            return True
        return False

    def _next(self, _events: list[Event]) -> bool:
        if self._text and self._take(self._layout.between):
            self._state = self._opening
            return True
        return False  # the end, or nothing
