"""POST /v1/chat/completions."""

from __future__ import annotations

import dataclasses
import secrets
from typing import TYPE_CHECKING, Any

import msgspec

from colibrid.http.answer import ID_BYTES, LOGPROB_BYTES, answer, within
from colibrid.http.body import read_body
from colibrid.http.chat_message import MessageWriter
from colibrid.http.constraint import asked_grammar, constrained
from colibrid.http.envelope import PLAIN, Envelope, fields
from colibrid.http.logprobs import chat_logprobs, prompt_logprobs
from colibrid.http.messages import chat_prompt
from colibrid.http.params import chat_job, check_model
from colibrid.http.plugged import admitted
from colibrid.http.state import STATE
from colibrid.http.tool_choice import reply_grammar, reply_options, tool_use
from colibrid.http.types import CHAT_REFUSED, ChatBody
from colibrid.text.tools_reader import Content

if TYPE_CHECKING:
    from aiohttp import web

    from colibrid.batch.request import ExpertPolicy, TokenRecord
    from colibrid.http.params import Job
    from colibrid.http.run import Choice, Delta
    from colibrid.http.state import AppState
    from colibrid.text.reply import ReplyOptions


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answers a conversation."""
    state = request.app[STATE]
    body = await read_body(request, ChatBody, CHAT_REFUSED, "messages")
    check_model(body.model, state)
    answer_id = f"chatcmpl-{secrets.token_hex(12)}"
    use, asked = tool_use(body, state), asked_grammar(body)
    prompt = await chat_prompt(body, state, tools=use is not None)
    reply = reply_options(use, prompt, state)
    job = _read_as(reply, chat_job(body, state, answer_id, prompt), state)
    job, asked = admitted(request, job, asked, state)
    grammar = reply_grammar(body, use, asked, prompt, state)
    job = await within(request, body.timeout_s, constrained(job, grammar, state))
    writer = ChatWriter(body, state, answer_id, reply, job.experts)
    return await answer(request, state, job, writer, stream=bool(body.stream))


def _read_as(reply: ReplyOptions, job: Job, state: AppState) -> Job:
    """The job, its replies taken apart; special tokens that the reader needs are part of the text."""
    if reply.reasoning is None and reply.form is None:
        return job
    shown = reply.shown_ids(state.text.tokenizer.added_ids)
    output = msgspec.structs.replace(job.output, shown_special_ids=shown)
    return dataclasses.replace(job, reply=reply, output=output)


class ChatWriter:
    """The answer of one request."""

    def __init__(
        self, body: ChatBody, state: AppState, answer_id: str, reply: ReplyOptions, experts: ExpertPolicy
    ) -> None:
        self._body = body
        self._reply = reply
        self._state = state
        self._choice: Choice | None = None
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self._envelope = Envelope(answer_id, kind, state.info_for(body.profile, experts), body.stream_options)

    def choice(self, choice: Choice) -> ChatChoiceWriter:
        self._choice = choice
        message = MessageWriter(
            reasons=self._reply.reasoning is not None,
            short_ids=self._reply.form is not None and self._reply.form.short_ids,
        )
        return ChatChoiceWriter(choice, self._body, self._state, self._envelope, message)

    @property
    def weight(self) -> int:
        if self._body.prompt_logprobs is None or self._choice is None:
            return 0
        return len(self._choice.prompt.ids) * (self._body.prompt_logprobs + 1)

    def whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        found = self._envelope.head | {"choices": [], "usage": usage}
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

    __slots__ = ("_body", "_choice", "_envelope", "_message", "_records", "_tokenizer")

    def __init__(
        self, choice: Choice, body: ChatBody, state: AppState, envelope: Envelope, message: MessageWriter
    ) -> None:
        self._choice = choice
        self._body = body
        self._tokenizer = state.text.tokenizer
        self._envelope = envelope
        self._message = message
        self._records: list[TokenRecord] = []

    def take(self, delta: Delta) -> None:
        self._message.add(delta.events if self._choice.split else [Content(delta.text)] if delta.text else [])
        if self._body.logprobs or self._body.return_token_ids:
            self._records.extend(delta.records)

    @property
    def weight(self) -> int:
        return len(self._records) * ((self._body.top_logprobs or 0) + 1) if self._body.logprobs else 0

    @property
    def pending(self) -> int:
        return self._message.chars + LOGPROB_BYTES * self.weight + ID_BYTES * len(self._records)

    def opening(self) -> bytes:
        rest: dict[str, Any] = {"logprobs": None, "finish_reason": None}
        if self._body.return_token_ids:
            rest["prompt_token_ids"] = self._choice.prompt.ids
        return self._chunk(b'{"role":"assistant","content":""}', fields(rest))

    def chunk(self) -> bytes:
        if not self._message and not self._records:
            return b""
        first, *others = self._message.take_deltas() or [b'{"content":""}']
        rest = PLAIN
        if self._records:
            rest = fields({"logprobs": self._found_logprobs(), "finish_reason": None} | self._found_ids())
            self._records = []
        return self._chunk(first, rest) + b"".join(self._chunk(delta, PLAIN) for delta in others)

    def closing(self) -> bytes:
        assert self._choice.outcome is not None
        return self._chunk(b"{}", fields({"logprobs": None, "finish_reason": self._choice.outcome.finish_reason}))

    def whole(self) -> dict[str, Any]:
        assert self._choice.outcome is not None
        return {
            "index": self._choice.index,
            "message": self._message.whole(),
            "logprobs": self._found_logprobs(),
            "finish_reason": self._choice.outcome.finish_reason,
        } | self._found_ids()

    def _chunk(self, delta: bytes, rest: bytes) -> bytes:
        return self._envelope.chunk(self._choice, b'"delta":', delta, rest)

    def _found_logprobs(self) -> dict[str, Any] | None:
        return chat_logprobs(self._tokenizer, self._records) if self._body.logprobs else None

    def _found_ids(self) -> dict[str, Any]:
        return {"token_ids": [record.token for record in self._records]} if self._body.return_token_ids else {}
