"""Text to token ids and back, for one model.

Owns the Hugging Face tokenizer of the model. All methods may be called from any thread; the asynchronous ones
keep large inputs off the event loop. Special-token strings are parsed by `encode`; `encode_guarded` parses only
those that `guard.SpecialGuard` left whole, so that text of a client can never form one.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
import tokenizers

from colibrid.errors import ModelError, OverloadedError, RequestError
from colibrid.text.words import longest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_Result = TypeVar("_Result")
DecoderKind = Literal["byte_level", "byte_fallback", "other"]
INLINE_CHARS = 4096  # about 1 ms of work; more goes to the worker thread
PENDING_CHARS = 64 << 20  # text waiting for the worker thread; more is refused
_MARK_CHARS = 8  # of 65,534 code points each: 128 bits that no client can guess
_NFC_SHRINK = 4  # characters that Unicode's composition makes one, at most
_PLANE_16 = 0x100000  # private use; the last two code points of the plane are noncharacters


_INFILL = (  # what begins the text before the gap, the text behind it, and the gap itself
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek
)


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


class _TokenizerFile(msgspec.Struct):
    """The parts of tokenizer.json that the library does not expose."""

    normalizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None
    added_tokens: list[_AddedToken] = []


class TooManyTokensError(Exception):
    """A text has more tokens than its reader can use. `count` is exact, or a lower bound."""

    def __init__(self, count: int, *, exact: bool) -> None:
        super().__init__(f"{count} tokens")
        self.count = count
        self.exact = exact


def random_mark() -> str:
    """A string that no client can know: it stands for nothing and is removed before tokenizing."""
    return "".join(chr(_PLANE_16 + secrets.randbelow(0xFFFE)) for _ in range(_MARK_CHARS))


class Tokenizer:
    """One model's tokenizer. Build it with `load`."""

    def __init__(self, source: str) -> None:
        """`source` is the text of tokenizer.json. Raises ValueError when it cannot be used."""
        # One prompt is one thread's work; the engine needs the other cores. Read by the library at first use.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        try:
            self._fast = tokenizers.Tokenizer.from_str(source)
            described = msgspec.json.decode(source, type=_TokenizerFile)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(str(error)) from error
        self._fast.no_truncation()
        self._fast.no_padding()
        self._source = source
        self._specials = [token for token in described.added_tokens if token.special]
        added = {token.content for token in described.added_tokens}
        # The tokens that mark a gap to be filled in, in the order of _INFILL; none where the model has not learnt it.
        self.infill_tokens = next((tokens for tokens in _INFILL if added.issuperset(tokens)), None)
        parts = _decoder_parts(described.decoder)
        self.decoder_kind = _decoder_kind(parts)
        # True where the decoder drops one space at the very start.
        self.strips_first_space = self.decoder_kind == "byte_fallback" and parts[-1].get("type") == "Strip"
        self._falls_back = any(part.get("type") == "ByteFallback" for part in parts)
        self._longest = self._longest_token() if _keeps_text(described, source, self.decoder_kind) else 0
        self._bytes_of: dict[int, bytes] = {}  # ids seen so far, as is _text_of
        self._text_of: dict[int, str] = {}
        self._plain: _PlainTokenizer | None = None
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")
        self._pending_chars = 0
        self.vocab_size = max(self._fast.get_vocab_size(with_added_tokens=True), 1)
        self.special_ids = frozenset(token.id for token in self._specials)
        self.added_ids = {token.content: token.id for token in described.added_tokens}
        self.special_strings = tuple(token.content for token in self._specials)
        self.mark = random_mark()
        self._whole_specials = longest_of(self.special_strings)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Reads a tokenizer.json. Raises ModelError naming the file."""
        try:
            return cls(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"tokenizer {path} cannot be used: {error}; fetch the checkpoint again") from error

    # -- text to ids

    def encode(self, text: str, *, add_special_tokens: bool, most: int | None = None) -> list[int]:
        """Token ids of `text`; strings of added tokens become their ids.

        Raises RequestError on lone surrogates, TooManyTokensError beyond `most` tokens.
        """
        _refuse_surrogates(text)
        return _ids_of(self._fast, text, add_special_tokens=add_special_tokens, most=most)

    def encode_guarded(self, text: str, *, add_special_tokens: bool = False, most: int | None = None) -> list[int]:
        """Token ids of a rendered template: special strings broken by `mark` are plain text, whole ones are ids.

        Raises as `encode`, and RequestError if text that is not a whole special string still gave a special token.
        """
        whole = len(self._whole_specials.findall(text))
        allowed = whole + (self._fast.num_special_tokens_to_add(is_pair=False) if add_special_tokens else 0)
        if self.mark not in text:
            ids = self.encode(text, add_special_tokens=add_special_tokens, most=most)
            if self._count_specials(ids) <= allowed:
                return ids
        _refuse_surrogates(text)
        if self._plain is None:
            self._plain = _PlainTokenizer(self._source, self._specials, self.mark)
        for keep_mark in (False, True):
            ids = self._plain.encode(text, add_special_tokens=add_special_tokens, keep_mark=keep_mark, most=most)
            if self._count_specials(ids) <= allowed:
                return ids
        raise RequestError(
            "The messages hold text that this model reads as a control token; remove it.", param="messages"
        )

    @functools.cached_property
    def added_words(self) -> re.Pattern[str]:
        """Finds added tokens in a text."""
        return longest_of(self.added_ids)

    def source_all_special(self) -> str:
        """tokenizer.json, but with every added token marked as special."""
        described = msgspec.json.decode(self._source)
        for token in described.get("added_tokens", ()):
            token["special"] = True
        return msgspec.json.encode(described).decode()

    def _count_specials(self, ids: list[int]) -> int:
        return sum(token in self.special_ids for token in ids) if self.special_ids else 0

    async def encode_async(
        self, text: str, *, add_special_tokens: bool, guarded: bool = False, most: int | None = None
    ) -> list[int]:
        """As `encode` or `encode_guarded`, in the worker thread when the text is long.

        Raises OverloadedError when too much text waits for the thread already.
        """
        encode = self.encode_guarded if guarded else self.encode
        work = functools.partial(encode, text, add_special_tokens=add_special_tokens, most=most)
        least = self.least_tokens(len(text))
        if most is not None and least > most:
            raise TooManyTokensError(least, exact=False)
        return await self.off_loop(len(text), work)

    async def off_loop(self, chars: int, work: Callable[[], _Result]) -> _Result:
        """What `work` on a text of `chars` characters returns: at once when it is short, else in the worker thread.

        Raises OverloadedError when too much text waits for the thread already, and what `work` raises.
        """
        if chars <= INLINE_CHARS:
            return work()
        if self._pending_chars + chars > PENDING_CHARS:
            raise OverloadedError(
                "Too many long prompts are waiting to be tokenized; try again shortly.",
                code="server_is_overloaded",
                retry_after_s=1.0,
            )
        self._pending_chars += chars
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._pool, work)
        finally:
            self._pending_chars -= chars

    def starts(self, text: str, ids: Sequence[int]) -> list[int]:
        """Where in `text` each of its `ids` begins; ids that were added to it have no length."""
        found = self._fast.encode_batch([text], add_special_tokens=False)[0]
        if len(found) != len(ids):
            found = self._fast.encode_batch([text], add_special_tokens=True)[0]
        starts, end = [], 0
        for start, stop in found.offsets:
            starts.append(start if stop > start else end)
            end = max(end, stop)
        return starts

    def least_tokens(self, chars: int) -> int:
        """A text of so many characters has at least so many tokens; 0 where that cannot be told."""
        return chars // (self._longest * _NFC_SHRINK) if self._longest else 0

    # -- ids to text

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """Text of `ids` in one piece."""
        return self._fast.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one id stands for; empty for ids that have no text."""
        known = self._bytes_of.get(token)
        if known is None:
            known = self._find_bytes(token)
            self._bytes_of[token] = known
        return known

    def has_piece(self, token: int) -> bool:
        """False for ids that the vocabulary leaves out: decoders pass over them."""
        return self._fast.id_to_token(token) is not None

    def is_byte(self, token: int) -> bool:
        """True for an id that stands for one byte, where runs of such ids are read as UTF-8 (byte fallback)."""
        return self._falls_back and _HEX_TOKEN.match(self._fast.id_to_token(token) or "") is not None

    def token_text(self, token: int) -> str:
        r"""The text of one id; ids that hold part of a character read `bytes:\xe2\x82`, as OpenAI writes them."""
        known = self._text_of.get(token)
        if known is None:
            known = _readable(self.token_bytes(token))
            self._text_of[token] = known
        return known

    def _longest_token(self) -> int:
        return max(map(len, self._fast.get_vocab(with_added_tokens=True)), default=0)

    def _find_bytes(self, token: int) -> bytes:
        piece = self._fast.id_to_token(token)
        if piece is None:
            return b""
        if self.decoder_kind == "byte_level":
            return _byte_level_bytes(piece)
        if self.decoder_kind == "byte_fallback":
            return _byte_fallback_bytes(piece)
        return self._fast.decode([token], skip_special_tokens=False).encode("utf-8")

    def close(self) -> None:
        """Ends the worker thread; work in it is finished first."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class _PlainTokenizer:
    """The same tokenizer with special strings switched off and unguessable aliases of them switched on.

    Splitting at an alias is the same as splitting at the special token itself, so the ids of all other text are
    those that the original would give. The mark is a token of its own here, for vocabularies whose ordinary pieces
    include the special strings: kept in the text it keeps their halves apart, at the price of other ids around it.
    """

    def __init__(self, source: str, specials: list[_AddedToken], mark: str) -> None:
        self._fast = tokenizers.Tokenizer.from_str(source)
        self._fast.no_truncation()
        self._fast.no_padding()
        self._fast.encode_special_tokens = True
        self._mark = mark
        stem = random_mark()
        self._alias = {token.content: stem + chr(_PLANE_16 + index) for index, token in enumerate(specials)}
        self._fast.add_tokens([_alias_token(self._alias[token.content], token) for token in specials])
        self._fast.add_tokens([tokenizers.AddedToken(mark, special=False, normalized=False)])
        self._mark_id = self._fast.token_to_id(mark)
        self._id_of = {self._fast.token_to_id(self._alias[token.content]): token.id for token in specials}
        self._whole = longest_of(self._alias)

    def encode(self, text: str, *, add_special_tokens: bool, keep_mark: bool, most: int | None) -> list[int]:
        aliased = self._whole.sub(lambda match: self._alias[match.group()], text)
        if not keep_mark:
            aliased = aliased.replace(self._mark, "")
        found = _ids_of(self._fast, aliased, add_special_tokens=add_special_tokens, most=most)
        return [self._id_of.get(token, token) for token in found if token != self._mark_id]


def _ids_of(fast: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool, most: int | None) -> list[int]:
    # The batch call releases the interpreter lock, the single one does not. Making Python's list holds it again,
    # about 50 ms a million ids, so lists that nobody can use are never made.
    found = fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
    if most is not None and len(found) > most:
        raise TooManyTokensError(len(found), exact=True)
    ids: list[int] = found.ids
    return ids


def _alias_token(alias: str, token: _AddedToken) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        alias,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=False,
    )


def _refuse_surrogates(text: str) -> None:
    # ASCII text, the common case, is known without a scan.
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"The text holds a lone surrogate (half a character) at position {error.start}; send valid Unicode.",
            param="prompt",
            code="invalid_value",
        ) from error


def _decoder_parts(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The decoders that run one after another."""
    if decoder is None:
        return []
    return list(decoder.get("decoders", [])) if decoder.get("type") == "Sequence" else [decoder]


def _decoder_kind(parts: list[dict[str, Any]]) -> DecoderKind:
    """Which of the exact ways of detokenizer.py there is, if any."""
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"]:
        return "byte_level"
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"]:
        spaces = (parts[0].get("pattern"), parts[0].get("content")) == ({"String": "\u2581"}, " ")
        strips = [(part.get("type"), part.get("content"), part.get("start"), part.get("stop")) for part in parts[3:]]
        if spaces and strips in ([], [("Strip", " ", 1, 0)]):
            return "byte_fallback"
    return "other"


def _readable(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _keeps_text(described: _TokenizerFile, source: str, kind: DecoderKind) -> bool:
    """True iff a token of n characters stands for at most n characters of text, but for what NFC joins."""
    normal = described.normalizer is None or described.normalizer.get("type") == "NFC"
    swallowing = any(token.lstrip or token.rstrip for token in described.added_tokens) or '"Removed"' in source
    return kind == "byte_level" and normal and not swallowing


def _byte_level_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Printable Latin-1 bytes stand for themselves; the others, in order, are moved up from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    moved = [byte for byte in range(256) if byte not in printable]
    table.update({chr(0x100 + index): byte for index, byte in enumerate(moved)})
    return table


_ALPHABET = _byte_level_alphabet()
_HEX_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def _byte_level_bytes(piece: str) -> bytes:
    # A token with any character outside the alphabet (an added token) stands for its own text.
    if all(char in _ALPHABET for char in piece):
        return bytes(_ALPHABET[char] for char in piece)
    return piece.encode("utf-8")


def _byte_fallback_bytes(piece: str) -> bytes:
    found = _HEX_TOKEN.match(piece)
    if found is not None:
        return bytes([int(found.group(1), 16)])
    return piece.replace("\u2581", " ").encode("utf-8")


_NO_MODEL = '{"model": {"type": "WordLevel", "vocab": {}, "unk_token": ""}}'


class IdsOnly(Tokenizer):
    """Stands in where a model folder has no tokenizer: prompts are token ids, and ids have no text."""

    def __init__(self) -> None:
        super().__init__(_NO_MODEL)

    def encode(self, text: str, *, add_special_tokens: bool, most: int | None = None) -> list[int]:
        del text, add_special_tokens, most
        raise RequestError(
            "The model has no tokenizer; send the prompt to /v1/completions as token ids.", param="prompt"
        )
