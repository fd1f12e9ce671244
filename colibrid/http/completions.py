"""POST /v1/completions."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import msgspec

from colibrid.http.answer import ID_BYTES, LOGPROB_BYTES, answer, within
from colibrid.http.body import read_body
from colibrid.http.constraint import asked_grammar, constrained
from colibrid.http.envelope import PLAIN, Envelope, fields
from colibrid.http.logprobs import LegacyLogprobs, prompt_logprobs, text_and_offsets
from colibrid.http.params import completion_job
from colibrid.http.plugged import admitted
from colibrid.http.state import STATE
from colibrid.http.types import COMPLETION_REFUSED, CompletionBody

if TYPE_CHECKING:
    from aiohttp import web

    from colibrid.batch.request import ExpertPolicy
    from colibrid.http.run import Choice, Delta
    from colibrid.http.state import AppState

_MANY = 64  # small pieces of text: joined, they take less memory


async def completions(request: web.Request) -> web.StreamResponse:
    """Completes one prompt or several."""
    state = request.app[STATE]
    body = await read_body(request, CompletionBody, COMPLETION_REFUSED, "prompt")
    answer_id = f"cmpl-{secrets.token_hex(12)}"
    grammar = asked_grammar(body)
    job, grammar = admitted(request, await completion_job(body, state, answer_id), grammar, state)
    job = await within(request, body.timeout_s, constrained(job, grammar, state))
    writer = CompletionWriter(body, state, answer_id, job.experts)
    return await answer(request, state, job, writer, stream=bool(body.stream))


class CompletionWriter:
    """The answer of one request."""

    def __init__(self, body: CompletionBody, state: AppState, answer_id: str, experts: ExpertPolicy) -> None:
        self._body = body
        self._state = state
        self._envelope = Envelope(
            answer_id, "text_completion", state.info_for(body.profile, experts), body.stream_options
        )

    def choice(self, choice: Choice) -> CompletionChoiceWriter:
        return CompletionChoiceWriter(choice, self._body, self._state, self._envelope)

    @property
    def weight(self) -> int:
        return 0

    def whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        return self._envelope.head | {"choices": [], "usage": usage}

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        return self._envelope.usage_event(usage)


class CompletionChoiceWriter:
    """One choice: text and, where asked for, log-probabilities and ids since the last chunk."""

    __slots__ = (
        "_body",
        "_choice",
        "_deltas",
        "_echo_due",
        "_envelope",
        "_ids",
        "_ids_due",
        "_logprobs",
        "_plain",
        "_prompt_due",
        "_start",
        "_text",
        "_tokenizer",
    )

    def __init__(self, choice: Choice, body: CompletionBody, state: AppState, envelope: Envelope) -> None:
        self._choice = choice
        self._body = body
        self._tokenizer = state.text.tokenizer
        self._envelope = envelope
        self._logprobs = None if body.logprobs is None else LegacyLogprobs(self._tokenizer)
        self._echo_due = bool(body.echo)
        self._ids_due = bool(body.return_token_ids)
        self._prompt_due = body.prompt_logprobs is not None
        self._plain = self._logprobs is None and not (
            self._echo_due or self._ids_due or self._prompt_due
        )  # text is all
        self._deltas: list[Delta] = []  # taken, not written down yet: only where log-probabilities are asked for
        self._text: list[str] = []
        self._ids: list[int] = []
        self._start = 0  # characters of the echoed prompt

    def take(self, delta: Delta) -> None:
        if self._logprobs is not None:
            self._deltas.append(delta)
        else:
            self._add(delta)

    @property
    def pending(self) -> int:
        chars = sum(map(len, self._text)) + sum(len(delta.text) for delta in self._deltas)
        return chars + LOGPROB_BYTES * self.weight + ID_BYTES * (len(self._ids) + len(self._deltas))

    @property
    def weight(self) -> int:
        if self._plain:
            return 0
        body, prompt = self._body, len(self._choice.prompt.ids)
        total = 0
        if body.logprobs is not None:
            positions = sum(len(delta.records) for delta in self._deltas) + (prompt if self._echo_due else 0)
            total += positions * (body.logprobs + 1)
        elif self._echo_due and self._choice.prompt.text is None:
            total += prompt // 8  # ids are spelled much faster than log-probabilities
        if self._prompt_due and body.prompt_logprobs is not None:
            total += prompt * (body.prompt_logprobs + 1)
        return total

    def _write_down(self) -> None:
        if self._echo_due:
            self._echo_due = False
            self._echo()
        for delta in self._deltas:
            self._add(delta)
            assert self._logprobs is not None, "only then they are kept"
            for record, offset in zip(delta.records, delta.offsets, strict=True):
                self._logprobs.add(record, self._start + offset)
        self._deltas = []

    def _add(self, delta: Delta) -> None:
        self._text.append(delta.text)
        if len(self._text) >= _MANY:
            self._text = ["".join(self._text)]
        if self._body.return_token_ids:
            self._ids.extend(record.token for record in delta.records)

    def _echo(self) -> None:
        prompt = self._choice.prompt
        if self._logprobs is None:
            text = prompt.text or self._tokenizer.decode(list(prompt.ids), skip_special_tokens=False)
        else:
            text, offsets = text_and_offsets(self._tokenizer, prompt.ids, prompt.text)
            for record, offset in zip(self._choice.prompt_records, offsets, strict=True):
                self._logprobs.add(record, offset)
        self._text.insert(0, text)
        self._start = len(text)

    def opening(self) -> bytes:
        return b""

    def chunk(self) -> bytes:
        if self._deltas or self._echo_due:
            self._write_down()
        text = "".join(self._text)
        rest = {} if self._plain else self._rest()
        if not text and not rest:
            return b""
        self._text.clear()
        encoded = fields({"logprobs": None, "finish_reason": None} | rest) if rest else PLAIN
        return self._chunk(msgspec.json.encode(text), encoded)

    def _chunk(self, text: bytes, rest: bytes) -> bytes:
        return self._envelope.chunk(self._choice, b'"text":', text, rest)

    def _rest(self) -> dict[str, Any]:
        """Log-probabilities and ids that have not been given out."""
        rest: dict[str, Any] = self._found_prompt_logprobs()
        if self._logprobs is not None and self._logprobs:
            rest["logprobs"] = self._logprobs.take()
        if self._ids_due:
            self._ids_due = False
            rest["prompt_token_ids"] = self._choice.prompt.ids
        if self._ids:
            rest["token_ids"] = self._ids
            self._ids = []
        return rest

    def closing(self) -> bytes:
        assert self._choice.outcome is not None
        rest = fields({"logprobs": None, "finish_reason": self._choice.outcome.finish_reason})
        return self._chunk(b'""', rest)

    def whole(self) -> dict[str, Any]:
        assert self._choice.outcome is not None
        self._write_down()
        found: dict[str, Any] = {
            "index": self._choice.index,
            "text": "".join(self._text),
            "logprobs": None if self._logprobs is None else self._logprobs.take(),
            "finish_reason": self._choice.outcome.finish_reason,
        }
        found |= self._found_prompt_logprobs()
        if self._body.return_token_ids:
            found |= {"prompt_token_ids": self._choice.prompt.ids, "token_ids": self._ids}
        return found

    def _found_prompt_logprobs(self) -> dict[str, Any]:
        """`prompt_logprobs`, the first time."""
        if not self._prompt_due:
            return {}
        self._prompt_due = False
        return {"prompt_logprobs": prompt_logprobs(self._tokenizer, self._choice.prompt_records)}
