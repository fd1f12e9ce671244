"""Token ids to text, piece by piece, as they are generated.

A piece never ends inside a UTF-8 character, and all pieces joined are the text of all ids. Two ways:
where every id stands for fixed bytes, the bytes run through an incremental decoder (exact and cheap); for other
decoders a window of recent ids is decoded twice and the difference is the piece.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from colibrid.text.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_HELD_IDS = 16  # no character needs more ids; what is still broken then is broken for good


class Detokenizer(Protocol):
    """One sequence being turned into text."""

    def push(self, token: int) -> str:
        """Takes the next id and returns the text that is certain now, often with no wait, sometimes empty."""

    def flush(self) -> str:
        """Returns what was held back: an unfinished character reads as U+FFFD. Call once, at the end."""


def detokenizer(tokenizer: Tokenizer, *, skip_special_tokens: bool) -> Detokenizer:
    """A fresh detokenizer for one sequence."""
    hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
    if tokenizer.exact_bytes:
        return ByteDetokenizer(tokenizer, hidden)
    return WindowDetokenizer(tokenizer, hidden)


class ByteDetokenizer:
    """For tokenizers whose ids stand for bytes."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = tokenizer.strips_first_space

    def push(self, token: int) -> str:
        if token in self._hidden:
            return ""
        raw = self._bytes_of(token)
        if self._at_start and raw:
            self._at_start = False
            raw = raw.removeprefix(b" ")
        return self._decoder.decode(raw)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For all other tokenizers: what the newest ids add to the text of the ids just before them."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._context: list[int] = []  # ids whose text has been given out
        self._held: list[int] = []  # ids after them whose text has not

    def push(self, token: int) -> str:
        if token in self._hidden:
            return ""
        self._held.append(token)
        piece = self._difference()
        if piece.endswith(_REPLACEMENT) and len(self._held) < _HELD_IDS:
            return ""
        return self._give(piece)

    def flush(self) -> str:
        return self._give(self._difference()) if self._held else ""

    def _difference(self) -> str:
        before = self._tokenizer.decode(self._context, skip_special_tokens=False) if self._context else ""
        after = self._tokenizer.decode(self._context + self._held, skip_special_tokens=False)
        return after[len(before) :]

    def _give(self, piece: str) -> str:
        # Ids without text stay in the window, else the next id would look like the first of all.
        if piece:
            self._context = self._held[-_HELD_IDS:]
        else:
            self._context += self._held
        self._held = []
        return piece
