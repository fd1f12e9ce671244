"""What `colibrid bench http` sends to servers that take less than ours, and what it reads of their answers."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from fake_openai import FakeServer, answer, bench, stream

from colibrid.cli.main import run

if TYPE_CHECKING:
    from fake_openai import Handler

TLS = Path(__file__).parents[1] / "data" / "tls"
SHORT = ("--clients", "2", "--requests", "4", "--warmup", "3")


def _only(*refused: str) -> Handler:
    """A server that answers 400 to each of these."""

    async def handle(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        for name in refused:
            if name in body or (name == "ids" and isinstance(body.get("prompt"), list)):
                return web.json_response({"error": {"message": f"no {name}"}}, status=400)
        return await answer(request, body)

    return handle


@pytest.mark.parametrize(
    ("refused", "form", "tries"),
    [
        ((), (True, True, True), 0),
        (("ids",), (False, True, True), 3),
        (("ignore_eos",), (True, False, True), 2),
        (("stream_options", "ignore_eos"), (True, False, False), 4),
        (("ids", "ignore_eos", "stream_options"), (False, False, False), 7),
    ],
)
def test_the_warm_up_finds_out_what_a_server_takes(
    refused: tuple[str, ...], form: tuple[bool, ...], tries: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Token ids, ignore_eos and stream_options are left out where they are refused, as few of them as possible."""
    with FakeServer(_only(*refused)).running() as server:
        code, report = bench(server.url, capsys, *SHORT)
    assert code == 0
    assert report["ok"] == 4
    assert (report["form"]["ids"], report["form"]["ignore_eos"], report["form"]["ask_usage"]) == form
    assert len(server.bodies) == 7 + tries


def test_what_was_adapted_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """The table tells that the load is not quite what was asked for."""
    with FakeServer(_only("ids", "ignore_eos")).running() as server:
        assert run(["bench", "http", "--url", server.url, *SHORT, "--max-tokens", "5"]) == 0
    text = capsys.readouterr().out
    assert "adapted    the server takes no token ids: prompts are words" in text
    assert "it takes no ignore_eos: answers may be shorter" in text


def test_a_form_that_was_asked_for_is_not_changed(capsys: pytest.CaptureFixture[str]) -> None:
    """--prompt-form ids against a server that takes words only ends the run with the server's own words."""
    with FakeServer(_only("ids")).running() as server:
        assert run(["bench", "http", "--url", server.url, *SHORT, "--prompt-form", "ids"]) == 1
    assert "no request of the warm-up was answered: 400: " in capsys.readouterr().err


def test_words_are_as_many_as_the_tokenizer_makes_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    """The first answer's usage says how many tokens a word takes; later prompts have their length in tokens."""

    async def two_a_word(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        usage = {"completion_tokens": 1, "prompt_tokens": 2 * len(body["prompt"].split())}
        return web.json_response({"choices": [{"text": "a"}], "usage": usage})

    with FakeServer(two_a_word).running() as server:
        _, report = bench(server.url, capsys, *SHORT, "--no-stream", "--prompt-form", "text")
    assert report["prompt_tokens_per_request"] == 6
    assert [len(body["prompt"].split()) for body in server.bodies] == [6] + [3] * 6
    assert len({body["prompt"] for body in server.bodies[1:]}) == 6


def test_a_server_without_usage_has_an_event_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    """Streams are counted by their events with text, and the report says so."""

    async def silent(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        return await stream(request, [{"choices": [{"text": text}]} for text in ("a", "b", "", "c")])

    with FakeServer(silent).running() as server:
        code, report = bench(server.url, capsys, *SHORT)
    assert (code, report["tokens_from"], report["tokens_per_request"]) == (0, "events", 3)


def test_chats(capsys: pytest.CaptureFixture[str]) -> None:
    """--chat sends one message of words; an event that brings only a role is no token."""

    async def chat(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        deltas: list[dict[str, Any]] = [{"role": "assistant"}, {"reasoning_content": "m"}, {"content": "a"}, {}]
        return await stream(request, [{"choices": [{"delta": delta}]} for delta in deltas])

    with FakeServer(chat).running() as server:
        code, report = bench(server.url, capsys, *SHORT, "--chat")
    assert (code, report["tokens_per_request"]) == (0, 2)
    (message,) = server.bodies[0]["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 6
    assert "prompt" not in server.bodies[0]


@pytest.mark.parametrize("base", ["/", "/v1", "/v1/"])
def test_a_base_url_may_name_the_version(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As clients of OpenAI are told where a server is."""
    with FakeServer(answer).running() as server:
        code, report = bench(server.url + base, capsys, *SHORT)
    assert (code, report["ok"]) == (0, 4)


def test_https(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A server behind TLS is measured if its certificate is trusted, and named if not."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "first.pem", TLS / "first.key")
    with FakeServer(answer, context).running() as server:
        assert run(["bench", "http", "--url", server.url]) == 1
        assert "certificate verify failed" in capsys.readouterr().err
        monkeypatch.setenv("SSL_CERT_FILE", str(TLS / "first.pem"))
        code, report = bench(server.url, capsys, *SHORT)
    assert (code, report["ok"]) == (0, 4)
