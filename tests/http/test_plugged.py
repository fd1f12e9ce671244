"""colibrid.http.plugged: plugins in requests, and that a bad one harms nobody else."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from typing import TYPE_CHECKING, Any

import plugin_package
import pytest

from colibrid.errors import RequestError
from colibrid.plugin_host import Plugins, collect
from colibrid.plugins import Identity, Parts, Policy
from colibrid.text import structured

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.http.conftest import Server

ASK = {"prompt": "The capital of Norway", "max_tokens": 6}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 40}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Plugins]]:
    """The example plugin with settings."""
    monkeypatch.syspath_prepend(plugin_package.SOURCE)
    import colibrid_example

    yield lambda **settings: collect({"example": colibrid_example.make(colibrid_example.Settings(**settings))})
    sys.modules.pop("colibrid_example", None)


class Bad:
    """All kinds of parts that raise."""

    interval_s = 1.0

    def admit(self, *_: Any) -> Any:
        raise KeyError("bad")

    filter = observe = send = admit

    async def authenticate(self, _headers: Any) -> Any:
        raise KeyError("bad")


async def test_filter_changes_and_refuses(make_server: Callable[..., Any], example: Callable[..., Plugins]) -> None:
    """A filter's body is the one that is checked and served; what it refuses is the client's 400."""
    server: Server = await make_server(plugins=example(forbidden=("secret",), most_tokens=2))
    assert (await server.post("/v1/completions", ASK)).json["usage"]["completion_tokens"] == 2
    answer = await server.post("/v1/completions", ASK | {"prompt": "a secret"})
    assert (answer.status, answer.error["code"]) == (400, "refused")
    assert (await server.post("/v1/completions", ASK | {"prompt": "x " * 40_000 + "secret"})).status == 400
    assert server.state.plugins.health.failures == 0


async def test_policy_goes_into_the_request(make_server: Callable[..., Any], example: Callable[..., Plugins]) -> None:
    """Bias and stop texts of a policy join the request's own, on each generating route."""
    server: Server = await make_server(plugins=example(bias={"7": 2.0}, stop="Norway"))
    answer = await server.post("/v1/completions", ASK | {"logit_bias": {"7": 1, "9": -1}})
    assert answer.json["choices"][0]["text"] == "The capital of "
    assert server.service.last.sampling.logit_bias == ((7, 2.0), (9, -1.0))
    await server.post("/v1/chat/completions", CHAT)
    assert server.service.last.sampling.logit_bias == ((7, 2.0),)
    await server.post("/generate", {"prompt": "Hello"})
    assert server.service.last.sampling.logit_bias == ((7, 2.0),)


async def test_policy_gives_the_form(make_server: Callable[..., Any], example: Callable[..., Plugins]) -> None:
    """A pattern or a set of ids becomes masks; a request that has a form of its own is told."""
    server: Server = await make_server(plugins=example(pattern="The .*"))
    for path, body in (("/v1/completions", ASK), ("/v1/chat/completions", CHAT), ("/generate", {"prompt": "Hello"})):
        assert (await server.post(path, body)).status == 200
        assert server.service.last.masked
    answer = await server.post("/v1/completions", ASK | {"response_format": {"type": "json_object"}})
    assert (answer.status, answer.error["param"]) == (400, "response_format")
    ids = tuple(server.service.reply[:-1])
    server = await make_server(plugins=example(allowed_ids=ids))
    assert (await server.post("/v1/completions", ASK)).status == 200
    mask = server.service.generations[-1].masks[0]
    allowed = {token for token in range(4096) if mask[token // 8] >> (token % 8) & 1}
    assert set(ids) <= allowed
    assert allowed - set(ids) <= {4093, 4091}


@pytest.mark.parametrize(
    "policy",
    [Policy(bias={4096: 1.0}), Policy(bias={1: 101.0}), Policy(bias={1: float("nan")}), Policy(stop_token_ids=(-1,)),
     Policy(allowed_ids=()), Policy(allowed_ids=(True,)), Policy(stops=("",)), 5,
     Policy(allowed_ids=(1,), grammar=structured.regex("a", "x"))],
)  # fmt: skip
async def test_wrong_policies(make_server: Callable[..., Any], policy: Any) -> None:
    """What the engine would refuse never gets there: the request is a 500 that names the plugin."""

    class Wrong:
        def admit(self, _asked: Any) -> Any:
            return policy

    server: Server = await make_server(plugins=collect({"wrong": Parts(sampling_policy=Wrong())}))
    answer = await server.post("/v1/completions", ASK)
    assert (answer.status, answer.error["code"]) == (500, "plugin_failed")
    assert "plugin wrong failed (sampling_policy)" in answer.error["message"]
    assert server.service.seen == []


async def test_bounds_hold_for_both_together(make_server: Callable[..., Any], example: Callable[..., Plugins]) -> None:
    """Stop texts of request and policy are bounded as those of a request are."""
    server: Server = await make_server(plugins=example(stop="x"))
    assert (await server.post("/v1/completions", ASK | {"stop": [f"s{n}" for n in range(15)]})).status == 200
    answer = await server.post("/v1/completions", ASK | {"stop": [f"s{n}" for n in range(16)]})
    assert (answer.status, answer.error["param"]) == (400, "stop")


async def test_authenticator(make_server: Callable[..., Any], example: Callable[..., Plugins]) -> None:
    """Its keys open what their scopes say beside those of the file; without any key nothing is answered."""
    server: Server = await make_server(keys=["key-of-the-file"], plugins=example(people={"alice": "her-own-key"}))

    async def status(path: str, key: str | None) -> int:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return (await server.get(path, **headers)).status

    assert [await status("/v1/models", key) for key in ("key-of-the-file", "her-own-key", "other", None)] == [
        200, 200, 401, 401,
    ]  # fmt: skip
    assert await status("/metrics", "key-of-the-file") == 200
    assert await status("/metrics", "her-own-key") == 403
    assert await status("/livez", None) == 200
    for key in ("key-of-the-file", "her-own-key"):
        await server.post("/v1/completions", ASK, Authorization=f"Bearer {key}")
    first, second = (request.tenant for request in server.service.seen)
    assert first != second != ""


async def test_authenticator_alone_asks_for_keys(
    make_server: Callable[..., Any], example: Callable[..., Plugins]
) -> None:
    """With an authenticator and no credential file every request still needs a key."""
    server: Server = await make_server(plugins=example(people={"alice": "her-own-key"}))
    assert (await server.get("/v1/models")).status == 401
    assert (await server.get("/v1/models", Authorization="Bearer her-own-key")).status == 200


async def test_authenticator_that_hangs_or_lies(
    make_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never lets anybody in by failing: a timeout and a wrong answer are 500, while other requests are served."""
    monkeypatch.setattr("colibrid.http.plugged._AUTHENTICATE_S", 0.05)

    class Slow:
        async def authenticate(self, headers: Any) -> Any:
            if headers.get("X-Wrong"):
                return Identity(id="two words")
            return await asyncio.sleep(60)

    server: Server = await make_server(plugins=collect({"slow": Parts(authenticator=Slow())}))
    asking = asyncio.ensure_future(server.get("/v1/models"))
    assert (await server.get("/livez")).status == 200
    assert (await asking).error["code"] == "plugin_failed"
    assert (await server.get("/v1/models", **{"X-Wrong": "1"})).status == 500
    assert server.state.plugins.health.failures == 2


async def test_observer(make_server: Callable[..., Any], example: Callable[..., Plugins], tmp_path: Path) -> None:
    """It hears of answers and refusals, and of no text."""
    journal = tmp_path / "journal"
    server: Server = await make_server(plugins=example(journal=str(journal)))
    await server.post("/v1/completions", ASK)
    await server.post("/v1/completions", {"prompt": 5})
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert lines == [
        {"path": "/v1/completions", "key": None, "status": 200, "tokens": 6},
        {"path": "/v1/completions", "key": None, "status": 400, "tokens": None},
    ]


async def test_bad_parts_harm_only_their_requests(make_server: Callable[..., Any]) -> None:
    """Filter and policy that raise are 500 with the plugin's name; an observer that raises changes no answer."""
    bad = Bad()
    server: Server = await make_server(plugins=collect({"bad": Parts(observer=bad)}))
    assert (await server.post("/v1/completions", ASK)).status == 200
    assert server.state.plugins.health.failures == 1
    for kind in ("request_filter", "sampling_policy", "authenticator"):
        parts: dict[str, Any] = {kind: bad}
        server = await make_server(plugins=collect({"bad": Parts(**parts)}))
        answer = await server.post("/v1/completions", ASK)
        assert (answer.status, answer.error["code"]) == (500, "plugin_failed")
        assert f"plugin bad failed ({kind})" in answer.error["message"]
        assert (await server.get("/livez")).status == 200
        assert not server.service.live
        assert "colibrid_plugin_failures_total 1.0" in _metrics(server)


def _metrics(server: Server) -> str:
    from colibrid.http.metrics import exposition

    return exposition(server.state).decode()


async def test_filter_that_returns_no_body(make_server: Callable[..., Any]) -> None:
    """Something else than a dict is the plugin's mistake, not the client's."""

    class Odd:
        def filter(self, *_: Any) -> Any:
            return "body"

    server: Server = await make_server(plugins=collect({"odd": Parts(request_filter=Odd())}))
    assert (await server.post("/v1/completions", ASK)).error["code"] == "plugin_failed"


async def test_observer_that_refuses(make_server: Callable[..., Any]) -> None:
    """An observer comes too late to say no: it is counted, and the answer stands."""

    class Late:
        def observe(self, _response: Any) -> None:
            raise RequestError("no")

    server: Server = await make_server(plugins=collect({"late": Parts(observer=Late())}))
    assert (await server.post("/v1/completions", ASK)).status == 200
    assert server.state.plugins.health.failures == 1


async def test_tool_format(make_server: Callable[..., Any], example: Callable[..., Plugins]) -> None:
    """Calls in a plugin's format are told apart from text, unless the configuration names a parser."""
    tools = [{"type": "function", "function": {"name": "weather"}}]
    server: Server = await make_server('CALL weather {"city": "Oslo"}', plugins=example())
    message = (await server.post("/v1/chat/completions", CHAT | {"tools": tools})).json["choices"][0]["message"]
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city": "Oslo"}'}
    ]
    server = await make_server('CALL weather {"city": "Oslo"}', plugins=example(), model={"tool_parser": "hermes"})
    message = (await server.post("/v1/chat/completions", CHAT | {"tools": tools})).json["choices"][0]["message"]
    assert message["content"] == 'CALL weather {"city": "Oslo"}'


async def test_reasoning_format(make_server: Callable[..., Any], example: Callable[..., Plugins]) -> None:
    """Thinking between a plugin's marks is told apart, and grammars wait for its end; the configuration comes first."""
    reply = "HM: so \n:HM\nyes"
    server: Server = await make_server(reply, plugins=example())
    answer = (await server.post("/v1/chat/completions", CHAT)).json
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (" so ", "yes")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    choice = CHAT | {"structured_outputs": {"choice": ["yes"]}}
    assert (await server.post("/v1/chat/completions", choice)).status == 200
    server = await make_server(reply, plugins=example(), model={"reasoning_parser": "none"})
    message = (await server.post("/v1/chat/completions", CHAT)).json["choices"][0]["message"]
    assert message["content"] == reply
    assert (await server.post("/v1/chat/completions", choice)).status == 400


async def test_sink(make_server: Callable[..., Any]) -> None:
    """A sink gets the metrics again and again; while it is busy samples are left out, and what it raises is counted."""
    got: list[Any] = []
    room, arrived = threading.Event(), threading.Event()

    class Sink:
        interval_s = 0.02

        def send(self, samples: Any) -> None:
            got.append(samples)
            arrived.set()
            room.wait(120)
            if len(got) < 3:
                raise OSError("unreachable")

    server: Server = await make_server(plugins=collect({"sink": Parts(metrics_sink=Sink())}))
    health = server.state.plugins.health

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 - a thread sets it
                await asyncio.sleep(0.01)

    await until(lambda: arrived.is_set() and health.failures >= 2)  # two were left out
    assert len(got) == 1
    assert {"colibrid_plugin_failures_total", "colibrid_build_info"} <= {sample.name for sample in got[0]}
    room.set()
    await until(lambda: len(got) > 3)
    assert health.failures >= 4
    assert (await server.post("/v1/completions", ASK)).status == 200


async def test_nothing_is_asked_without_plugins(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """No function for plugins runs in a request of a daemon without any."""

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("a plugin's path was taken")

    for name in ("call_of", "_checked", "_with_policy"):
        monkeypatch.setattr(f"colibrid.http.plugged.{name}", never)
    for place in ("body.filtered", "body.call_of", "server.authenticated", "server.observed"):
        monkeypatch.setattr(f"colibrid.http.{place}", never)
    assert (await server.post("/v1/completions", ASK)).status == 200
    assert (await server.post("/v1/chat/completions", CHAT | {"stream": True})).status == 200
    assert (await server.post("/generate", {"prompt": "Hello"})).status == 200
