"""Fields that say what an answer may be, on a scripted engine; tests/test_structured.py has a real one."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from colibrid.text.structured_check import GrammarChecker
from colibrid.text.structured_limits import MAX_GRAMMAR_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.http.conftest import Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ASK: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 50},
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50},
}
END = 4093
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ANSWERS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_object"}}, '{"b": [1, "x"]}'),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}, '{"a": 5}'),
    ({"response_format": {"type": "json_schema", "json_schema": {"strict": True}}}, "[1, 2]"),
    ({"structured_outputs": {"json": SCHEMA}}, '{"a": 5}'),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, '{"a": 5}'),
    ({"structured_outputs": {"json_object": True}}, "{}"),
    ({"structured_outputs": {"regex": "[a-c]+/[0-9]"}}, "abc/7"),
    ({"structured_outputs": {"choice": ["Oslo", "Bergen"]}}, "Bergen"),
    ({"structured_outputs": {"grammar": 'start: "a" b\nb: "x" | "y"\n'}}, "ay"),
]
both_routes = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor time of a grammar decides, however long a busy machine takes to give it."""
    monkeypatch.setitem(GrammarChecker.__init__.__kwdefaults__, "wall_s", 600.0)  # type: ignore[arg-type]


def allows(mask: bytes, token: int) -> bool:
    return bool(mask[token // 8] >> token % 8 & 1)


@pytest.mark.fields("/v1/completions", "response_format", "structured_outputs")
@pytest.mark.fields("/v1/chat/completions", "response_format", "structured_outputs")
@pytest.mark.fields("response_format", "type", "json_schema")
@pytest.mark.fields("response_format.json_schema", "name", "schema", "strict", "description")
@pytest.mark.fields("structured_outputs", "json", "regex", "choice", "grammar", "json_object")
@pytest.mark.parametrize(("fields", "reply"), ANSWERS)
@both_routes
async def test_masks_allow_the_answer_and_then_the_end(
    make_server: Callable[..., Any], path: str, fields: dict[str, Any], reply: str
) -> None:
    """Each position has a mask that allows a right answer's token; the end is allowed when the answer is complete."""
    server: Server = await make_server(reply)
    answer = await server.post(path, ASK[path] | fields)
    assert answer.status == 200, answer.json
    generation = server.service.generations[-1]
    assert generation.request.masked
    reply_ids = server.service.reply
    assert len(generation.masks) == len(reply_ids)
    assert all(allows(mask, token) for mask, token in zip(generation.masks, reply_ids, strict=True))
    assert allows(generation.masks[-1], END)
    assert not allows(generation.masks[0], END)


async def test_no_mask_where_none_is_needed(server: Server) -> None:
    """Plain requests, type text and requests for no token are not masked."""
    for fields in ({}, {"response_format": {"type": "text"}}):
        await server.post(CHAT, ASK[CHAT] | fields)
        assert not server.service.last.masked
    await server.post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 0, "structured_outputs": {"regex": "a"}})
    assert not server.service.last.masked


async def test_what_is_not_allowed_ends_with_an_error(make_server: Callable[..., Any]) -> None:
    """An engine that does not keep to the masks is noticed: the request fails, by name."""
    server = await make_server("hello")
    answer = await server.post(CHAT, ASK[CHAT] | {"structured_outputs": {"regex": "[0-9]+"}})
    assert (answer.status, answer.error["code"]) == (400, "grammar_too_complex")


BOMBS = [
    ({"regex": "(" * 30_000 + "a" + ")" * 30_000}, "structured_outputs.regex", "bytes"),
    ({"regex": "(" * 1000 + "a" + ")" * 1000}, "structured_outputs.regex", "1000 levels"),
    ({"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000}, "structured_outputs.grammar", "30000 levels"),
    ({"grammar": 'start: "' + "a" * MAX_GRAMMAR_BYTES + '"'}, "structured_outputs.grammar", str(MAX_GRAMMAR_BYTES)),
    ({"grammar": "start: A\nA: " + " & ".join(f"/(.|\\n)*x.{{{n}}}/" for n in range(60))}, "structured_outputs.grammar",
     "too complex"),
    ({"grammar": "start: R0\n" + "".join(f"R{n}: R{n + 1} R{n + 1}\n" for n in range(40)) + 'R40: "a"\n'},
     "structured_outputs.grammar", "too big"),
    ({"grammar": 'root ::= "a"'}, "structured_outputs.grammar", "GBNF"),
    ({"grammar": "start: other"}, "structured_outputs.grammar", "other"),
    ({"grammar": "  "}, "structured_outputs.grammar", "empty"),
    ({"regex": "a(?=b)"}, "structured_outputs.regex", "look-around"),
    ({"regex": ""}, "structured_outputs.regex", "empty"),
    ({"json": {"enum": ["x" * 100] * 700}}, "structured_outputs.json", str(MAX_GRAMMAR_BYTES)),
    ({"json": {"type": "array", "uniqueItems": True}}, "structured_outputs.json", "uniqueItems"),
    ({"json": False}, "structured_outputs.json", "not"),
    ({"json": {"$ref": "http://localhost/x"}}, "structured_outputs.json", "registry"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "part"), BOMBS)
async def test_bombs_are_refused_by_name(server: Server, fields: dict[str, Any], param: str, part: str) -> None:
    """Deep, huge, explosive and meaningless grammars are 400 with the field's name; the next request is served."""
    answer = await server.post(COMPLETIONS, ASK[COMPLETIONS] | {"structured_outputs": fields})
    assert (answer.status, answer.error["param"]) == (400, param)
    assert part in answer.error["message"]
    assert not server.service.seen
    assert (await server.post(COMPLETIONS, ASK[COMPLETIONS])).status == 200


@pytest.mark.parametrize("depth", [100, 100_000])
async def test_deep_schemas_are_refused(server: Server, depth: int) -> None:
    """Nesting beyond reason is 400, wherever it is noticed."""
    nested = '{"items":' * depth + "{}" + "}" * depth
    body = '{"prompt": "Hi", "structured_outputs": {"json": ' + nested + "}}"
    assert (await server.raw(COMPLETIONS, body.encode())).status == 400


@pytest.mark.parametrize(("path", "prompt"), [
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
])  # fmt: skip
async def test_patience_includes_compiling(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, prompt: dict[str, Any]
) -> None:
    """timeout_s ends the wait for a grammar, too: before anything is generated, and as 504."""
    monkeypatch.setattr(server.state.structured._checker, "check", lambda _text: asyncio.sleep(60, ""))
    fields = {"structured_outputs": {"regex": "a+"}, "timeout_s": 0.1, "max_tokens": 3}
    answer = await server.post(path, prompt | fields)
    assert (answer.status, answer.error["param"]) == (504, "timeout_s")
    assert not server.service.seen


async def test_the_loop_turns_while_a_grammar_is_tried_out(server: Server) -> None:
    """A bomb takes seconds in another process; meanwhile others are answered, and the loop does not wait."""
    bomb, _, _ = BOMBS[4]
    task = asyncio.ensure_future(server.post(COMPLETIONS, ASK[COMPLETIONS] | {"structured_outputs": bomb}))
    served = 0
    while not task.done():
        assert (await server.post(COMPLETIONS, ASK[COMPLETIONS])).status == 200
        served += 1
    assert served > 10
    assert (await task).status == 400
