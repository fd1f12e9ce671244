"""Tools of a request, and the formats in which models call them. Pure; no I/O.

A format has two sides: how a section of a reply that holds calls is found and read (free generation: the model may
write what it likes, so a section counts only when it is complete and right), and a layout that a grammar forces
(constrained generation: calls can be passed on piece by piece).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from colibrid.errors import RequestError
from colibrid.text.structured import Grammar, lark_terms, schema_text
from colibrid.text.structured_limits import MAX_GRAMMAR_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

MAX_TOOLS = 128
MAX_PARALLEL = 16  # calls that a grammar allows in one reply
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}\Z")


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """One function that the model may call."""

    name: str
    parameters: dict[str, Any]
    strict: bool
    param: str  # of messages: tools[0]


class Call(NamedTuple):
    """A complete call."""

    name: str
    arguments: str  # a JSON object


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Calls as a grammar forces them: start, then opening, arguments and closing of each with `between`, then end."""

    start: str = ""
    opening: str  # {} stands for the name
    closing: str = ""
    between: str = ""
    end: str = ""


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How one family of models calls tools."""

    name: str  # one of _READERS, or harmony; with `read` any
    begins: tuple[str, ...]  # what a section of calls starts with
    at_start: bool = False  # only at the start of the reply
    end: str | None = None  # what it ends with; none: it goes on to the end of the reply
    layout: Layout
    short_ids: bool = False  # the model's templates want ids of nine letters and digits
    # Names and arguments of the calls in a section, where the format is a plugin's; ValueError: it holds none.
    read: Callable[[str], Iterable[tuple[object, object]]] | None = None

    def parse(self, section: str, names: frozenset[str]) -> list[Call] | None:
        """The calls in a section, its markers included; none unless all of it is right."""
        try:
            calls = [_call(*found, names) for found in (self.read or _READERS[self.name])(section)]
        except (ValueError, RecursionError):  # msgspec's and json's errors are ValueErrors
            return None
        return calls or None

    @property
    def markers(self) -> str:
        """All text of ours in a reply: special tokens in it must not be hidden from the reader."""
        layout = self.layout
        parts = (*self.begins, self.end or "", layout.start, layout.opening, layout.closing, layout.between, layout.end)
        return "\0".join((*parts, *_MARKS))


_DS = "<\uff5ctool\u2581{}\uff5c>"  # DeepSeek's tokens are written with full-width bars and lower blocks
_DS_CALLS, _DS_CALLS_END = _DS.format("calls\u2581begin"), _DS.format("calls\u2581end")
_DS_CALL, _DS_CALL_END, _DS_SEP = _DS.format("call\u2581begin"), _DS.format("call\u2581end"), _DS.format("sep")
_PYTHON_TAG = "<|python_tag|>"
_MARKS = (_DS_CALL, _DS_CALL_END, _DS_SEP, "[ARGS]", "[CALL_ID]")

HERMES = ToolFormat(
    name="hermes",
    begins=("<tool_call>",),
    end="</tool_call>",
    layout=Layout(opening='<tool_call>\n{"name": "{}", "arguments": ', closing="}\n</tool_call>", between="\n"),
)
MISTRAL = ToolFormat(
    name="mistral",
    begins=("[TOOL_CALLS]",),
    layout=Layout(start="[TOOL_CALLS][", opening='{"name": "{}", "arguments": ', closing="}", between=", ", end="]"),
    short_ids=True,
)
MISTRAL_ARGS = msgspec.structs.replace(MISTRAL, layout=Layout(opening="[TOOL_CALLS]{}[ARGS]"))
DEEPSEEK = ToolFormat(
    name="deepseek",
    begins=(_DS_CALLS,),
    end=_DS_CALLS_END,
    layout=Layout(
        start=_DS_CALLS,
        opening=f"{_DS_CALL}function{_DS_SEP}{{}}\n```json\n",
        closing=f"\n```{_DS_CALL_END}",
        between="\n",
        end=_DS_CALLS_END,
    ),
)
DEEPSEEK_PLAIN = msgspec.structs.replace(
    DEEPSEEK,
    layout=Layout(start=_DS_CALLS, opening=f"{_DS_CALL}{{}}{_DS_SEP}", closing=_DS_CALL_END, end=_DS_CALLS_END),
)
LLAMA3_JSON = ToolFormat(
    name="llama3_json",
    begins=("{", _PYTHON_TAG),
    at_start=True,
    layout=Layout(opening='{"name": "{}", "parameters": ', closing="}", between="; "),
)

HARMONY = ToolFormat(  # read by reasoning.HarmonyReader, since calls have a channel as thinking has
    name="harmony",
    begins=("<|channel|>commentary",),
    layout=Layout(opening="<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"),
)


def tool_format(name: str, template: str) -> ToolFormat | None:
    """The format of that name, or with `auto` that of the template; none for `none` and templates of other formats."""
    found = _detected(template) if name == "auto" else name
    if found == "mistral":
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if found == "deepseek":
        return DEEPSEEK if "```json" in template else DEEPSEEK_PLAIN
    return {"hermes": HERMES, "llama3_json": LLAMA3_JSON}.get(found)


def _detected(template: str) -> str:
    if _DS_CALLS in template:
        return "deepseek"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template and not any(other in template for other in ("<function=", "<arg_key>")):
        return "hermes"
    if "<|start_header_id|>" in template and '"parameters": ' in template:
        return "llama3_json"
    return "none"


# ------------------------------------------------------------- of a request


def read_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """The functions among `tools`. Raises RequestError naming the entry for what is none."""
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools has {len(tools)} entries, more than {MAX_TOOLS}; send fewer.", param="tools")
    found = [_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    for tool in found:
        if sum(other.name == tool.name for other in found) > 1:
            raise RequestError(f"tools: {tool.name} is there twice; rename one.", param="tools")
    return tuple(found)


def _read_tool(tool: Mapping[str, Any], param: str) -> Tool:
    if tool.get("type") != "function":
        raise RequestError(
            f"{param}.type: only tools of type function can be called; correct it.",
            param=f"{param}.type",
            code="unsupported_value",
        )
    function = tool.get("function")
    if not isinstance(function, dict):
        raise RequestError(f"{param}.function: expected an object with a name; send it.", param=f"{param}.function")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.match(name):
        raise RequestError(
            f"{param}.function.name: expected 1 to 128 letters, digits and _.:/-; correct it.",
            param=f"{param}.function.name",
        )
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise RequestError(
            f"{param}.function.parameters: expected a JSON Schema of type object; correct it.",
            param=f"{param}.function.parameters",
        )
    strict = function.get("strict")
    if not (strict is None or isinstance(strict, bool)):
        raise RequestError(
            f"{param}.function.strict: expected a boolean; correct it.", param=f"{param}.function.strict"
        )
    return Tool(name=name, parameters={"type": "object"} | parameters, strict=bool(strict), param=param)


def calls_grammar(
    form: ToolFormat,
    tools: Sequence[Tool],
    added: Mapping[str, int],
    words: re.Pattern[str],
    *,
    parallel: bool,
    free: bool,
) -> Grammar:
    """Nothing but calls of these tools, with arguments as they say; with `free` any text before, and calls or none.

    `added`: ids of the tokenizer's added tokens by their text; `words` finds these. Raises RequestError naming a tool with a wrong schema.
    """
    layout = form.layout

    def literal(text: str) -> str:
        return lark_terms(text, words, added) or '""'

    rules = []
    for index, tool in enumerate(tools):
        schema = schema_text(tool.parameters, f"{tool.param}.function.parameters")
        rules.append(f"c{index}: {literal(layout.opening.replace('{}', tool.name))} %json {schema}")
    more = f" ({literal(layout.between)} call){{0,{MAX_PARALLEL - 1}}}" if parallel else ""
    lines = [
        "start: calls",
        f"calls: {literal(layout.start)} call{more} {literal(layout.end)}",
        f"call: ({' | '.join(f'c{index}' for index in range(len(tools)))}) {literal(layout.closing)}",
        *rules,
    ]
    if free:
        lines[0] = f"start: TEXT | {'' if form.at_start else 'TEXT '}calls"
        lines.append("TEXT: /([^{](.|\\n)*)?/" if form.at_start else "TEXT: /(.|\\n)*/")
    lark = "\n".join(lines) + "\n"
    if len(lark.encode()) > 2 * MAX_GRAMMAR_BYTES:
        raise RequestError(
            f"tools: their schemas have {len(lark.encode())} bytes together, more than {2 * MAX_GRAMMAR_BYTES}; send fewer.",
            param="tools",
        )
    return Grammar(param="tools", lark=lark)


# -------------------------------------------------------- reading sections


def _call(name: object, arguments: object, names: frozenset[str]) -> Call:
    if not isinstance(name, str) or name not in names:
        raise ValueError("no such tool")
    if isinstance(arguments, str):
        arguments = msgspec.json.decode(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("arguments are no object")  # noqa: TRY004 - of the model's text, not of a caller
    return Call(name, json.dumps(arguments, ensure_ascii=False))


def _of_object(value: object) -> tuple[object, object]:
    if not isinstance(value, dict):
        raise ValueError("a call is an object")  # noqa: TRY004
    return value.get("name"), value.get("arguments", value.get("parameters", {}))


def _hermes(section: str) -> Iterator[tuple[object, object]]:
    yield _of_object(msgspec.json.decode(section.removeprefix("<tool_call>").removesuffix("</tool_call>").strip()))


def _mistral(section: str) -> Iterator[tuple[object, object]]:
    if "[ARGS]" in section:
        for part in section.split("[TOOL_CALLS]")[1:]:
            head, found, arguments = part.partition("[ARGS]")
            if not found:
                raise ValueError("a call without arguments")
            yield head.partition("[CALL_ID]")[0].strip(), arguments.strip()
        return
    calls = msgspec.json.decode(section.removeprefix("[TOOL_CALLS]").strip())
    for call in calls if isinstance(calls, list) else [calls]:
        yield _of_object(call)


def _deepseek(section: str) -> Iterator[tuple[object, object]]:
    for part in section.removesuffix(_DS_CALLS_END).split(_DS_CALL)[1:]:
        head, found, rest = part.partition(_DS_SEP)
        if not found or _DS_CALL_END not in rest:
            raise ValueError("a call that does not end")
        rest = rest.partition(_DS_CALL_END)[0]
        name, fence, arguments = rest.partition("\n```json\n")
        if fence:  # DeepSeek-V3 and R1; V3.1 has the name first and no fence
            yield name.strip(), arguments.strip().removesuffix("```").strip()
        else:
            yield head.strip(), rest.strip()


def _llama3_json(section: str) -> Iterator[tuple[object, object]]:
    rest = section.strip().removeprefix(_PYTHON_TAG).strip()
    decoder = json.JSONDecoder()
    while rest:
        call, end = decoder.raw_decode(rest)
        yield _of_object(call)
        rest = rest[end:].lstrip().removeprefix(";").lstrip()


_READERS = {"hermes": _hermes, "mistral": _mistral, "deepseek": _deepseek, "llama3_json": _llama3_json}
