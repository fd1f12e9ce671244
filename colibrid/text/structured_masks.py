"""Compiled grammars and the masks of running requests.

    grammar ─▶ GrammarChecker (own process) ─▶ compiled once, thread "grammar" ─▶ cache
                                                             │ a copy for each request
    token ─────────────────────────────────▶ Masker, thread "mask" ─▶ mask of the next position

llguidance lets go of the interpreter's lock while it works. One thread computes all masks: a grammar that is slow delays
other constrained requests, at most MASK_CPU_S at a time and soon MASK_MEAN_CPU_S on the average, and no request without
a grammar.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import llguidance
import tokenizers

from colibrid.errors import RequestError
from colibrid.text.structured_check import GrammarChecker
from colibrid.text.structured_limits import CACHED_CHARS, CACHED_GRAMMARS, MASK_CPU_S, MASK_MEAN_CPU_S, parser_limits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from colibrid.text.structured import Grammar
    from colibrid.text.tokenizer import Tokenizer

_SHOWN = 300  # characters of what llguidance says


class _Compiled:
    """A grammar that was compiled, or what is wrong with it."""

    def __init__(self, make: Callable[[], llguidance.LLMatcher]) -> None:
        self._make = make
        self._matcher = make()
        self.first = b"" if self._matcher.is_error() else self._matcher.compute_bitmask()
        self.error = _shown(self._matcher.get_error())
        if not self.error and (not any(self.first) or self._matcher.stop_reason() == "NoExtensionBias"):
            self.error = "nothing satisfies it"

    def matcher(self) -> llguidance.LLMatcher:
        """A fresh matcher. All share the states of one lexer, which grow with what their requests generate."""
        return self._matcher.deep_copy()

    def renew(self) -> None:
        """Starts over with an empty lexer. For the thread of masks only."""
        self._matcher = self._make()


class Masker:
    """The masks of one request, position by position."""

    def __init__(self, compiled: _Compiled, thread: ThreadPoolExecutor, mask_bytes: int) -> None:
        self._compiled = compiled
        self._thread = thread
        self._mask_bytes = mask_bytes
        self._matcher: llguidance.LLMatcher | None = None
        self._tokens: list[int] = []  # so far
        self._spent = 0.0  # seconds of the thread, for all masks so far

    @property
    def first(self) -> bytes:
        """Allowed ids of output position 0: id i iff bit i % 8 of byte i // 8 is set."""
        return self._sized(self._compiled.first)

    async def after(self, tokens: Sequence[int]) -> bytes:
        """Allowed ids of the position behind these newest tokens. Raises RequestError when that takes too long."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._after, tokens)

    def _after(self, tokens: Sequence[int]) -> bytes:
        started = time.thread_time()
        self._tokens += tokens
        if self._matcher is None:
            self._matcher = self._compiled.matcher()
        self._matcher.consume_tokens(list(tokens))
        mask: bytes = self._matcher.compute_bitmask()
        if self._matcher.is_error():  # often because the lexer is full of what other requests have generated
            self._compiled.renew()
            self._matcher = self._compiled.matcher()
            self._matcher.consume_tokens(self._tokens)
            mask = self._matcher.compute_bitmask()
        spent = time.thread_time() - started
        self._spent += spent
        too_slow = spent > MASK_CPU_S or self._spent > MASK_CPU_S + MASK_MEAN_CPU_S * len(self._tokens)
        if self._matcher.is_error() or too_slow:
            raise RequestError(
                "The schema or grammar is too complex to follow further"
                f" ({_shown(self._matcher.get_error()) or f'{self._spent:.1f} s for {len(self._tokens)} tokens'}); simplify it.",
                code="grammar_too_complex",
            )
        return self._sized(mask)

    def _sized(self, mask: bytes) -> bytes:
        # llguidance knows the tokenizer's ids, the engine those of the head: often a few more, never with text.
        return mask[: self._mask_bytes].ljust(self._mask_bytes, b"\0")


class Vocabulary:
    """A model's tokens, as llguidance takes them. Made once, when the model is loaded; may be shared."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> None:
        """Takes a second or two for a large vocabulary. Raises ValueError when llguidance cannot use it."""
        if not eos_token_ids:
            raise ValueError("the model names no end token")
        words = llguidance.TokenizerWrapper(_Words(tokenizer, eos_token_ids))
        self.words = llguidance.LLTokenizer(words, n_vocab=tokenizer.vocab_size, eos_token=list(eos_token_ids))


class _Words:
    """What TokenizerWrapper wants to know. All added tokens count as special: text never forms them."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> None:
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.added_ids.values())
        self._plain = tokenizers.Tokenizer.from_str(tokenizer.source_all_special())
        self._plain.encode_special_tokens = True

    def __call__(self, text: bytes | str) -> list[int]:
        """Called by llguidance, from its threads, for text that a grammar leaves no choice about."""
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids


class StructuredOutput:
    """One server's grammars: owns the threads, the checker and the cache. Lives on the event loop."""

    def __init__(self, vocabulary: Vocabulary | None, mask_bytes: int) -> None:
        """`vocabulary`: none if the model's tokenizer cannot be used. `mask_bytes`: size of all masks."""
        self._vocabulary = vocabulary
        self._mask_bytes = mask_bytes
        self._limits = parser_limits()
        self._checker = GrammarChecker()
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._masks = ThreadPoolExecutor(1, thread_name_prefix="mask")
        self._cache: OrderedDict[str, asyncio.Future[_Compiled | str]] = OrderedDict()
        self._waiting: Counter[asyncio.Future[_Compiled | str]] = Counter()  # requests, by what they wait for

    async def masker(self, grammar: Grammar) -> Masker:
        """Masks for one more request. Raises RequestError when the grammar does not compile or is too complex."""
        if self._vocabulary is None:
            raise RequestError(
                "The model's tokenizer cannot be used for structured output; ask for the format in the prompt.",
                param=grammar.param,
                code="unsupported_value",
            )
        text = grammar.text
        found = self._cache.get(text)
        if found is None or found.cancelled():
            found = self._remember(text, asyncio.ensure_future(self._compile(text)))
        else:
            self._cache.move_to_end(text)
        compiled = await self._finished(text, found)
        if isinstance(compiled, str):
            raise RequestError(
                f"{grammar.param} cannot be used: {compiled}.", param=grammar.param, code="invalid_value"
            )
        return Masker(compiled, self._masks, self._mask_bytes)

    async def _finished(self, text: str, work: asyncio.Future[_Compiled | str]) -> _Compiled | str:
        """Waits for `work`, which others may wait for, too. When all have left, it is given up."""
        self._waiting[work] += 1
        try:
            return await asyncio.shield(work)
        finally:
            self._waiting[work] -= 1
            if not self._waiting[work]:
                del self._waiting[work]
                if not work.done():
                    work.cancel()
                    if self._cache.get(text) is work:
                        del self._cache[text]

    def _remember(self, text: str, work: asyncio.Future[_Compiled | str]) -> asyncio.Future[_Compiled | str]:
        self._cache[text] = work
        work.add_done_callback(lambda done: self._forget_failure(text, done))
        while len(self._cache) > CACHED_GRAMMARS or (
            len(self._cache) > 1 and sum(map(len, self._cache)) > CACHED_CHARS
        ):
            self._cache.popitem(last=False)
        return work

    def _forget_failure(self, text: str, done: asyncio.Future[_Compiled | str]) -> None:
        if (done.cancelled() or done.exception() is not None) and self._cache.get(text) is done:
            del self._cache[text]

    async def _compile(self, text: str) -> _Compiled | str:
        """The grammar, or what is wrong with it."""
        error = await self._checker.check(text)
        if error:
            return _shown(error)
        make = functools.partial(_Compiled, functools.partial(self._matcher, text))
        compiled = await asyncio.get_running_loop().run_in_executor(self._compiler, make)
        return compiled.error or compiled

    def _matcher(self, text: str) -> llguidance.LLMatcher:
        assert self._vocabulary is not None, "checked by masker"
        return llguidance.LLMatcher(self._vocabulary.words, text, log_level=0, limits=self._limits)

    async def close(self) -> None:
        """Ends process and threads."""
        for work in list(self._cache.values()):
            work.cancel()
        await self._checker.close()
        self._compiler.shutdown(wait=False, cancel_futures=True)
        self._masks.shutdown(wait=False, cancel_futures=True)


def _shown(message: str) -> str:
    """The first words of what llguidance says, on one line."""
    line = " ".join(message.split()).rstrip(". ")
    return line if len(line) <= _SHOWN else line[:_SHOWN] + " …"
