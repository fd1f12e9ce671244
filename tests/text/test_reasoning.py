"""Thinking in replies."""

from __future__ import annotations

import pytest
from reading import NAMES, hermes, read

from colibrid.text import reasoning, tools
from colibrid.text.reasoning import HarmonyReader, ReasoningFormat, ThinkReader
from colibrid.text.tools_reader import CallArguments, CallStart, Content, FreeReader, Reasoning


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>\nhm\n\nok\n</think>\n\nHello\n", False, [Reasoning("hm\n\nok"), Content("Hello\n")]),
        ("  <think>hm</think>Hello", False, [Reasoning("hm"), Content("Hello")]),
        ("\nhm\n</think>\nHello", True, [Reasoning("hm"), Content("Hello")]),
        ("<think></think>Hello", False, [Content("Hello")]),
        ("<think>\nhm </thin", False, [Reasoning("hm </thin")]),
        ("hm\n", True, [Reasoning("hm")]),
        ("Hello <think>x</think>", False, [Content("Hello <think>x</think>")]),
        ("<thi", False, [Content("<thi")]),
        ("</think>a", True, [Content("a")]),
        ("", True, []),
    ],
)
def test_think_tags(text: str, inside: bool, expected: list[object]) -> None:
    """Thinking stands at the start, opened by the model or by the prompt; line breaks around it are dropped."""
    assert read(lambda: ThinkReader(inside=inside), text) == expected


def test_calls_behind_thinking() -> None:
    """What follows the thinking goes to the reader of tool calls; calls within it are thoughts."""
    text = f"<think>\n{hermes('f', '{}')}\n</think>\n\n{hermes('f', '{}')}"
    expected = [Reasoning(hermes("f", "{}")), CallStart("f"), CallArguments("{}")]
    assert read(lambda: ThinkReader(rest=FreeReader(tools.HERMES, NAMES), inside=False), text) == expected


def test_thinking_is_counted() -> None:
    """The reader knows where the thinking ended, in characters of the reply."""
    reader = ThinkReader(inside=False)
    reader.push("<think>\nhm")
    assert reader.thinks
    assert reader.reasoning_chars is None
    reader.push("\n</think>\n\nHello")
    assert reader.reasoning_chars == len("<think>\nhm\n</think>")


ANALYSIS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{ANALYSIS}<|channel|>final<|message|>Hello", [Reasoning("hm"), Content("Hello")]),
        ("<|channel|>final<|message|>Hello<|return|>", [Content("Hello")]),
        ("<|channel|>analysis<|message|>hm", [Reasoning("hm")]),
        (f'{ANALYSIS}{CALL}{{"a": 1}}<|call|>', [Reasoning("hm"), CallStart("f"), CallArguments('{"a": 1}')]),
        (f'{CALL}{{"a": 1}}', [CallStart("f"), CallArguments('{"a": 1}')]),
        (f'{CALL}{{"a": ', [Content('{"a": ')]),
        (CALL.replace("functions.f", "functions.g") + "{}", [Content("{}")]),
        ("<|channel|>commentary<|message|>I will look.<|end|>", [Content("I will look.")]),
        ("Hello", [Content("Hello")]),
        ("<|channel|>fin", []),
    ],
)
def test_harmony_channels(text: str, expected: list[object]) -> None:
    """Analysis is thinking, commentary to a function is a call, the rest is for the user."""
    assert read(lambda: HarmonyReader(NAMES), text) == expected


def test_parsers_are_found_in_templates() -> None:
    """The setting comes first; else what the template speaks of."""
    assert reasoning.reasoning_format("auto", "a </think> b") == reasoning.THINK
    assert reasoning.reasoning_format("auto", "<|channel|>final<|message|> </think>") == reasoning.HARMONY
    assert reasoning.reasoning_format("auto", "plain") is None
    assert reasoning.reasoning_format("none", "a </think> b") is None
    assert reasoning.reasoning_format("harmony", "a </think> b") == reasoning.HARMONY


@pytest.mark.parametrize(
    ("prompt", "continued", "expected"),
    [
        ("user: a <think> b\nassistant\n", "", "before"),
        ("assistant\n<think>\n", "", "inside"),
        ("assistant\n<think>\n\n</think>\n\n", "", "behind"),
        ("assistant\n<think>\nhm", "<think>\nhm", "inside"),
        ("assistant\n<think>\nhm</think> He", "<think>\nhm</think> He", "behind"),
        ("assistant\nHe", "He", "behind"),
    ],
)
def test_prompts_may_have_begun_to_think(prompt: str, continued: str, expected: str) -> None:
    """A reply begins before, inside or behind thinking, as the prompt and a message to continue leave it."""
    assert reasoning.thinking_at(reasoning.THINK, prompt, continued) == expected
    other = ReasoningFormat(name="x", begin="[[", end="]]")
    swapped = [text.replace("<think>", "[[").replace("</think>", "]]") for text in (prompt, continued)]
    assert reasoning.thinking_at(other, *swapped) == expected
    assert reasoning.thinking_at(None, prompt, continued) == ("behind" if continued else "before")


def test_other_marks() -> None:
    """Marks of a plugin's format are read like tags, also in pieces; what is between them may hold tags."""
    form = ReasoningFormat(name="x", begin="<|hm|>", end="<|so|>")
    assert form.markers.split("\0") == ["<|hm|>", "<|so|>"]
    expected = [Reasoning("a <think>"), Content("Hello")]
    assert read(lambda: ThinkReader(form, inside=False), "<|hm|>\na <think>\n<|so|>\nHello") == expected


@pytest.mark.parametrize(("begin", "end", "field"), [("", "x", "begin"), ("x", " ", "end"), ("x\n", "y", "begin")])
def test_marks_that_are_none(begin: str, end: str, field: str) -> None:
    """Empty marks, and those with white space around them, which models write or leave out, are refused."""
    with pytest.raises(ValueError, match=f"reasoning format x: {field} = "):
        ReasoningFormat(name="x", begin=begin, end=end)
