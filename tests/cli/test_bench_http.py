"""`colibrid bench http` against a server made for the test: what is sent, what is counted."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from fake_openai import FakeServer, answer, bench, stream

from colibrid.cli.bench_report import http_lines
from colibrid.cli.bench_result import read_report
from colibrid.cli.main import run

if TYPE_CHECKING:
    from pathlib import Path

    from fake_openai import Handler


def test_streams_are_counted_and_timed(capsys: pytest.CaptureFixture[str]) -> None:
    """Every request is answered, rates are counts over the time, and tokens have times of their own."""
    with FakeServer(answer).running() as server:
        code, report = bench(server.url, capsys, "--clients", "3", "--requests", "12", "--warmup", "2")
    assert code == 0
    assert (report["ok"], report["refused"], report["failed"], report["model"]) == (12, 0, 0, "fake")
    assert len(server.bodies) == 14
    assert report["requests_per_s"] == pytest.approx(12 / report["elapsed_s"])
    assert report["output_tokens_per_s"] == pytest.approx(60 / report["elapsed_s"])
    assert report["tokens_per_request"] == 5
    request, first = report["e2e_ms"], report["ttft_ms"]
    between, events = report["tpot_ms"], report["itl_ms"]
    assert 0 < first["p50"] < request["p50"] <= request["p90"] <= request["p99"] <= request["max"]
    # Two events a request: the gap between them spans four tokens.
    assert events["mean"] == pytest.approx(4 * between["mean"])


def test_prompts_are_random_ids_and_all_different(capsys: pytest.CaptureFixture[str]) -> None:
    """No two requests share a prompt, and the same seed asks the same again."""
    arguments = ("--clients", "1", "--requests", "8", "--warmup", "2", "--vocab-size", "50")
    with FakeServer(answer).running() as server:
        for _ in range(2):
            bench(server.url, capsys, *arguments, "--seed", "7")
        bench(server.url, capsys, *arguments, "--seed", "70")
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert prompts[:10] == prompts[10:20]
    assert len(set(prompts)) == 20
    assert all(len(prompt) == 6 and min(prompt) >= 0 and max(prompt) < 50 for prompt in prompts)


def test_the_body_is_what_the_options_say(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Fields, key and model reach the server; the key is not in the report."""
    key = tmp_path / "keys"
    key.write_text("# whose\nsecret-key\nother\n")
    with FakeServer(answer).running() as server:
        _, report = bench(
            server.url, capsys, "--requests", "1", "--clients", "1", "--warmup", "0", "--no-stream", "--no-ignore-eos",
            "--model", "other", "--field", "cache_prompt=false", "--field", 'user="me"', "--api-key-file", str(key),
        )  # fmt: skip
    body = server.bodies[0]
    assert body.pop("prompt")
    assert body == {"model": "other", "max_tokens": 5, "temperature": 0, "cache_prompt": False, "user": "me"}
    assert server.headers[0]["Authorization"] == "Bearer secret-key"
    assert "secret-key" not in json.dumps(report)
    assert report["ttft_ms"] is None
    assert report["e2e_ms"]["p50"] > 0


def test_refusals_are_counted_apart_and_tried_again(capsys: pytest.CaptureFixture[str]) -> None:
    """503 with Retry-After is no failure: the client waits and sends another request."""
    seen = 0

    async def busy(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal seen
        seen += 1
        if seen % 2:
            return web.Response(status=503, headers={"Retry-After": "1", "retry-after-ms": "5"})
        return await answer(request, body)

    with FakeServer(busy).running() as server:
        code, report = bench(server.url, capsys, "--clients", "1", "--requests", "3", "--warmup", "0")
    assert code == 0
    assert (report["ok"], report["refused"], report["failed"]) == (3, 3, 0)


async def _error(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"message": "broken"}}, status=500)


async def _busy_without_time(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(status=503, text="later")


async def _error_in_stream(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b'data: {"error": {"message": "engine died"}}\n\n')
    return response


async def _cut_stream(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    return await stream(request, [{"choices": [{"text": "a"}]}], done=False)


async def _nonsense(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(text="data: hello\n\n")


async def _cut(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def _deep(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(text='data: {"error":' + "[" * 100_000 + "\n\n")


async def _huge_usage(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    usage = {"completion_tokens": 10**400}
    return web.Response(text=f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n")


async def _bad_retry(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(status=503, text="later", headers={"Retry-After": "9" * 5000})


async def _slow(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    await asyncio.sleep(60)
    return web.Response()


@pytest.mark.parametrize(
    ("handler", "problem"),
    [
        (_error, "500: "),
        (_busy_without_time, "503: later"),
        (_error_in_stream, "engine died"),
        (_cut_stream, "without [DONE]"),
        (_nonsense, "not an answer of this API"),
        (_cut, "the server closed the connection"),
        (_slow, "no answer within 0.2 s"),
        (_deep, "not an answer of this API"),
        (_huge_usage, "not an answer of this API"),
        (_bad_retry, "503: later"),
    ],
)
def test_failures_are_counted_and_explained(handler: Handler, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is no whole answer fails its request, exits with 1, and says why."""
    with FakeServer(handler).running() as server:
        limit = "0.2" if handler is _slow else "60"  # a busy machine is no problem of theirs
        arguments = ("--clients", "1", "--requests", "2", "--warmup", "0", "--timeout", limit)
        code, report = bench(server.url, capsys, *arguments)
    assert code == 1
    assert (report["ok"], report["refused"], report["failed"]) == (0, 0, 2)
    assert problem in report["problems"][0]
    assert report["e2e_ms"] is None


def test_a_time_instead_of_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    """--seconds starts new requests for that long; those under way are waited for."""
    with FakeServer(answer).running() as server:
        code, report = bench(server.url, capsys, "--clients", "2", "--seconds", "2", "--warmup", "0")
    assert code == 0
    assert report["ok"] == len(server.bodies) > 2
    assert report["elapsed_s"] > 2


def test_the_table_names_server_load_and_times(capsys: pytest.CaptureFixture[str]) -> None:
    """People see what was sent, how many were answered, and a line for each kind of time."""
    with FakeServer(answer).running() as server:
        assert run(["bench", "http", "--url", server.url, "--requests", "4", "--max-tokens", "5"]) == 0
    text = capsys.readouterr().out
    for part in (
        server.url,
        "model fake",
        "8 clients, 4 requests",
        "4 answered, 0 refused, 0 failed",
        "5.0 tokens a request",
    ):
        assert part in text
    assert [line.split()[0] for line in text.splitlines()[-4:]] == ["TTFT", "TPOT", "ITL", "e2e"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--url", "ftp://x"], 78, "--url 'ftp://x'"),
        (["--url", "http://x:99999"], 78, "--url"),
        (["--field", "n"], 78, "--field 'n'"),
        (["--field", "n=x"], 78, "--field 'n=x'"),
        (["--field", f"n={'[' * 100_000}"], 78, "--field 'n=[["),
        (["--field", 'n="\udcff"'], 78, "--field"),
        (["--model", "\udcff"], 78, "--model"),
        (["--url", "http://name:word@x"], 78, "--api-key-file"),
        (["--url", f"http://{'a' * 70}.com"], 78, "--url"),
        (["--url", "http://x/\udcff"], 78, "--url"),
        (["--prompt-tokens", "9" * 5000], 78, "--prompt-tokens '9999"),
        (["--requests", "3", "--seconds", "1"], 2, "--requests or --seconds"),
        (["--url", "http://127.0.0.1:9"], 1, "is a server running there?"),
    ],
)
def test_mistakes_are_named(arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An option that makes no sense, or no server at all, is one clear line."""
    assert run(["bench", "http", *arguments]) == code
    assert message in capsys.readouterr().err


def test_a_server_without_models_needs_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    """When the list is empty, the message says to name the model."""
    server = FakeServer(answer)
    server.models = {"data": []}
    with server.running():
        assert run(["bench", "http", "--url", server.url]) == 1
    assert "--model" in capsys.readouterr().err


def test_a_warm_up_without_any_answer_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """A server that refuses the body is reported at once, in its own words."""
    with FakeServer(_error).running() as server:
        assert run(["bench", "http", "--url", server.url]) == 1
    assert "no request of the warm-up was answered: 500: " in capsys.readouterr().err


async def _hostile(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(status=400, text="\x1b[31m<script>\r\nnothing else")


def test_what_servers_say_cannot_rule_the_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Names and errors of a server are shown with their control characters written out, and in pages as text."""
    server, page = FakeServer(_hostile), tmp_path / "page.html"
    server.models = {"data": [{"id": "\x1b]0;mine\x07<script>"}]}
    with server.running():
        arguments = ["--requests", "1", "--warmup", "0", "--html", str(page)]
        assert run(["bench", "http", "--url", server.url, *arguments]) == 1
        assert run(["bench", "http", "--url", server.url]) == 1
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out + shown.err
    assert "\\x1b[31m<script>\\r" in shown.out
    assert "\\x1b[31m" in shown.err
    assert "<script" not in page.read_text()


def test_what_was_measured_is_shown_though_a_file_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    """A full disk is told, and costs the file only."""
    with FakeServer(answer).running() as server:
        assert run(["bench", "http", "--url", server.url, "--requests", "4", "--out", "/dev/full"]) == 78
    shown = capsys.readouterr()
    assert "4 answered" in shown.out
    assert "/dev/full cannot be written" in shown.err


def test_a_key_file_without_a_key_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Comments and blank lines are no keys, as in the server's file."""
    keys = tmp_path / "keys"
    keys.write_text("# nobody yet\n\n")
    assert run(["bench", "http", "--api-key-file", str(keys)]) == 78
    assert capsys.readouterr().err == f"colibrid: --api-key-file {keys} holds no key; write one a line\n"


def test_lengths_are_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts and answers have the lengths of their distributions, the same ones for the same seed."""
    lengths = ("--prompt-tokens", "uniform:2-9", "--max-tokens", "lognormal:5,1,20", "--warmup", "0")
    with FakeServer(answer).running() as server:
        for _ in range(2):
            _, report = bench(server.url, capsys, "--clients", "1", "--requests", "40", *lengths)
    drawn = [(len(body["prompt"]), body["max_tokens"]) for body in server.bodies]
    assert drawn[:40] == drawn[40:]
    assert {length for length, _ in drawn} == set(range(2, 10))
    assert len({most for _, most in drawn}) > 5
    assert max(most for _, most in drawn) <= 20
    assert report["load"]["prompt_tokens"] == {"kind": "uniform", "low": 2, "high": 9}


def test_an_open_loop_counts_from_the_arrival(capsys: pytest.CaptureFixture[str]) -> None:
    """A server that answers one at a time in 50 ms gets a request every 10 ms: each waits for all before it."""

    async def slow(_request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(0.05)
        return web.json_response({"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}})

    arguments = ("--rate", "100", "--arrivals", "fixed", "--requests", "8", "--max-in-flight", "1", "--no-stream")
    with FakeServer(slow).running() as server:
        code, report = bench(server.url, capsys, *arguments, "--warmup", "0")
    assert (code, report["ok"], report["in_flight"]) == (0, 8, 1)
    for index, sample in enumerate(report["samples"]):
        assert sample["at"] == pytest.approx(index / 100, abs=1e-5)
        assert sample["late_ms"] >= 40 * index - 5
        assert sample["e2e_ms"] >= sample["late_ms"] + 45
    assert report["late_ms"]["max"] >= 270
    assert report["elapsed_s"] >= 0.39


def test_an_open_loop_does_not_wait_for_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """All requests are under way before the first is answered."""
    arrived = 0

    async def all_together(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal arrived
        arrived += 1
        while arrived < 30:  # noqa: ASYNC110 - it is looked at
            await asyncio.sleep(0.005)
        return await answer(request, body)

    with FakeServer(all_together).running() as server:
        code, report = bench(server.url, capsys, "--rate", "500", "--requests", "30", "--warmup", "0")
    assert (code, report["ok"], report["in_flight"]) == (0, 30, 30)
    ats = [sample["at"] for sample in report["samples"]]
    assert len(set(ats)) == 30


def test_what_an_open_loop_is_refused_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody sends it again, and it counts against goodput."""
    seen = 0

    async def every_other(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal seen
        seen += 1
        if seen % 2:
            return web.Response(status=503, headers={"Retry-After": "1"})
        return await answer(request, body)

    arguments = ("--rate", "200", "--requests", "10", "--warmup", "0", "--slo", "e2e_ms<60000, ttft_ms<60000")
    with FakeServer(every_other).running() as server:
        code, report = bench(server.url, capsys, *arguments)
    assert (code, report["ok"], report["refused"]) == (0, 5, 5)
    assert len(server.bodies) == 10
    assert (report["goodput"]["good"], report["goodput"]["share"]) == (5, 0.5)
    assert report["goodput"]["requests_per_s"] == pytest.approx(5 / report["elapsed_s"])


def test_an_open_loop_without_answers_lasted_no_time(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Rates are 0, and the file can be read again."""

    async def busy(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=500)

    out = tmp_path / "a.json"
    with FakeServer(busy).running() as server:
        code, report = bench(server.url, capsys, "--rate", "200", "--requests", "3", "--warmup", "0", "--out", str(out))
    assert (code, report["ok"], report["failed"]) == (1, 0, 3)
    assert read_report(out).requests_per_s == 0
    assert "-0.0" not in "".join(http_lines(read_report(out)))


def test_a_trace_says_what_is_sent_and_when(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Its times, lengths and texts; what a line leaves out is drawn as the options say."""
    trace = tmp_path / "day.jsonl"
    trace.write_text(
        '{"at": 0, "prompt_tokens": 3, "max_tokens": 2}\n\n'
        '{"at": 0.05, "prompt": "Once upon", "max_tokens": 4}\n{"at": 0.2, "prompt_tokens": 7}\n'
    )
    with FakeServer(answer).running() as server:
        code, report = bench(server.url, capsys, "--trace", str(trace), "--warmup", "0")
        assert run(["bench", "http", "--url", server.url, "--trace", str(trace), "--warmup", "0"]) == 0
    assert code == 0
    assert sorted(sample["at"] for sample in report["samples"]) == pytest.approx([0, 0.05, 0.2], abs=1e-5)
    sent = {
        body["prompt"] if isinstance(body["prompt"], str) else len(body["prompt"]): body["max_tokens"]
        for body in server.bodies[:3]
    }
    assert sent == {3: 2, "Once upon": 4, 7: 5}
    assert report["load"]["trace"]["file"] == "day.jsonl"
    text = capsys.readouterr().out
    assert "open loop at the times of the trace, 3 requests" in text
    assert "of day.jsonl (3 lines, SHA-256" in text


def test_a_trace_without_times_is_a_closed_loop_or_has_a_rate(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its lines are taken in their order, again from the first if more are asked for."""
    trace = tmp_path / "lengths.jsonl"
    trace.write_text('{"prompt_tokens": 3, "max_tokens": 2}\n{"prompt_tokens": 5, "max_tokens": 1}\n')
    with FakeServer(answer).running() as server:
        _, closed = bench(
            server.url, capsys, "--trace", str(trace), "--clients", "1", "--requests", "5", "--warmup", "0"
        )
        _, opened = bench(server.url, capsys, "--trace", str(trace), "--rate", "100", "--warmup", "0")
    assert [len(body["prompt"]) for body in server.bodies[:5]] == [3, 5, 3, 5, 3]
    assert (closed["ok"], closed["late_ms"]) == (5, None)
    assert opened["ok"] == 2
    assert opened["late_ms"] is not None


def test_reports_go_into_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """--out holds what --json prints, --html a page; `bench compare` reads the former, several a side, and writes both."""
    files = [tmp_path / name for name in ("a.json", "b.json", "a.html", "c.html")]
    with FakeServer(answer).running() as server:
        for out in files[:2]:
            arguments = ("--requests", "20", "--out", str(out), "--html", str(files[2]), "--slo", "ttft_ms<=60000")
            _, report = bench(server.url, capsys, *arguments)
    assert json.loads(files[1].read_text()) == report
    assert files[2].read_text().startswith("<!doctype html>")
    sides = (str(files[0]), f"{files[0]},{files[1]}")
    assert run(["bench", "compare", *sides, "--html", str(files[3])]) == 0
    text = capsys.readouterr().out
    assert "20 requests" in text
    assert "40 requests" in text
    for name in ("requests/s", "goodput", "TTFT p99", "TPOT mean", "ITL p50", "e2e p90"):
        assert f"\n{name} " in text
    assert "<svg" in files[3].read_text()
    assert run(["bench", "compare", *sides, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == [20, 40]
    assert run(["bench", "compare", *sides, "--html", "/dev/full"]) == 78
    assert "TTFT p99" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--prompt-tokens", "some"], 78, "--prompt-tokens 'some': write a number, uniform:LOW-HIGH"),
        (["--slo", "ttft<3"], 78, "did you mean ttft_ms?"),
        (["--chat", "--prompt-form", "ids"], 2, "chats are texts"),
        (["--rate", "5", "--trace", "TRACE"], 2, "have times of their own"),
        (
            ["--warmup", "0", "--out", "/no/such/folder/a.json"],
            78,
            "/no/such/folder/a.json cannot be written: there is no folder",
        ),
    ],
)
def test_mistakes_in_a_load_are_named(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One clear line, before anything is sent if it can be."""
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"at": 0, "prompt_tokens": 1}\n')
    arguments = [str(trace) if argument == "TRACE" else argument for argument in arguments]
    with FakeServer(answer).running() as server:
        assert run(["bench", "http", "--url", server.url, "--requests", "1", *arguments]) == code
    assert message in capsys.readouterr().err
