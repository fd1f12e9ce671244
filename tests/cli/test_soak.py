"""bench/soak.py: what it sends, what it finds wrong, and a short run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
import pytest
import soak
from soak import Sample, growth, judge
from soak_load import BODIES, REFUSED, Reader, Seen, body_of, merge

from colibrid.cli.bench_wire import Connection

if TYPE_CHECKING:
    from pathlib import Path


def test_bodies_are_many_and_repeatable() -> None:
    """A body's number makes it what it is; together they cover the routes, ids and texts, sampled, greedy and wrong."""
    assert [body_of(number) for number in range(BODIES)] == [body_of(number) for number in range(BODIES)]
    bodies = [body_of(number) for number in range(BODIES)]
    assert {path for path, _ in bodies} == {"/v1/completions", "/v1/chat/completions", "/v1/embeddings"}
    assert {type(body.get("prompt")) for _, body in bodies} == {type(None), str, list}
    assert all(
        body["temperature"] == 0 or "seed" in body for _, body in bodies if "stop" in body and body["stop"] != [""]
    )
    assert all(any(body.items() >= wrong.items() for _, body in bodies) for wrong in REFUSED)
    assert len({json.dumps(body) for _, body in bodies}) > BODIES * 0.9


def test_another_answer_is_found() -> None:
    """Two processes that got different answers for one body make a problem."""
    parts = [Seen(answered=1, exact={"3": "a"}), Seen(answered=2, exact={"3": "a", "4": "b"}), Seen(exact={"4": "c"})]
    whole = merge(parts)
    assert whole.answered == 3
    assert whole.problems == ["body 4 has two answers"]


def test_growth_is_counted_from_the_first_part() -> None:
    """What is loaded and cached while the first part is served is no drift."""
    samples = [Sample(0, 0.0, 100, 50, 9), Sample(10, 1.0, 300, 60, 9), Sample(20, 2.0, 310, 59, 9)]
    assert growth(samples) == (10, -1)
    assert growth(samples[:2]) == (0, 0)
    leak = [Sample(10 * part, part, 100 + 20 * part, 50 + part, 9) for part in range(11)]
    assert growth(leak) == (7 * 20, 7)
    leak[-1] = leak[-1]._replace(daemon_kib=5000)
    assert growth(leak) == (7 * 20, 7)


def test_each_drift_is_a_problem() -> None:
    """Memory of the device, of the pool, of daemon and engine, allocations, and answers that are missing."""
    good = {
        "device_drift_bytes": 0,
        "pool_drift_bytes": 0,
        "engine_totals": {"allocations_after_open": 0},
        "daemon_growth_kib": 1000,
        "daemon_limit_kib": 1024,
        "engine_growth_kib": 9999,
        "engine_limit_kib": None,
    }
    assert judge(good, Seen(sent=3, answered=2, cut=1)) == []
    bad = good | {"pool_drift_bytes": 1, "device_drift_bytes": 1, "daemon_growth_kib": 1025, "engine_limit_kib": 64}
    bad["engine_totals"] = {"allocations_after_open": 2}
    assert len(judge(bad, Seen(sent=3, answered=1, cut=1))) == 6


@pytest.mark.parametrize(
    ("status", "answer", "problem"),
    [
        (200, {"choices": [{"text": "x", "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}, None),
        (200, {"choices": [{"text": "x", "finish_reason": None}]}, "finish_reason is {} of 1 choices"),
        (503, {"error": {"message": "full"}}, "503"),
    ],
)
def test_answers_are_judged(status: int, answer: object, problem: str | None) -> None:
    """Only a whole answer with 200 is good."""
    reader = Reader(stream=False, cut=None, connection=Connection())
    reader(msgspec.json.encode(answer), 0.0)
    reader.finish(status)
    assert problem in (reader.problem or "") if problem is not None else reader.problem is None


def test_answers_are_the_same_however_they_are_cut_up() -> None:
    """One event with two tokens and two events with one each have one digest; another bit has another."""

    def digest(*events: tuple[list[str], list[float]]) -> str:
        reader = Reader(stream=True, cut=None, connection=Connection())
        for tokens, values in events:
            logprobs = {"tokens": tokens, "token_logprobs": values, "text_offset": [len(tokens)]}
            choice = {"index": 1, "text": "".join(tokens), "logprobs": logprobs}
            reader(b"data: " + msgspec.json.encode({"choices": [choice]}) + b"\n\n", 0.0)
        return reader.digest()

    whole = digest((["a", "b"], [-1.0, -2.0]))
    assert digest((["a"], [-1.0]), (["b"], [-2.0])) == whole
    assert digest((["a", "b"], [-1.0, -2.0000001])) != whole


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
    arguments = ["--device", "cpu", "--requests", "40", "--connections", "6", "--processes", "1", "--memory-slack", "0"]
    assert soak.main([*arguments, "--json", str(tmp_path / "soak.json")]) == 0
    result = json.loads((tmp_path / "soak.json").read_text())
    assert result["answered"] + result["cut_off"] == 40
    assert (result["errors"], result["engine_totals"]["allocations_after_open"]) == (0, 0)
    assert result["pool_drift_bytes"] == 0
    assert [one["requests"] for one in result["samples"]] == list(range(0, 41, 4))
    assert "0 errors" in capsys.readouterr().out
