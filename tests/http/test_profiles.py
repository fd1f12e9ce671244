"""The request field `profile`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import openai
import pytest
import structlog

from colibrid.batch.request import ExpertPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.http.conftest import Server

ASK: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 5},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5},
    "/generate": {"prompt": "Hi", "max_new_tokens": 5},
    "/v1/embeddings": {"input": "Hi"},
}
FAST = ExpertPolicy(per_token=(1, 2, 2, 1), threshold=0.2)
each_route = pytest.mark.parametrize("path", list(ASK))


@pytest.fixture
async def server(make_server: Callable[..., Any]) -> Server:
    made: Server = await make_server()
    made.state.profiles = {"fast": FAST, "best-2": ExpertPolicy(per_token=2, threshold=0.0)}
    return made


@pytest.mark.fields("/v1/completions", "profile")
@pytest.mark.fields("/v1/chat/completions", "profile")
@pytest.mark.fields("/generate", "profile")
@pytest.mark.fields("/v1/embeddings", "profile")
@each_route
async def test_a_profile_says_which_experts_a_request_uses(server: Server, path: str) -> None:
    """Experts of each layer and threshold are those of the profile of that name; null is as if it were not there."""
    answer = await server.post(path, ASK[path] | {"profile": "fast"})
    assert answer.status == 200, answer.json
    assert "x-colibri-ignored" not in answer.headers
    assert server.service.last.experts == FAST
    await server.post(path, ASK[path] | {"profile": None, "experts": {"per_token": 1}})
    assert server.service.last.experts == ExpertPolicy(per_token=1)


@each_route
async def test_an_answer_says_which_profile_served_it(server: Server, path: str) -> None:
    """In `usage.experts` and in the log line; neither names one where the request did not."""
    for profile in ("fast", None):
        with structlog.testing.capture_logs() as logs:
            answer = await server.post(path, ASK[path] | {"profile": profile})
        (line,) = [entry for entry in logs if entry["event"] == "request"]
        assert answer.json["usage"]["experts"].get("profile") == profile
        assert line.get("profile") == profile


async def test_a_stream_says_which_profile_served_it(server: Server) -> None:
    """With the usage, in its last event."""
    asked = {"profile": "best-2", "stream": True, "stream_options": {"include_usage": True}}
    answer = await server.post("/v1/completions", ASK["/v1/completions"] | asked)
    assert answer.events[-2]["usage"]["experts"]["profile"] == "best-2"


async def test_clients_can_look_up_which_there_are(server: Server) -> None:
    """Beside the model that they are for, with what they say; as the OpenAI SDK reads it. There is one model."""
    listed = (await server.get("/v1/models")).json
    offered = [
        {"name": "fast", "per_token": [1, 2, 2, 1], "threshold": 0.2},
        {"name": "best-2", "per_token": 2, "threshold": 0.0},
    ]
    assert [model["profiles"] for model in listed["data"]] == [offered]
    assert (await server.get("/v1/models/hummingbird-13m")).json["profiles"] == offered
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        (model,) = (await client.models.list()).data
        assert (model.id, (model.model_extra or {})["profiles"]) == ("hummingbird-13m", offered)
    server.state.profiles = {}
    assert (await server.get("/v1/models")).json["data"][0]["profiles"] == []


@each_route
async def test_unknown_names_are_told_those_that_there_are(server: Server, path: str) -> None:
    """400, with the field, the name and the known ones."""
    answer = await server.post(path, ASK[path] | {"profile": "fastest"})
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, "profile", "invalid_value")
    assert answer.error["message"] == 'profile "fastest" does not exist; there are best-2, fast.'
    server.state.profiles = {}
    answer = await server.post(path, ASK[path] | {"profile": "fast"})
    assert answer.error["message"] == 'profile "fast" does not exist; this server has none (experts.profiles).'


@each_route
async def test_profile_and_experts_exclude_each_other(server: Server, path: str) -> None:
    """Nobody has to know which of them would win."""
    answer = await server.post(path, ASK[path] | {"profile": "fast", "experts": {"threshold": 0.1}})
    assert (answer.status, answer.error["param"]) == (400, "profile")
    assert "send one of them" in answer.error["message"]


@pytest.mark.parametrize("name", ["", "x" * 65, 5, ["fast"]])
async def test_names_are_bounded(server: Server, name: Any) -> None:
    """Text of 1 to 64 characters."""
    answer = await server.post("/v1/completions", ASK["/v1/completions"] | {"profile": name})
    assert (answer.status, answer.error["param"]) == (400, "profile")


async def test_the_fingerprint_tells_what_a_profile_says(server: Server) -> None:
    """The same request may give another text once a profile of that name says something else."""

    async def fingerprint(**more: str) -> str:
        answer = await server.post("/v1/completions", ASK["/v1/completions"] | more)
        found: str = answer.json["system_fingerprint"]
        return found

    plain, fast = await fingerprint(), await fingerprint(profile="fast")
    assert plain == server.service.info.fingerprint
    assert fast not in (plain, await fingerprint(profile="best-2"))
    assert fast == await fingerprint(profile="fast")
    server.state.profiles = {"fast": ExpertPolicy(per_token=1, threshold=0.2)}
    assert fast != await fingerprint(profile="fast")


@pytest.mark.parametrize("path", ["completions", "chat"])
@pytest.mark.parametrize("later", [{}, {"fast": ExpertPolicy(per_token=1, threshold=0.0)}])
async def test_a_reload_in_the_middle_does_not_touch_a_request(
    server: Server, path: str, later: dict[str, ExpertPolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was read goes on with what its profile said then, and tells so, though there is no such profile any more."""
    route = next(each for each in ASK if path in each)
    before = (await server.post(route, ASK[route] | {"profile": "fast"})).json["system_fingerprint"]
    module = import_module(f"colibrid.http.{path}")
    constrained = module.constrained

    async def reloaded(job: Any, *others: Any) -> Any:
        server.state.profiles = later
        return await constrained(job, *others)

    monkeypatch.setattr(module, "constrained", reloaded)
    answer = await server.post(route, ASK[route] | {"profile": "fast"})
    assert answer.status == 200, answer.json
    assert (answer.json["system_fingerprint"], server.service.last.experts) == (before, FAST)
