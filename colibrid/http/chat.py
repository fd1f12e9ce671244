"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import msgspec

from colibrid.http.answer import answer
from colibrid.http.body import read_body
from colibrid.http.constraint import asked_grammar, constrained
from colibrid.http.envelope import Envelope
from colibrid.http.logprobs import chat_logprobs, prompt_logprobs
from colibrid.http.messages import chat_prompt
from colibrid.http.params import chat_job, check_model
from colibrid.http.state import STATE
from colibrid.http.types import CHAT_REFUSED, ChatBody, StreamOptions

if TYPE_CHECKING:
    from aiohttp import web

    from colibrid.batch.request import TokenRecord
    from colibrid.http.run import Choice, Delta
    from colibrid.http.state import AppState


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answers a conversation."""
    state = request.app[STATE]
    body = await read_body(request, ChatBody, CHAT_REFUSED, "messages")
    check_model(body.model, state)
    answer_id = f"chatcmpl-{secrets.token_hex(12)}"
    grammar = asked_grammar(body)
    job = await constrained(chat_job(body, state, answer_id, await chat_prompt(body, state)), grammar, state)
    return await answer(request, state, job, ChatWriter(body, state, answer_id), stream=bool(body.stream))


class ChatWriter:
    """The answer of one request."""

    def __init__(self, body: ChatBody, state: AppState, answer_id: str) -> None:
        self._body = body
        self._state = state
        self._choice: Choice | None = None
        options = body.stream_options or StreamOptions()
        usage, continuous = bool(options.include_usage), bool(options.continuous_usage_stats)
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        info = state.scheduler.info
        self._envelope = Envelope(answer_id, kind, info.model_id, info.fingerprint, usage=usage, continuous=continuous)

    def choice(self, choice: Choice) -> ChatChoiceWriter:
        self._choice = choice
        return ChatChoiceWriter(choice, self._body, self._state, self._envelope)

    @property
    def weight(self) -> int:
        if self._body.prompt_logprobs is None or self._choice is None:
            return 0
        return len(self._choice.prompt.ids) * (self._body.prompt_logprobs + 1)

    def whole(self, choices: list[msgspec.Raw], usage: dict[str, Any]) -> dict[str, Any]:
        found = self._envelope.head | {"choices": choices, "usage": usage}
        assert self._choice is not None
        if self._body.prompt_logprobs is not None:
            found["prompt_logprobs"] = prompt_logprobs(self._state.text.tokenizer, self._choice.prompt_records)
        if self._body.return_token_ids:
            found["prompt_token_ids"] = self._choice.prompt.ids
        return found

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        return self._envelope.usage_event(usage)


class ChatChoiceWriter:
    """One choice: text and, where asked for, log-probabilities and ids since the last chunk."""

    def __init__(self, choice: Choice, body: ChatBody, state: AppState, envelope: Envelope) -> None:
        self._choice = choice
        self._body = body
        self._tokenizer = state.text.tokenizer
        self._envelope = envelope
        self._text: list[str] = []
        self._records: list[TokenRecord] = []

    def take(self, delta: Delta) -> None:
        self._text.append(delta.text)
        if self._body.logprobs or self._body.return_token_ids:
            self._records.extend(delta.records)

    @property
    def weight(self) -> int:
        return len(self._records) * ((self._body.top_logprobs or 0) + 1) if self._body.logprobs else 0

    def opening(self) -> bytes:
        rest: dict[str, Any] = {"logprobs": None, "finish_reason": None}
        if self._body.return_token_ids:
            rest["prompt_token_ids"] = self._choice.prompt.ids
        return self._chunk(b'{"role":"assistant","content":""}', rest)

    def chunk(self) -> bytes:
        text = "".join(self._text)
        if not text and not self._records:
            return b""
        self._text = []
        rest = {"logprobs": self._found_logprobs(), "finish_reason": None} | self._found_ids()
        self._records = []
        return self._chunk(b'{"content":' + msgspec.json.encode(text) + b"}", rest)

    def closing(self) -> bytes:
        assert self._choice.outcome is not None
        return self._chunk(b"{}", {"logprobs": None, "finish_reason": self._choice.outcome.finish_reason})

    def whole(self) -> dict[str, Any]:
        assert self._choice.outcome is not None
        return {
            "index": self._choice.index,
            "message": {"role": "assistant", "content": "".join(self._text), "refusal": None},
            "logprobs": self._found_logprobs(),
            "finish_reason": self._choice.outcome.finish_reason,
        } | self._found_ids()

    def _chunk(self, delta: bytes, rest: dict[str, Any]) -> bytes:
        return self._envelope.chunk(self._choice.index, b'"delta":', delta, rest, self._choice.tokens)

    def _found_logprobs(self) -> dict[str, Any] | None:
        return chat_logprobs(self._tokenizer, self._records) if self._body.logprobs else None

    def _found_ids(self) -> dict[str, Any]:
        return {"token_ids": [record.token for record in self._records]} if self._body.return_token_ids else {}
