"""One reply of a chat, taken apart into thinking, content and tool calls as it arrives. Pure; no I/O."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import msgspec

from colibrid.text.reasoning import HARMONY, HarmonyReader, ReasoningFormat, ThinkReader
from colibrid.text.tools import ToolFormat
from colibrid.text.tools_reader import CallStart, FreeReader, LayoutReader, PlainReader

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from colibrid.text.tools_reader import Event, Reader


class ReplyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What may be in a reply."""

    reasoning: ReasoningFormat | None = None  # none: it does not think
    inside: bool = False  # the prompt has opened the thinking
    form: ToolFormat | None = None  # none: no tools
    names: frozenset[str] = frozenset()  # of tools
    forced: bool = False  # a grammar allows calls only
    single: bool = False  # the reply ends with its first call

    def shown_ids(self, specials: Mapping[str, int]) -> frozenset[int]:
        """Special tokens that the readers must see."""
        text = "\0".join(one.markers for one in (self.reasoning, self.form) if one is not None)
        return frozenset(token for name, token in specials.items() if name in text)

    def _tools_reader(self) -> Reader:
        if self.form is None:
            return PlainReader()
        if self.forced:
            return LayoutReader(self.form.layout, self.names)
        return FreeReader(self.form, self.names, single=self.single)

    def reader(self) -> Reader:
        """A fresh reader."""
        if self.reasoning == HARMONY:
            return HarmonyReader(self.names)
        if self.reasoning is not None:
            return ThinkReader(self.reasoning, self._tools_reader(), inside=self.inside)
        return self._tools_reader()


class Reply:
    """One reply. Push text with the places of the tokens behind it, then finish."""

    def __init__(self, options: ReplyOptions) -> None:
        self._reader = options.reader()
        self._single = options.single and not options.forced  # a grammar sees to it by itself
        self._offsets: list[int] = []
        self.calls = 0  # so far

    def push(self, text: str, offsets: Sequence[int] = ()) -> list[Event]:
        """What is certain now. `offsets`: where in the whole text each new token begins."""
        self._offsets += offsets
        return self._counted(self._reader.push(text))

    def finish(self) -> list[Event]:
        """The rest."""
        return self._counted(self._reader.finish())

    @property
    def over(self) -> bool:
        """True once nothing more is wanted."""
        return self._single and self.calls > 0

    def _counted(self, events: list[Event]) -> list[Event]:
        self.calls += sum(isinstance(event, CallStart) for event in events)
        return events

    @property
    def reasoning_tokens(self) -> int:
        """Tokens up to the end of the thinking, its tags included."""
        reader = self._reader
        if not isinstance(reader, ThinkReader | HarmonyReader) or not reader.thinks:
            return 0
        chars = reader.reasoning_chars
        return len(self._offsets) if chars is None else bisect_left(self._offsets, chars)
