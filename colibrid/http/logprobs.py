"""Log-probabilities in the shapes of the API: OpenAI's older one, that of chat, and vLLM's for prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from colibrid.text.detokenizer import detokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from colibrid.batch.request import TokenRecord
    from colibrid.text.tokenizer import Tokenizer

_FLOOR = -9999.0  # JSON has no infinity; OpenAI writes this


def _finite(value: float) -> float:
    return max(value, _FLOOR)


class LegacyLogprobs:
    """`logprobs` of /v1/completions, built up token by token: four lists of equal length."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._start()

    def _start(self) -> None:
        self._tokens: list[str] = []
        self._token_logprobs: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(self, record: TokenRecord, offset: int) -> None:
        """`offset`: characters of text before this token."""
        text = self._tokenizer.token_text(record.token)
        self._tokens.append(text)
        self._offsets.append(offset)
        if record.logprob is None:  # the first token of a prompt has no probability
            self._token_logprobs.append(None)
            self._top.append(None)
            return
        self._token_logprobs.append(_finite(record.logprob))
        top = {self._tokenizer.token_text(token): _finite(value) for token, value in record.top}
        top.setdefault(text, _finite(record.logprob))
        self._top.append(top)

    def __bool__(self) -> bool:
        """True iff there is something to take."""
        return bool(self._tokens)

    def take(self) -> dict[str, Any]:
        """What was added since the last time."""
        taken = {
            "tokens": self._tokens,
            "token_logprobs": self._token_logprobs,
            "top_logprobs": self._top,
            "text_offset": self._offsets,
        }
        self._start()
        return taken


def chat_logprobs(tokenizer: Tokenizer, records: Sequence[TokenRecord]) -> dict[str, Any]:
    """`logprobs` of a chat choice."""

    def entry(token: int, value: float | None) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token)
        return {"token": tokenizer.token_text(token), "logprob": _finite(value or 0.0), "bytes": list(raw)}

    content = [
        entry(record.token, record.logprob) | {"top_logprobs": [entry(token, value) for token, value in record.top]}
        for record in records
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(tokenizer: Tokenizer, records: Sequence[TokenRecord]) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` in vLLM's shape: for each position the likeliest ids and the prompt's own."""
    return [_prompt_entry(tokenizer, record) for record in records]


def _prompt_entry(tokenizer: Tokenizer, record: TokenRecord) -> dict[str, Any] | None:
    if record.logprob is None:
        return None
    listed = {token: (value, rank) for rank, (token, value) in enumerate(record.top, start=1)}
    own: dict[int, tuple[float, int | None]] = {record.token: (record.logprob, None)}
    return {
        str(token): {"logprob": _finite(value), "rank": rank, "decoded_token": tokenizer.token_text(token)}
        for token, (value, rank) in (own | listed).items()
    }


def text_and_offsets(tokenizer: Tokenizer, ids: Sequence[int], sent: str | None) -> tuple[str, list[int]]:
    """The text of a prompt's ids, and where in it each id begins. `sent`: the client's own text of all these ids."""
    decoder = detokenizer(tokenizer, skip_special_tokens=False)
    pieces: list[str] = []
    offsets = []
    length = 0
    for token in ids:
        offsets.append(length)
        piece = decoder.push(token)
        pieces.append(piece)
        length += len(piece)
    pieces.append(decoder.flush())
    text = "".join(pieces)
    if sent is None or text == sent:
        return text, offsets
    return sent, tokenizer.starts(sent, ids)  # its ids say less (a normalized form) or more (a token put first)
