"""What a chat request says about tools, and how the reply is to be read and bounded because of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from colibrid.errors import RequestError
from colibrid.http.constraint import check_ending
from colibrid.http.errors import shown
from colibrid.text import reasoning
from colibrid.text.reply import ReplyOptions
from colibrid.text.structured import both
from colibrid.text.tools import HARMONY, Tool, ToolFormat, calls_grammar, read_tools, tool_format

if TYPE_CHECKING:
    from colibrid.http.prompts import Prompt
    from colibrid.http.state import AppState
    from colibrid.http.types import ChatBody
    from colibrid.text.reasoning import ReasoningFormat
    from colibrid.text.structured import Grammar

_MODES = ("none", "auto", "required")


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """Tools that this reply may call, or must."""

    form: ToolFormat
    tools: tuple[Tool, ...]
    forced: bool
    parallel: bool


def reasoning_of(state: AppState) -> ReasoningFormat | None:
    """How the model thinks; none where it does not, or where nobody asks for it to be told apart."""
    text, asked = state.text, state.settings.model.reasoning_parser
    if asked == "auto" and state.plugins.reasoning_format is not None:
        return state.plugins.reasoning_format
    template = "" if text.template is None else text.template.source()
    return reasoning.reasoning_format(asked if asked != "auto" else text.reasoning_parser or "auto", template)


def tool_use(body: ChatBody, state: AppState) -> ToolUse | None:
    """None when no tool may be called. Raises RequestError naming the field that does not fit."""
    tools = read_tools(body.tools or ())
    mode, named = _choice(body.tool_choice, tools)
    if mode == "none" or not tools:
        return None
    template = state.text.template
    if template is None or not template.knows("tools", tools=True):
        raise RequestError(
            "The model's chat template has no place for tools; describe them in a system message.",
            param="tools",
            code="unsupported_value",
        )
    parallel = body.parallel_tool_calls is not False and named is None
    form: ToolFormat | None
    if reasoning_of(state) == reasoning.HARMONY:
        form, parallel = HARMONY, False  # a call ends the reply
    elif state.plugins.tool_format is not None and state.settings.model.tool_parser == "auto":
        form = state.plugins.tool_format
    else:
        asked = state.settings.model.tool_parser
        name = asked if asked != "auto" else state.text.tool_parser or "auto"
        form = tool_format(name, template.source(tools=True))
    if form is None:
        raise RequestError(
            "It is not known how this model writes tool calls; set model.tool_parser, or leave tools out.",
            param="tools",
            code="unsupported_value",
        )
    callable_ = tools if named is None else (named,)
    return ToolUse(form=form, tools=callable_, forced=mode == "required", parallel=parallel)


def _choice(choice: str | dict[str, Any] | None, tools: tuple[Tool, ...]) -> tuple[str, Tool | None]:
    """(mode, the one tool that is named)."""
    if choice is None:
        return "auto", None
    if isinstance(choice, str):
        if choice not in _MODES:
            raise RequestError(
                f"tool_choice = {shown(choice)}: send {', '.join(_MODES)} or a named function.", param="tool_choice"
            )
        if choice == "required" and not tools:
            raise RequestError("tool_choice = required needs tools; send some.", param="tool_choice")
        return choice, None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise RequestError(
            'tool_choice: expected {"type": "function", "function": {"name": …}}; correct it.',
            param="tool_choice",
            code="unsupported_value",
        )
    for tool in tools:
        if tool.name == name:
            return "required", tool
    raise RequestError(f"tool_choice: {shown(name)} is not among tools; send it there.", param="tool_choice")


def reply_options(use: ToolUse | None, prompt: Prompt, state: AppState) -> ReplyOptions:
    """How the reply is read."""
    options = ReplyOptions(reasoning=reasoning_of(state), inside=prompt.thinking == "inside")
    if use is None:
        return options
    return msgspec.structs.replace(
        options,
        form=use.form,
        names=frozenset(tool.name for tool in use.tools),
        forced=use.forced,
        single=not use.parallel,
    )


def reply_grammar(
    body: ChatBody, use: ToolUse | None, answer: Grammar | None, prompt: Prompt, state: AppState
) -> Grammar | None:
    """What the reply must be: `answer`, calls, or one of them, behind thinking where the model thinks."""
    grammar = answer
    tokenizer = state.text.tokenizer
    if use is not None and (use.forced or answer is not None or any(tool.strict for tool in use.tools)):
        check_ending(body, "tools")
        free = not use.forced and answer is None
        grammar = calls_grammar(
            use.form, use.tools, tokenizer.added_ids, tokenizer.added_words, parallel=use.parallel, free=free
        )
        if not use.forced and answer is not None:
            grammar = both(answer, grammar)
    if grammar is None:
        return None
    form = reasoning_of(state)
    if form is None or prompt.thinking == "behind":
        return grammar
    calls_only = use is not None and use.forced
    inside = prompt.thinking == "inside"
    return reasoning.behind_thinking(
        grammar, form, tokenizer.added_ids, tokenizer.added_words, inside=inside, calls=calls_only
    )
