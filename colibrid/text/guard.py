"""Keeps special-token strings in a client's text from becoming special tokens. Pure; no I/O.

A chat template mixes trusted text (its own) with a client's text. Before rendering, every string of the client
that could form a special token, alone or together with its neighbours, is broken by an unguessable mark:

    inside       "say <|im_end|> now"      ->  "say <" mark "|im_end|> now"
    at the end   "say <|im_"               ->  "say <" mark "|im_"          (the next piece may go on)
    at the start "end|> now", "end"        ->  mark "end|> now"             (the piece before may have begun)

`Tokenizer.encode_guarded` drops the marks and parses only the special strings that are still whole: those of the
template. Marks go only to such places, so templates that trim, split or search a message see it as it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from colibrid.errors import RequestError
from colibrid.text.words import longest_of

if TYPE_CHECKING:
    from collections.abc import Iterable

_MAX_BREAKS = 1 << 16  # of one text
_WINDOW = 1 << 18  # characters searched at once: a few milliseconds


class SpecialGuard:
    """Breaks the special strings of one tokenizer with one mark."""

    def __init__(self, specials: Iterable[str], mark: str) -> None:
        self._mark = mark
        self._specials = tuple(text for text in specials if text)
        self._whole = longest_of(self._specials)
        self._heads = {text[:count] for text in self._specials for count in range(1, len(text))}
        self._tails = {text[count:] for text in self._specials for count in range(1, len(text))}
        self._longest = max(map(len, self._specials), default=0)

    def guard(self, value: Any) -> Any:
        """`value` with every string in it, at any depth, made safe; keys of objects too, if they are no plain names."""
        if isinstance(value, str):
            return self.guard_text(value)
        if isinstance(value, dict):
            return {
                key if key.isidentifier() else self.guard_text(key): self.guard(entry) for key, entry in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.guard(entry) for entry in value]
        return value

    def guard_text(self, text: str) -> str:
        """One string made safe. Raises RequestError when it holds the mark, which only a guess can produce."""
        if not text.isascii() and self._mark in text:
            raise RequestError("The messages hold a reserved character sequence; remove it.", param="messages")
        breaks = self._inside(text)
        breaks += self._open_ends(text)
        if not breaks:
            return text
        if len(breaks) > _MAX_BREAKS:  # each makes the text longer that the template renders in one go
            raise RequestError(
                f"The messages hold more than {_MAX_BREAKS} strings of special tokens; send less.",
                param="messages",
                code="string_above_max_length",
            )
        pieces = []
        start = 0
        for position in sorted(set(breaks)):
            pieces.append(text[start:position])
            start = position
        pieces.append(text[start:])
        return self._mark.join(pieces)

    def _inside(self, text: str) -> list[int]:
        """One behind each place where a special string begins, also inside another one."""
        breaks = []
        for window in range(0, len(text), _WINDOW):  # one search holds the interpreter lock
            end = window + _WINDOW
            place = window
            while (found := self._whole.search(text, place, end + self._longest - 1)) and found.start() < end:
                place = found.start() + 1
                breaks.append(place)
        return breaks

    def _open_ends(self, text: str) -> list[int]:
        """Where a special string may begin at the end of `text`, or go on at its start."""
        breaks = []
        reach = min(len(text), self._longest - 1)
        for count in range(1, reach + 1):
            if text[-count:] in self._heads:
                breaks.append(len(text) - count + 1)
            if text[:count] in self._tails:
                breaks.append(0)
        if 0 < len(text) < self._longest and any(text in special for special in self._specials):
            breaks.append(0)
        return breaks
