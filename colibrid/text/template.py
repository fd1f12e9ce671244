"""The model's own chat template, rendered in a sandbox with a limit on its work.

minijinja has no access to Python objects, files or imports; fuel bounds the number of instructions.
Semantics follow Hugging Face: blocks are trimmed, `tojson` keeps non-ASCII text and escapes no HTML, `tools` and
`documents` are none when there are none, fields that are null are left out of messages.
"""

from __future__ import annotations

import datetime as dt
import json
import re
import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import minijinja
import msgspec

from colibrid.errors import ModelError, RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

FUEL = 2_000_000  # instructions of one rendering; a message costs about 50
_MAX_INDENT = 16  # of tojson: fuel does not count what a filter writes
_DEFAULT, _TOOL_USE = "default", "tool_use"  # names that Hugging Face gives to templates
# Marks for training; no effect on the text but that of any block: variables set inside end with it.
_GENERATION_TAG = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_NOT_ASCII = re.compile("[\x80-\U000fffff]")  # not the last plane: the marks of text.guard have to stay
_TOKEN_VARIABLES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_OURS = frozenset(  # variables that chat_template_kwargs cannot set: they have fields of their own, or are the model's
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "namespace", "dict",
     "range", "reasoning_effort", "chat_template", "response_format", "tool_choice", "continue_final_message",
     *_TOKEN_VARIABLES}
)  # fmt: skip


class TemplateRefusalError(Exception):
    """The template called raise_exception: the messages do not fit this model."""


class TokenizerConfig(msgspec.Struct, frozen=True):
    """What serving needs of tokenizer_config.json."""

    chat_template: str | list[dict[str, str]] | None = None
    bos_token: str | dict[str, Any] | None = None
    eos_token: str | dict[str, Any] | None = None
    pad_token: str | dict[str, Any] | None = None
    unk_token: str | dict[str, Any] | None = None
    sep_token: str | dict[str, Any] | None = None
    cls_token: str | dict[str, Any] | None = None
    mask_token: str | dict[str, Any] | None = None

    @property
    def template_sources(self) -> dict[str, str]:
        """Templates by name; empty where there is none."""
        if isinstance(self.chat_template, list):
            return {
                entry["name"]: entry["template"] for entry in self.chat_template if {"name", "template"} <= {*entry}
            }
        return {} if self.chat_template is None else {_DEFAULT: self.chat_template}

    @property
    def token_strings(self) -> dict[str, str]:
        """Values of bos_token, eos_token … that templates may use."""
        found = {}
        for name in _TOKEN_VARIABLES:
            value = getattr(self, name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                found[name] = value
        return found


class ChatTemplate:
    """A model's compiled templates. `render` may be called from any thread."""

    def __init__(self, source: str | Mapping[str, str], token_strings: Mapping[str, str] | None = None) -> None:
        """`source`: the template, or several by name. Raises ValueError with the reason when one is not valid."""
        self._sources = {_DEFAULT: source} if isinstance(source, str) else dict(source)
        if _DEFAULT not in self._sources:
            raise ValueError(f"of the templates {', '.join(sorted(self._sources))} none is named {_DEFAULT}")
        self._variables = dict(token_strings or {})
        self._environment = minijinja.Environment(
            fuel=FUEL,
            debug=False,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_escape_callback=lambda _name: False,
        )
        self._environment.add_filter("tojson", _to_json)
        self._environment.add_test("iterable", _is_iterable)
        self._environment.add_global("raise_exception", _raise_exception)
        self._environment.add_global("strftime_now", _strftime_now)
        self._known: dict[str, frozenset[str]] = {}
        try:
            for name, text in self._sources.items():
                self._environment.add_template(name, _GENERATION_TAG.sub(_plain_block, text))
                self._known[name] = frozenset(self._environment.undeclared_variables_in_template(name))
        except minijinja.TemplateError as error:
            raise ValueError(str(error)) from error

    @classmethod
    def load(cls, config: TokenizerConfig, template_file: Path | None) -> ChatTemplate | None:
        """The template of the file, else those of the configuration, else none. Raises ModelError: what is wrong."""
        try:
            sources = config.template_sources
            if template_file is not None:
                sources = {_DEFAULT: template_file.read_text(encoding="utf-8")}
            return cls(sources, config.token_strings) if sources else None
        except (OSError, ValueError) as error:
            where = template_file or "chat_template of tokenizer_config.json"
            raise ModelError(f"{where} cannot be used: {error}; fetch the checkpoint again or correct it") from error

    def _name(self, *, tools: bool) -> str:
        return _TOOL_USE if tools and _TOOL_USE in self._sources else _DEFAULT

    def source(self, *, tools: bool = False) -> str:
        """The text of the template that is used with or without tools."""
        return self._sources[self._name(tools=tools)]

    def knows(self, word: str, *, tools: bool = False) -> bool:
        """True iff the template names `word` (a role, a variable) at all."""
        return word in self.source(tools=tools)

    def settable(self, *, tools: bool = False) -> frozenset[str]:
        """Names of variables that the template reads and a client may set."""
        return self._known[self._name(tools=tools)] - _OURS

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final: bool = False,
        **variables: object,
    ) -> str:
        """The prompt text; with `continue_final` it ends with the last message's content.

        Raises RequestError when the template refuses the messages or runs too long.
        """
        error: minijinja.TemplateError | None = None
        for form in _forms(messages):
            try:
                return self._render(form, tools, add_generation_prompt, variables, continue_final=continue_final)
            except TemplateRefusalError as refusal:
                raise RequestError(
                    f"The model's chat template refuses the messages: {refusal}", param="messages"
                ) from refusal
            except minijinja.TemplateError as failure:
                error = error or failure
            except (TypeError, ValueError, ArithmeticError, LookupError) as failure:  # of the functions below
                raise _cannot_render("a function has arguments that it does not know") from failure
        raise _cannot_render(str(error)) from error

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, object],
        *,
        continue_final: bool,
    ) -> str:
        tag = f"{secrets.token_hex(16)} " if continue_final else ""
        if continue_final:
            messages = [*messages[:-1], messages[-1] | {"content": messages[-1].get("content", "") + tag}]
        text: str = self._environment.render_template(
            self._name(tools=tools is not None),
            messages=messages,
            tools=None if tools is None else list(tools),
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._variables,
            **variables,
        )
        return _cut_at(text, tag) if continue_final else text


def _plain_block(tag: re.Match[str]) -> str:
    before, end, after = tag.groups()
    return f"{{%{before} {end or ''}with {after}%}}"


def _forms(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The messages as templates may expect them, the form that Hugging Face gives them first.

    Templates of some models fail on a missing content, want it null beside tool calls, or want the arguments of tool
    calls as text. Their own models' code gave them that.
    """
    plain = [_filled(message) for message in messages]
    yield plain
    if any("content" not in message for message in plain):
        yield [{"content": "", **message} for message in plain]
    if any(message.get("tool_calls") for message in plain):
        as_text = [_text_arguments(message) for message in plain]
        yield [{"content": "", **message} for message in as_text]
        yield [message | {"content": message.get("content") or None} for message in as_text]


def _filled(message: Mapping[str, Any]) -> dict[str, Any]:
    filled = {name: value for name, value in message.items() if value is not None}
    if "reasoning_content" in filled:
        filled.setdefault("thinking", filled["reasoning_content"])  # the name that gpt-oss templates read
    return filled


def _text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        if isinstance(function.get("arguments"), dict):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def _cut_at(text: str, tag: str) -> str:
    """`text` before the tag that ended the last message; where the template trimmed the message, trimmed, too."""
    place = text.rfind(tag.strip())
    if place < 0:
        raise RequestError(
            "The model's chat template changes the last message, so it cannot be continued; leave"
            " continue_final_message out.",
            param="continue_final_message",
        )
    return text[:place] if text.startswith(tag, place) else text[:place].rstrip()


def _cannot_render(why: str) -> RequestError:
    return RequestError(
        f"The model's chat template cannot render these messages: {why}. Check roles and contents, or send a finished"
        " prompt to /v1/completions.",
        param="messages",
    )


def load_tokenizer_config(path: Path | None) -> TokenizerConfig:
    """Reads tokenizer_config.json; none: all fields absent. Raises ModelError naming the file."""
    if path is None:
        return TokenizerConfig()
    try:
        return msgspec.json.decode(path.read_bytes(), type=TokenizerConfig)
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{path} cannot be used: {error}; fetch the checkpoint again") from error


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is not None and not 0 <= int(indent) <= _MAX_INDENT:
        raise ValueError(f"indent is {indent}, beyond 0 to {_MAX_INDENT}")
    text = json.dumps(
        value,
        ensure_ascii=False,
        indent=indent,
        separators=(separators[0], separators[1]) if separators else None,
        sort_keys=sort_keys,
    )
    return _NOT_ASCII.sub(lambda found: json.dumps(found.group())[1:-1], text) if ensure_ascii else text


def _is_iterable(value: object) -> bool:
    return isinstance(value, Iterable)  # minijinja's own says so of none, too


def _raise_exception(message: str = "") -> str:
    raise TemplateRefusalError(str(message)[:500])


def _strftime_now(layout: str) -> str:
    return dt.datetime.now().astimezone().strftime(layout)
