"""The parts of an answer that stay the same from event to event, encoded once."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from colibrid.http.sse import event

if TYPE_CHECKING:
    from colibrid.batch.interfaces import EngineInfo
    from colibrid.http.run import Choice
    from colibrid.http.types import StreamOptions

_encode = msgspec.json.encode


class Envelope:
    """id, object, created, model and system_fingerprint of one answer."""

    __slots__ = ("_continuous", "_end", "_start", "_usage", "head")

    def __init__(self, answer_id: str, kind: str, info: EngineInfo, options: StreamOptions | None) -> None:
        """With include_usage chunks carry `usage`, null but in the last; with continuous_usage_stats as well, in each
        chunk the tokens of its choice so far.
        """
        usage = options is not None and bool(options.include_usage)
        self.head: dict[str, Any] = {
            "id": answer_id,
            "object": kind,
            "created": int(time.time()),
            "model": info.model_id,
            "system_fingerprint": info.fingerprint,
        }
        self._start = b"data: " + _encode(self.head)[:-1] + b',"choices":[{"index":'
        self._usage = usage
        self._continuous = options is not None and usage and bool(options.continuous_usage_stats)
        self._end = b'}],"usage":null}\n\n' if usage else b"}]}\n\n"

    def chunk(self, choice: Choice, key: bytes, value: bytes, rest: bytes) -> bytes:
        """An event of `choice` with `key` (as `"text":`) and encoded `value` first, then `rest`, of `fields`."""
        end = self._end
        if self._continuous:
            tokens = choice.tokens
            counts = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1], "total_tokens": sum(tokens)}
            end = b'}],"usage":%b}\n\n' % _encode(counts)
        return b"%b%d,%b%b,%b%b" % (self._start, choice.index, key, value, rest, end)

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """The event after the last choice; empty unless asked for."""
        return event(_encode(self.head | {"choices": [], "usage": usage})) if self._usage else b""


def fields(values: dict[str, Any]) -> bytes:
    """The fields of an object without its braces; at least one."""
    return _encode(values)[1:-1]


PLAIN = fields({"logprobs": None, "finish_reason": None})  # what most chunks have beside their text
