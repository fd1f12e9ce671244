"""Tool calls in replies that arrive in pieces."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from reading import NAMES, hermes, joined, read

from colibrid.text import tools
from colibrid.text.tools_reader import (
    CallArguments,
    CallStart,
    Content,
    FreeReader,
    LayoutReader,
    PlainReader,
    Reasoning,
)

if TYPE_CHECKING:
    from colibrid.text.tools_reader import Event

ARGUMENTS = {"city": 'Trom"sø', "n": [1, {"a": "}{\\"}]}
TEXT = json.dumps(ARGUMENTS, ensure_ascii=False)
F = [CallStart("f"), CallArguments(TEXT)]
G = [CallStart("get_weather"), CallArguments("{}")]
DS = tools._DS


def deepseek(name: str, arguments: str) -> str:
    return f"{tools._DS_CALL}function{tools._DS_SEP}{name}\n```json\n{arguments}\n```{tools._DS_CALL_END}"


def deepseek_plain(name: str, arguments: str) -> str:
    return f"{tools._DS_CALL}{name}{tools._DS_SEP}{arguments}{tools._DS_CALL_END}"


def as_json(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "arguments": {arguments}}}'


def in_section(*calls: str) -> str:
    return tools._DS_CALLS + "\n".join(calls) + tools._DS_CALLS_END


GOOD = [
    (tools.HERMES, hermes("f", TEXT), F),
    (tools.HERMES, "Let me see.\n\n" + hermes("f", TEXT) + "\n" + hermes("get_weather", "{}") + "\n",
     [Content("Let me see."), *F, *G]),
    (tools.HERMES, hermes("f", json.dumps(TEXT)), F),
    (tools.HERMES, '<tool_call>{"arguments": {}, "name": "get_weather"}</tool_call>', G),
    (tools.MISTRAL, f"[TOOL_CALLS] [{as_json('f', TEXT)}, {as_json('get_weather', '{}')}]", [*F, *G]),
    (tools.MISTRAL, f"Hm. [TOOL_CALLS]{as_json('f', TEXT)}", [Content("Hm."), *F]),
    (tools.MISTRAL, f"[TOOL_CALLS]f[ARGS]{TEXT}[TOOL_CALLS]get_weather[CALL_ID]abc[ARGS]{{}}", [*F, *G]),
    (tools.DEEPSEEK, in_section(deepseek("f", TEXT), deepseek("get_weather", "{}")), [*F, *G]),
    (tools.DEEPSEEK, "Hm" + in_section(deepseek_plain("f", TEXT)), [Content("Hm"), *F]),
    (tools.LLAMA3_JSON, as_json("f", TEXT), F),
    (tools.LLAMA3_JSON, '<|python_tag|>{"name": "get_weather", "parameters": {}}; ' + as_json("f", TEXT), [*G, *F]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "expected"), GOOD)
def test_calls_are_found(form: tools.ToolFormat, text: str, expected: list[Event]) -> None:
    """Each format's calls, with text before them, are the same however the reply is cut."""
    assert read(lambda: FreeReader(form, NAMES), text) == joined(expected)


BAD = [
    (tools.HERMES, hermes("g", "{}")),
    (tools.HERMES, hermes("f", '{"a": }')),
    (tools.HERMES, hermes("f", "[1]")),
    (tools.HERMES, "<tool_call>f()</tool_call>"),
    (tools.HERMES, '<tool_call>\n{"name": "f", "arguments": {}}'),
    (tools.HERMES, "<tool_call>[1]</tool_call>"),
    (tools.HERMES, "<tool_call>" + "[" * 100_000 + "</tool_call>"),
    (tools.HERMES, "a < b <tool"),
    (tools.HERMES, "no call at all\n"),
    (tools.MISTRAL, "[TOOL_CALLS]f{}"),
    (tools.MISTRAL, "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f"),
    (tools.MISTRAL, "[TOOL_CALLS][]"),
    (tools.MISTRAL, "[TOOL_CALLS]" + "[" * 100_000),
    (tools.DEEPSEEK, in_section(tools._DS_CALL + "f")),
    (tools.DEEPSEEK, tools._DS_CALLS + deepseek("f", "{}")),
    (tools.DEEPSEEK, in_section(deepseek("g", "{}"))),
    (tools.LLAMA3_JSON, '{"a": 1}'),
    (tools.LLAMA3_JSON, "{" * 100_000),
    (tools.LLAMA3_JSON, 'Use {"name": "f", "parameters": {}}'),
    (tools.LLAMA3_JSON, "<|python_tag|>print(1)"),
]


@pytest.mark.parametrize(("form", "text"), BAD)
def test_what_is_no_call_is_content(form: tools.ToolFormat, text: str) -> None:
    """Unknown names, wrong JSON, sections that do not end: all of it is content, to the last character."""
    found = read(lambda: FreeReader(form, NAMES), text, cuts=20 if len(text) < 1000 else 1)
    assert found == [Content(text)]


def test_text_is_given_out_at_once() -> None:
    """Only what may begin a section is held back, and white space that may stand before one."""
    reader = FreeReader(tools.HERMES, NAMES)
    assert reader.push("Hello there <") == [Content("Hello there")]
    assert reader.push("b> you ") == [Content(" <b> you")]
    assert reader.finish() == [Content(" ")]


def test_text_behind_calls() -> None:
    """A call that fails does not spoil the next, nor the text after it."""
    text = "a " + hermes("g", "{}") + hermes("f", TEXT) + "\n\nb"
    assert read(lambda: FreeReader(tools.HERMES, NAMES), text) == [
        Content("a " + hermes("g", "{}")) if False else Content("a" + hermes("g", "{}")), *F, Content("\n\nb")
    ]  # fmt: skip


@pytest.mark.parametrize(
    "form",
    [tools.HERMES, tools.MISTRAL, tools.MISTRAL_ARGS, tools.DEEPSEEK, tools.DEEPSEEK_PLAIN, tools.LLAMA3_JSON],
    ids=lambda form: f"{form.name} {form.layout.opening[:12]}",
)
def test_forced_calls_are_passed_on_as_they_come(form: tools.ToolFormat) -> None:
    """Layouts are read without waiting for the end, and the free reader reads them as well."""
    layout = form.layout
    one = layout.opening.replace("{}", "f") + TEXT + layout.closing
    two = layout.opening.replace("{}", "get_weather") + "{}" + layout.closing
    text = layout.start + one + layout.between + two + layout.end
    assert read(lambda: LayoutReader(layout, NAMES), text) == [*F, *G]
    assert read(lambda: FreeReader(form, NAMES), text) == [*F, *G]
    reader = LayoutReader(layout, NAMES)
    assert reader.push(layout.start + layout.opening.replace("{}", "f")) == [CallStart("f")]
    assert reader.push('{"a') == [CallArguments('{"a')]
    assert reader.finish() == []


def test_without_tools_all_is_content() -> None:
    """Markers mean nothing then."""
    assert read(PlainReader, hermes("f", "{}")) == [Content(hermes("f", "{}"))]
    assert Reasoning("a") != Content("a") or type(Reasoning("a")) is not type(Content("a"))
