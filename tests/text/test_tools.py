"""Tools of requests, formats of models, and grammars of calls."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from mask_walk import MASK_BYTES, walk

from colibrid.errors import RequestError
from colibrid.text import reasoning, structured, tools
from colibrid.text.structured_masks import StructuredOutput, Vocabulary
from colibrid.text.tools import Tool, calls_grammar, read_tools, tool_format
from colibrid.text.tools_reader import CallStart, FreeReader, LayoutReader
from colibrid.text.words import longest_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from colibrid.text.tokenizer import Tokenizer

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]}
TOOLS = tuple(Tool(name=name, parameters=SCHEMA, strict=False, param="tools[0]") for name in ("f", "get.it"))
NAMES = frozenset({"f", "get.it"})
FORMS = [tools.HERMES, tools.MISTRAL, tools.MISTRAL_ARGS, tools.DEEPSEEK, tools.DEEPSEEK_PLAIN, tools.LLAMA3_JSON]


@pytest.fixture
async def output(byte_level: Tokenizer) -> AsyncIterator[StructuredOutput]:
    output = StructuredOutput(Vocabulary(byte_level, (4093,)), MASK_BYTES)
    yield output
    await output.close()


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def test_functions_are_read() -> None:
    """Parameters may be left out or lack a type; strict is kept."""
    one, two = read_tools([function("a"), function("b", parameters={"properties": {}}, strict=True)])
    assert one.parameters == {"type": "object", "properties": {}}
    assert two == Tool(name="b", parameters={"type": "object", "properties": {}}, strict=True, param="tools[1]")


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ([{"type": "code_interpreter"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([function("a b")], "tools[0].function.name"),
        ([function("")], "tools[0].function.name"),
        ([function("a"), function("a")], "tools"),
        ([function("a", parameters=[])], "tools[0].function.parameters"),
        ([function("a", parameters={"type": "array"})], "tools[0].function.parameters"),
        ([function("a", strict="yes")], "tools[0].function.strict"),
        ([function("a")] * 129, "tools"),
    ],
)
def test_what_is_no_function_is_named(given: list[dict[str, Any]], param: str) -> None:
    """Wrong entries of tools are refused by their place."""
    with pytest.raises(RequestError) as caught:
        read_tools(given)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("… <tool_call>{…}</tool_call> …", tools.HERMES),
        ("<tool_call><function=name>", None),
        ("[TOOL_CALLS][", tools.MISTRAL),
        ("[TOOL_CALLS]name[ARGS]", tools.MISTRAL_ARGS),
        (tools._DS_CALLS + "```json", tools.DEEPSEEK),
        (tools._DS_CALLS, tools.DEEPSEEK_PLAIN),
        ('<|start_header_id|> {"name": "x", "parameters": {}}', tools.LLAMA3_JSON),
        ("plain", None),
    ],
)
def test_formats_are_found_in_templates(template: str, expected: tools.ToolFormat | None) -> None:
    """Each family's template shows how it writes calls; others are not guessed."""
    assert tool_format("auto", template) == expected
    assert tool_format("none", template) is None
    assert tool_format("hermes", template) == tools.HERMES


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.name} {form.layout.opening[:12]}")
@pytest.mark.parametrize("parallel", [False, True])
async def test_any_answer_of_the_grammar_is_calls(
    output: StructuredOutput, byte_level: Tokenizer, form: tools.ToolFormat, parallel: bool
) -> None:
    """Whatever the masks allow is read as calls of the tools, with arguments that fit."""
    grammar = calls_grammar(form, TOOLS, byte_level.added_ids, byte_level.added_words, parallel=parallel, free=False)
    rng = random.Random(3)
    for _ in range(4):
        text = await walk(output, byte_level, grammar, rng)
        calls = form.parse(text, NAMES) if form.end is None else []
        free = FreeReader(form, NAMES)
        events = free.push(text) + free.finish()
        forced = LayoutReader(form.layout, NAMES).push(text)
        names = [event.name for event in events if isinstance(event, CallStart)]
        assert names == [event.name for event in forced if isinstance(event, CallStart)]
        assert set(names) <= NAMES
        assert len(events) == 2 * len(names)
        assert 1 <= len(names) <= (tools.MAX_PARALLEL if parallel else 1)
        assert calls is not None


async def test_free_text_or_calls(output: StructuredOutput, byte_level: Tokenizer) -> None:
    """With strict tools any text may come, but calls are held to their parameters."""
    grammar = calls_grammar(
        tools.HERMES, TOOLS, byte_level.added_ids, byte_level.added_words, parallel=False, free=True
    )
    masker = await output.masker(grammar)
    assert masker.first[4093 // 8] >> 4093 % 8 & 1
    ids = byte_level.encode('Hm. <tool_call>\n{"name": "f", "arguments": {"n": ', add_special_tokens=False)
    mask = await masker.after(ids)
    digits = {byte_level.token_bytes(token) for token in range(4096) if mask[token // 8] >> token % 8 & 1}
    assert digits <= {str(digit).encode() for digit in range(10)}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    "form",
    [
        reasoning.THINK,
        reasoning.ReasoningFormat(name="odd", begin='"[/', end="/]*+ (\\d\n."),
        reasoning.ReasoningFormat(name="special", begin="<|im_start|>thought", end="<|im_end|>"),
        reasoning.ReasoningFormat(name="mixed", begin="<|im_start|>", end="so<|im_end|>"),
    ],
    ids=lambda form: form.name,
)
async def test_thinking_may_come_first(
    output: StructuredOutput, byte_level: Tokenizer, form: reasoning.ReasoningFormat, inside: bool
) -> None:
    """A model that thinks may do so before the answer, and need not."""
    answer = structured.choice(["yes"], "p")
    added, words = byte_level.added_ids, byte_level.added_words
    grammar = reasoning.behind_thinking(answer, form, added, words, inside=inside, calls=False)
    masker = await output.masker(grammar)
    thought = ("" if inside else form.begin) + f"hm {{{form.end}\n\n"
    mask = await masker.after(byte_level.encode(thought, add_special_tokens=False))
    allowed = {byte_level.token_bytes(token) for token in range(4096) if mask[token // 8] >> token % 8 & 1}
    assert b"y" in allowed
    assert b"{" not in allowed


async def test_harmony_answers_have_their_channels(output: StructuredOutput, byte_level: Tokenizer) -> None:
    """The answer stands in the final channel, behind an analysis or not; calls name their own channel."""
    answer = structured.choice(["yes"], "p")
    grammar = reasoning.behind_thinking(answer, reasoning.HARMONY, {}, longest_of(()), inside=False, calls=False)
    for text in (
        "<|channel|>final<|message|>",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>",
    ):
        masker = await output.masker(grammar)
        mask = await masker.after(byte_level.encode(text, add_special_tokens=False))
        allowed = {byte_level.token_bytes(token) for token in range(4096) if mask[token // 8] >> token % 8 & 1}
        assert b"y" in allowed


def test_schemas_of_tools_are_bounded() -> None:
    """A wrong or huge schema names its tool; all together are bounded, too."""
    deep: dict[str, Any] = {}
    for _ in range(70):
        deep = {"items": deep}
    wrong = Tool(name="f", parameters={"type": "object", "properties": {"a": deep}}, strict=False, param="tools[3]")
    with pytest.raises(RequestError) as caught:
        calls_grammar(tools.HERMES, [wrong], {}, longest_of(()), parallel=True, free=False)
    assert caught.value.param == "tools[3].function.parameters"
    large = [Tool(name=f"f{i}", parameters={"enum": ["x" * 5000]}, strict=False, param="t") for i in range(40)]
    with pytest.raises(RequestError, match="together"):
        calls_grammar(tools.HERMES, large, {}, longest_of(()), parallel=True, free=False)
