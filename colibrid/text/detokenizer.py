"""Token ids to text, piece by piece, as they are generated.

A piece never ends inside a UTF-8 character, and all pieces joined are what the tokenizer's own decoder makes of all ids
at once. Three ways:

- byte-level: every id stands for bytes, which run through an incremental UTF-8 decoder;
- byte fallback: ids stand for text, and some for single bytes. The decoder reads a run of such bytes as UTF-8, or, when
  they are not, each of them as U+FFFD; so a run is held until it ends;
- any other decoder: a window of recent ids is decoded twice, and the difference is the piece.
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

    def push_all(self, tokens: list[int]) -> str:
        """The same of several ids."""

    def flush(self) -> str:
        """Returns what was held back: an unfinished character reads as U+FFFD. Call once, at the end."""


def detokenizer(tokenizer: Tokenizer, *, skip_special_tokens: bool, shown: frozenset[int] = frozenset()) -> Detokenizer:
    """A fresh detokenizer for one sequence. `shown`: special tokens that are not skipped."""
    hidden = tokenizer.special_ids - shown if skip_special_tokens else frozenset()
    if tokenizer.decoder_kind == "byte_level":
        return ByteDetokenizer(tokenizer, hidden)
    if tokenizer.decoder_kind == "byte_fallback":
        return FallbackDetokenizer(tokenizer, hidden)
    return WindowDetokenizer(tokenizer, hidden)


class ByteDetokenizer:
    """For tokenizers whose ids stand for bytes."""

    __slots__ = ("_bytes_of", "_decoder", "_hidden", "_holds")

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._holds = False  # the decoder, part of a character

    def push(self, token: int) -> str:
        if token in self._hidden:
            return ""
        return self._text(self._bytes_of(token))

    def push_all(self, tokens: list[int]) -> str:
        hidden, bytes_of = self._hidden, self._bytes_of
        return self._text(b"".join([bytes_of(token) for token in tokens if token not in hidden]))

    def _text(self, raw: bytes) -> str:
        if not self._holds:
            try:
                return raw.decode()  # most tokens are whole characters: half the time of the incremental decoder
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(raw)
        self._holds = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class FallbackDetokenizer:
    """For tokenizers whose ids stand for text, or for a single byte where there is no piece of text."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._run: list[bytes] = []  # bytes that no other id has followed yet
        self._at_start = tokenizer.strips_first_space

    def push(self, token: int) -> str:
        raw = self._tokenizer.token_bytes(token)
        if token in self._hidden or not raw:
            return ""
        if self._tokenizer.is_byte(token):
            self._run.append(raw)
            return ""
        return self._give(self._end_run() + raw.decode("utf-8"))

    def push_all(self, tokens: list[int]) -> str:
        return "".join(map(self.push, tokens))

    def flush(self) -> str:
        return self._give(self._end_run())

    def _end_run(self) -> str:
        text = _run_text(self._run)
        self._run = []
        return text

    def _give(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text


def _run_text(run: list[bytes]) -> str:
    try:
        return b"".join(run).decode("utf-8")
    except UnicodeDecodeError:
        return _REPLACEMENT * len(run)


class WindowDetokenizer:
    """For all other tokenizers: what the newest ids add to the text of the ids just before them."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._context: list[int] = []  # ids whose text has been given out
        self._held: list[int] = []  # ids after them whose text has not

    def push(self, token: int) -> str:
        if token in self._hidden or not self._tokenizer.has_piece(token):
            return ""
        self._held.append(token)
        if self._tokenizer.is_byte(token):  # what it reads as is known when the run has ended
            return ""
        piece = self._difference()
        if piece.endswith(_REPLACEMENT) and len(self._held) < _HELD_IDS:
            return ""
        return self._give(piece)

    def push_all(self, tokens: list[int]) -> str:
        return "".join(map(self.push, tokens))

    def flush(self) -> str:
        return self._give(self._difference()) if self._held else ""

    def _difference(self) -> str:
        before = self._tokenizer.decode(self._context, skip_special_tokens=False) if self._context else ""
        after = self._tokenizer.decode(self._context + self._held, skip_special_tokens=False)
        return after[len(before) :]

    def _give(self, piece: str) -> str:
        # Never empty from now on, else the next id would look like the first of all.
        self._context = (self._context + self._held)[-_HELD_IDS:]
        self._held = []
        return piece
