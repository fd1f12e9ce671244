"""The text of one generation: ids in, text out, stop ids and stop strings obeyed. Pure; no I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from colibrid.text.detokenizer import detokenizer
from colibrid.text.stop import StopMatcher

if TYPE_CHECKING:
    from colibrid.text.tokenizer import Tokenizer


class OutputOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How ids become text."""

    stops: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    include_stop: bool = False  # keep the stop string, or the text of the stop id
    skip_special_tokens: bool = True
    shown_special_ids: frozenset[int] = frozenset()  # not skipped: whoever reads the text looks for them
    min_tokens: int = 0  # no stop string ends before so many tokens


class OutputText:
    """One generation's text so far. Push each id once, in order; then `finish`."""

    __slots__ = ("_detokenizer", "_matcher", "_min_tokens", "_silent", "_stops", "chars", "tokens")

    def __init__(self, tokenizer: Tokenizer, options: OutputOptions) -> None:
        self._silent = frozenset[int]() if options.include_stop else options.stop_token_ids  # ids without text
        self._min_tokens = options.min_tokens
        self._stops = bool(options.stops)
        self._detokenizer = detokenizer(
            tokenizer, skip_special_tokens=options.skip_special_tokens, shown=options.shown_special_ids
        )
        self._matcher = StopMatcher(options.stops, include=options.include_stop)
        self.tokens = 0  # ids pushed
        self.chars = 0  # characters decoded, given out or not: where the next token begins

    @property
    def stopped(self) -> bool:
        """True once a stop string is complete: nothing more may be pushed."""
        return self._matcher.matched is not None

    def push(self, token: int) -> str:
        """Takes one id, returns the text that is certain now."""
        self.tokens += 1
        if token in self._silent:
            return ""
        piece = self._detokenizer.push(token)
        self.chars += len(piece)
        return self._matcher.push(piece, armed=self.tokens >= self._min_tokens) if self._stops else piece

    def push_all(self, tokens: list[int]) -> str:
        """As `push` for each, where there are no stop strings, at less than the price of each."""
        assert not self._stops, "a stop string may end the text at any of them"
        self.tokens += len(tokens)
        silent = self._silent
        piece = self._detokenizer.push_all([one for one in tokens if one not in silent] if silent else tokens)
        self.chars += len(piece)
        return piece

    def finish(self) -> str:
        """The rest of the text. Call once, when no more ids come."""
        if self.stopped:
            return ""
        text = self._matcher.push(self._detokenizer.flush())
        return text if self.stopped else text + self._matcher.flush()
