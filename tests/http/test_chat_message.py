"""Messages of chats, whole and as deltas."""

from __future__ import annotations

import json
from typing import Any

from colibrid.http.chat_message import MessageWriter
from colibrid.text.tools_reader import CallArguments, CallStart, Content, Reasoning

EVENTS = [
    Reasoning("hm"),
    Reasoning(" ok"),
    Content("He"),
    Content("llo"),
    CallStart("f"),
    CallArguments('{"a"'),
    CallArguments(": 1}"),
    CallStart("g"),
    CallArguments("{}"),
]


def written(*, reasons: bool = True, short_ids: bool = False) -> MessageWriter:
    writer = MessageWriter(reasons=reasons, short_ids=short_ids)
    writer.add(EVENTS)
    return writer


def test_whole_message() -> None:
    """Neighbours are joined, calls are listed with ids of their own."""
    message = written().whole()
    assert (message["reasoning_content"], message["content"]) == ("hm ok", "Hello")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "f", "arguments": '{"a": 1}'},
        {"name": "g", "arguments": "{}"},
    ]
    assert len({call["id"] for call in message["tool_calls"]}) == 2


def test_what_is_not_there() -> None:
    """Without thoughts the field is null, without a parser absent; content is null only beside calls."""
    assert MessageWriter(reasons=False, short_ids=False).whole() == {
        "role": "assistant", "content": "", "refusal": None
    }  # fmt: skip
    writer = MessageWriter(reasons=True, short_ids=False)
    writer.add([CallStart("f"), CallArguments("{}")])
    message = writer.whole()
    assert (message["content"], message["reasoning_content"]) == (None, None)


def test_deltas() -> None:
    """One delta for each run of a kind; a name on its own, with its index; nothing is given out twice."""
    writer = written(short_ids=True)
    deltas: list[dict[str, Any]] = [json.loads(delta) for delta in writer.take_deltas()]
    assert deltas[:2] == [{"reasoning_content": "hm ok"}, {"content": "Hello"}]
    calls = [delta["tool_calls"][0] for delta in deltas[2:]]
    assert [call["index"] for call in calls] == [0, 0, 1, 1]
    assert [len(call.get("id", "")) for call in calls] == [9, 0, 9, 0]
    assert calls[1] == {"index": 0, "function": {"arguments": '{"a": 1}'}}
    assert not writer
    assert writer.take_deltas() == []
    writer.add([CallArguments("x")])
    assert json.loads(writer.take_deltas()[0])["tool_calls"][0]["index"] == 1
