"""bench/soak.py: what it sends, what it finds wrong, and a short run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
import pytest
import soak
from soak import BODIES, Reader, Seen, body_of, merge

from colibrid.cli.bench_wire import Connection

if TYPE_CHECKING:
    from pathlib import Path


def test_bodies_are_many_and_repeatable() -> None:
    """A body's number makes it what it is; together they cover both routes, ids and texts, sampled and greedy."""
    assert [body_of(number) for number in range(BODIES)] == [body_of(number) for number in range(BODIES)]
    bodies = [body_of(number) for number in range(BODIES)]
    assert {path for path, _ in bodies} == {"/v1/completions", "/v1/chat/completions"}
    assert {type(body.get("prompt")) for _, body in bodies} == {type(None), str, list}
    assert all(body["temperature"] == 0 or "seed" in body for _, body in bodies)
    assert len({json.dumps(body) for _, body in bodies}) > BODIES * 0.9


def test_another_text_is_found() -> None:
    """Two processes that got different texts for one body make a problem."""
    parts = [Seen(answered=1, texts={3: "a"}), Seen(answered=2, texts={3: "a", 4: "b"}), Seen(texts={4: "c"})]
    whole = merge(parts)
    assert whole.answered == 3
    assert whole.problems == ["body 4 has two texts"]


@pytest.mark.parametrize(
    ("status", "answer", "problem"),
    [
        (200, {"choices": [{"text": "x", "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}, None),
        (200, {"choices": [{"text": "x", "finish_reason": None}]}, "finish_reason is None"),
        (503, {"error": {"message": "full"}}, "503"),
    ],
)
def test_answers_are_judged(status: int, answer: object, problem: str | None) -> None:
    """Only a whole answer with 200 is good."""
    reader = Reader(stream=False, cut=None, connection=Connection())
    reader(msgspec.json.encode(answer), 0.0)
    reader.finish(status)
    assert problem in (reader.problem or "") if problem is not None else reader.problem is None


def test_streams_are_joined_and_cut() -> None:
    """Text comes out of all events; after so many the connection is closed."""
    closed = []
    connection = Connection()
    connection.close = lambda: closed.append(1)  # type: ignore[method-assign, assignment]
    event = b'data: {"choices":[{"delta":{"content":"ab"}}]}\n\n'
    reader = Reader(stream=True, cut=2, connection=connection)
    reader(event, 0.0)
    assert (reader.text, closed) == ("ab", [])
    reader(event + event, 0.0)
    assert (reader.text, closed) == ("abab", [1])


def test_a_short_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon answers every request, is stopped, and the result says so."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    arguments = ["--device", "cpu", "--requests", "40", "--connections", "6", "--processes", "1"]
    assert soak.main([*arguments, "--json", str(tmp_path / "soak.json")]) == 0
    result = json.loads((tmp_path / "soak.json").read_text())
    assert result["answered"] + result["cut_off"] == 40
    assert (result["errors"], result["engine_totals"]["allocations_after_open"]) == (0, 0)
    assert "0 errors" in capsys.readouterr().out
