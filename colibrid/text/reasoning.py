r"""Takes a model's thinking out of its reply. Pure; no I/O.

think      <think>\n hm \n</think>\n\n Hello         (the prompt may hold the opening tag already)
harmony    <|channel|>analysis<|message|> hm <|end|><|start|>assistant<|channel|>final<|message|> Hello
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from colibrid.text.structured import lark_string
from colibrid.text.tools_reader import (
    CallArguments,
    CallStart,
    Content,
    PlainReader,
    Reasoning,
    SteppingReader,
    unfinished,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from colibrid.text.structured import Grammar
    from colibrid.text.tools_reader import Event, Reader

Thinking = Literal["before", "inside", "behind"]
_OPEN, _CLOSE = "<think>", "</think>"
_CHANNEL, _MESSAGE, _START = "<|channel|>", "<|message|>", "<|start|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_TO = "to=functions."


def reasoning_parser(name: str, template: str) -> str:
    """`name`, or with `auto` what the template speaks of: think, harmony or none."""
    if name != "auto":
        return name
    if _CHANNEL in template and _MESSAGE in template:
        return "harmony"
    return "think" if _CLOSE in template else "none"


def markers(name: str) -> str:
    """Text in a reply that must not be hidden from the reader, even where it is special tokens."""
    return {"think": _OPEN + _CLOSE, "harmony": "\0".join((_CHANNEL, _MESSAGE, _START, *_ENDS, "<|constrain|>"))}.get(
        name, ""
    )


def thinking_at(prompt: str, continued: str = "") -> Thinking:
    """Where a reply to the prompt begins. `continued`: the message that it goes on with."""
    end = prompt.rstrip()
    if end.endswith(_OPEN) or continued.rfind(_OPEN) > continued.rfind(_CLOSE):
        return "inside"
    return "behind" if end.endswith(_CLOSE) or continued else "before"


class _CountingReader(SteppingReader):
    """Also counts the characters that were decided."""

    _taken = 0  # characters of the reply before _text

    def _drop(self, count: int) -> None:
        self._text = self._text[count:]
        self._taken += count


class ThinkReader(_CountingReader):
    """Thinking in tags, at the start of a reply; what follows goes to another reader."""

    def __init__(self, rest: Reader | None = None, *, inside: bool) -> None:
        self._rest = rest or PlainReader()
        self._state: Callable[[list[Event]], bool] = self._inside if inside else self._before
        self._trim = True  # line breaks at the start of a part
        self.reasoning_chars: int | None = None  # of the reply; none while it goes on
        self.thinks = inside

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._state == self._inside:
            if self._text.strip("\n"):
                events.append(Reasoning(self._text.strip("\n") if self._trim else self._text.rstrip("\n")))
        elif self._text:
            events += self._rest.push(self._text)
        return events + self._rest.finish()

    def _step(self, events: list[Event]) -> bool:
        return self._state(events)

    def _before(self, _events: list[Event]) -> bool:
        text = self._text.lstrip()
        if text.startswith(_OPEN):
            self._drop(len(self._text) - len(text) + len(_OPEN))
            self._state, self.thinks = self._inside, True
            return True
        if _OPEN.startswith(text):
            return False
        self.reasoning_chars = 0
        self._state, self._trim = self._after, False
        return True

    def _inside(self, events: list[Event]) -> bool:
        if self._trim:
            self._drop(len(self._text) - len(self._text.lstrip("\n")))
            self._trim = not self._text
        place = self._text.find(_CLOSE)
        certain = place if place >= 0 else len(self._text) - unfinished(self._text, (_CLOSE,))
        shown = self._text[:certain].rstrip("\n")
        if shown:
            events.append(Reasoning(shown))
        if place < 0:
            self._drop(len(shown))
            return False
        self._drop(place + len(_CLOSE))
        self.reasoning_chars = self._taken
        self._state, self._trim = self._after, True
        return True

    def _after(self, events: list[Event]) -> bool:
        if self._trim:
            self._drop(len(self._text) - len(self._text.lstrip("\n")))
            self._trim = not self._text
        if self._text:
            events += self._rest.push(self._text)
            self._drop(len(self._text))
        return False


class HarmonyReader(_CountingReader):
    """Messages in channels: analysis is thinking, what goes to a function is a call, all else is for the user."""

    def __init__(self, names: frozenset[str] = frozenset()) -> None:
        """`names`: functions that may be called."""
        self._names = names
        self._header: str | None = None  # of the message being read; none: before its text
        self._ended_chars = 0
        self.thinks = False

    @property
    def reasoning_chars(self) -> int | None:
        """Characters of the reply up to the end of its last thinking; none while that goes on."""
        return None if self.thinks and self._kind() == "analysis" else self._ended_chars

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._header is None:  # no channel at all: a model that does not keep to the format
            if self._text and not self._text.startswith((_CHANNEL, _START)):
                events.append(Content(self._text))
        else:
            self._give(self._text, events, complete=True)
        return events

    def _step(self, events: list[Event]) -> bool:
        if self._header is None:
            head, found, rest = self._text.partition(_MESSAGE)
            if not found:
                return False
            self._drop(len(self._text) - len(rest))
            self._header = head.rpartition(_CHANNEL)[2] if _CHANNEL in head else ""
            if self._kind() == "analysis":
                self.thinks = True
            return True
        places = [(place, end) for end in _ENDS if (place := self._text.find(end)) >= 0]
        if not places:
            if self._function() is None:
                keep = unfinished(self._text, _ENDS)
                self._give(self._text[: len(self._text) - keep], events, complete=False)
                self._drop(len(self._text) - keep)
            return False
        place, end = min(places)
        self._give(self._text[:place], events, complete=True)
        self._drop(place + len(end))
        if self._kind() == "analysis":
            self._ended_chars = self._taken
        self._header = None
        return True

    def _kind(self) -> str:
        words = (self._header or "").split()
        return words[0] if words else ""

    def _function(self) -> str | None:
        place = (self._header or "").find(_TO)
        words = (self._header or "")[place + len(_TO) :].replace("<|constrain|>", " ").split()
        return words[0] if place >= 0 and words else None

    def _give(self, text: str, events: list[Event], *, complete: bool) -> None:
        function = self._function()
        if self._kind() == "analysis":
            if text:
                events.append(Reasoning(text))
        elif function is None:
            if text:
                events.append(Content(text))
        elif complete:
            events += self._call(function, text)

    def _call(self, function: str, text: str) -> list[Event]:
        try:
            arguments = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            arguments = None
        if function in self._names and isinstance(arguments, dict):
            return [CallStart(function), CallArguments(text.strip())]
        return [Content(text)] if text else []


def behind_thinking(grammar: Grammar, name: str, added: Mapping[str, int], *, inside: bool, calls: bool) -> Grammar:
    """The grammar for a reply that may think first, as far as the model likes.

    `inside`: it is thinking already; `calls`: the grammar has calls only, which name their own channel.
    """

    def term(marker: str) -> str:
        return f"<[{added[marker]}]>" if marker in added else lark_string(marker)

    if name == "think":
        lark = f"start: {'thought' if inside else f'({term(_OPEN)} thought)?'} @body\n"
        if _CLOSE in added:
            lark += f"thought: TEXT {term(_CLOSE)} /\\n{{0,2}}/\nTEXT: /(.|\\n)*/\n"
        else:
            lark += "thought: until_close /\\n{0,2}/\nuntil_close[lazy]: /(.|\\n)*<\\/think>/\n"
    else:
        final = "" if calls else f'{term(_CHANNEL)} "final" {term(_MESSAGE)}'
        lark = (
            f"start: thought? {final} @body\n"
            f'thought: {term(_CHANNEL)} "analysis" {term(_MESSAGE)} TEXT {term(_ENDS[0])} {term(_START)} "assistant"\n'
            "TEXT: /(.|\\n)*/\n"
        )
    return msgspec.structs.replace(grammar, outer=(lark, *grammar.outer))
