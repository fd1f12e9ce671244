r"""Takes a model's thinking out of its reply. Pure; no I/O.

think      <think>\n hm \n</think>\n\n Hello         (the prompt may hold the opening tag already)
harmony    <|channel|>analysis<|message|> hm <|end|><|start|>assistant<|channel|>final<|message|> Hello
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

import msgspec

from colibrid.text.structured import lark_regex, lark_terms
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
_CHANNEL, _MESSAGE, _START = "<|channel|>", "<|message|>", "<|start|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_TO = "to=functions."


class ReasoningFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a model thinks: between two marks, at the start of its reply."""

    name: str
    begin: str
    end: str

    def __post_init__(self) -> None:
        for field, mark in (("begin", self.begin), ("end", self.end)):
            if not mark or mark != mark.strip():
                raise ValueError(
                    f"reasoning format {self.name}: {field} = {mark!r} must be a text without white space around it"
                )

    @property
    def markers(self) -> str:
        """Text in a reply that must not be hidden from the reader, even where it is special tokens."""
        return "\0".join((self.begin, self.end, *(_HARMONY_MARKS if self == HARMONY else ())))


THINK = ReasoningFormat(name="think", begin="<think>", end="</think>")
# Read by HarmonyReader, since thinking has a channel as calls have.
HARMONY = ReasoningFormat(name="harmony", begin=f"{_CHANNEL}analysis{_MESSAGE}", end=_ENDS[0])
_HARMONY_MARKS = (_CHANNEL, _MESSAGE, _START, *_ENDS, "<|constrain|>")


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """The format of that name, or with `auto` what the template speaks of; none for `none` and templates without."""
    if name == "auto" and _CHANNEL in template and _MESSAGE in template:
        return HARMONY
    if name == "auto":
        return THINK if THINK.end in template else None
    return {"think": THINK, "harmony": HARMONY}.get(name)


def thinking_at(form: ReasoningFormat | None, prompt: str, continued: str = "") -> Thinking:
    """Where a reply to the prompt begins. `continued`: the message that it goes on with."""
    if form is not None and form != HARMONY:
        text = prompt.rstrip()
        if text.endswith(form.begin) or continued.rfind(form.begin) > continued.rfind(form.end):
            return "inside"
        if text.endswith(form.end):
            return "behind"
    return "behind" if continued else "before"


class _CountingReader(SteppingReader):
    """Also counts the characters that were decided."""

    _taken = 0  # characters of the reply before _text

    def _drop(self, count: int) -> None:
        self._text = self._text[count:]
        self._taken += count


class ThinkReader(_CountingReader):
    """Thinking between marks, at the start of a reply; what follows goes to another reader."""

    def __init__(self, form: ReasoningFormat = THINK, rest: Reader | None = None, *, inside: bool) -> None:
        self._begin, self._end = form.begin, form.end
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
        if text.startswith(self._begin):
            self._drop(len(self._text) - len(text) + len(self._begin))
            self._state, self.thinks = self._inside, True
            return True
        if self._begin.startswith(text):
            return False
        self.reasoning_chars = 0
        self._state, self._trim = self._after, False
        return True

    def _inside(self, events: list[Event]) -> bool:
        if self._trim:
            self._drop(len(self._text) - len(self._text.lstrip("\n")))
            self._trim = not self._text
        place = self._text.find(self._end)
        certain = place if place >= 0 else len(self._text) - unfinished(self._text, (self._end,))
        shown = self._text[:certain].rstrip("\n")
        if shown:
            events.append(Reasoning(shown))
        if place < 0:
            self._drop(len(shown))
            return False
        self._drop(place + len(self._end))
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


def behind_thinking(
    grammar: Grammar,
    form: ReasoningFormat,
    added: Mapping[str, int],
    words: re.Pattern[str],
    *,
    inside: bool,
    calls: bool,
) -> Grammar:
    """The grammar for a reply that may think first, as far as the model likes.

    `added`: ids of the tokenizer's added tokens by their text; `words` finds these. `inside`: it is thinking already;
    `calls`: the grammar has calls only, which name their own channel.
    """

    def terms(text: str) -> str:
        return lark_terms(text, words, added)

    if form == HARMONY:
        final = "" if calls else f'{terms(_CHANNEL)} "final" {terms(_MESSAGE)}'
        lark = (
            f"start: thought? {final} @body\n"
            f'thought: {terms(form.begin)} TEXT {terms(form.end)} {terms(_START)} "assistant"\n'
            "TEXT: /(.|\\n)*/\n"
        )
    else:
        lark = f"start: {'thought' if inside else f'({terms(form.begin)} thought)?'} @body\n"
        token = words.search(form.end)
        if token is not None:  # which no text holds
            before, rest = form.end[: token.start()], form.end[token.start() :]
            upto = lark_regex(f"(.|\\n)*{re.escape(before)}")
            lark += f"thought: UPTO {terms(rest)} /\\n{{0,2}}/\nUPTO: {upto}\n"
        else:
            until_end = lark_regex(f"(.|\\n)*{re.escape(form.end)}")
            lark += f"thought: until_end /\\n{{0,2}}/\nuntil_end[lazy]: {until_end}\n"
    return msgspec.structs.replace(grammar, outer=(lark, *grammar.outer))
