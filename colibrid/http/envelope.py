"""The parts of an answer that stay the same from event to event, encoded once."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from colibrid.http.sse import event

_encode = msgspec.json.encode


class Envelope:
    """id, object, created, model and system_fingerprint of one answer."""

    def __init__(self, answer_id: str, kind: str, model: str, fingerprint: str, *, usage: bool) -> None:
        """`usage`: chunks carry `usage`, null but in the last, as with stream_options.include_usage."""
        self.head: dict[str, Any] = {
            "id": answer_id,
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._start = b"data: " + _encode(self.head)[:-1] + b',"choices":[{"index":'
        self._usage = usage
        self._end = b'}],"usage":null}\n\n' if usage else b"}]}\n\n"

    def chunk(self, index: int, key: bytes, value: bytes, rest: dict[str, Any]) -> bytes:
        """An event of choice `index` with `key` (as `"text":`) and encoded `value` first, then the fields of `rest`."""
        tail = _encode(rest)[1:-1]
        return b"%b%d,%b%b%b%b%b" % (self._start, index, key, value, b"," if tail else b"", tail, self._end)

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """The event after the last choice; empty unless asked for."""
        return event(_encode(self.head | {"choices": [], "usage": usage})) if self._usage else b""
