"""The model's own chat template, rendered in a sandbox with a limit on its work.

minijinja has no access to Python objects, files or imports; fuel bounds the number of instructions.
Semantics follow Hugging Face: blocks are trimmed, `tojson` keeps non-ASCII text and escapes no HTML.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from typing import TYPE_CHECKING, Any

import minijinja
import msgspec

from colibrid.errors import ModelError, RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

FUEL = 2_000_000  # instructions of one rendering; a message costs about 50
_MAX_INDENT = 16  # of tojson: fuel does not count what a filter writes
_NAME = "chat"
_GENERATION_TAG = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # marks for training; no effect on text
_TOKEN_VARIABLES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


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
    def template_source(self) -> str | None:
        """The template named default where there are several."""
        if isinstance(self.chat_template, list):
            named = {entry.get("name"): entry.get("template") for entry in self.chat_template}
            return named.get("default")
        return self.chat_template

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
    """One compiled template. `render` may be called from any thread."""

    def __init__(self, source: str, token_strings: Mapping[str, str] | None = None) -> None:
        """Raises ValueError with the reason when `source` is not a valid template."""
        self._source = source
        self._variables = dict(token_strings or {})
        self._environment = minijinja.Environment(
            fuel=FUEL,
            debug=False,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_escape_callback=lambda _name: False,
        )
        self._environment.add_filter("tojson", _to_json)
        self._environment.add_global("raise_exception", _raise_exception)
        self._environment.add_global("strftime_now", _strftime_now)
        try:
            self._environment.add_template(_NAME, _GENERATION_TAG.sub("", source))
        except minijinja.TemplateError as error:
            raise ValueError(str(error)) from error

    @classmethod
    def load(cls, config: TokenizerConfig, template_file: Path | None) -> ChatTemplate | None:
        """The template of the file, else of the configuration, else none. Raises ModelError naming what is wrong."""
        try:
            source = template_file.read_text(encoding="utf-8") if template_file else config.template_source
            return None if source is None else cls(source, config.token_strings)
        except (OSError, ValueError) as error:
            where = template_file or "chat_template of tokenizer_config.json"
            raise ModelError(f"{where} cannot be used: {error}; fetch the checkpoint again or correct it") from error

    def knows(self, word: str) -> bool:
        """True iff the template names `word` (a role) at all."""
        return word in self._source

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, **variables: object) -> str:
        """The prompt text. Raises RequestError when the template refuses the messages or runs too long."""
        try:
            text: str = self._environment.render_template(
                _NAME,
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                **self._variables,
                **variables,
            )
        except TemplateRefusalError as error:
            raise RequestError(f"The model's chat template refuses the messages: {error}", param="messages") from error
        except minijinja.TemplateError as error:
            raise _cannot_render(str(error)) from error
        except (TypeError, ValueError, ArithmeticError, LookupError) as error:  # of the functions below
            raise _cannot_render("a function has arguments that it does not know") from error
        return text


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
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=(separators[0], separators[1]) if separators else None,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str = "") -> str:
    raise TemplateRefusalError(str(message)[:500])


def _strftime_now(layout: str) -> str:
    return dt.datetime.now().astimezone().strftime(layout)
