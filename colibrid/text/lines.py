"""Texts and questions of a user's own, from JSON lines: for calibration, comparison and tuning.

{"text": "..."}                                         a text as it is
{"messages": [...]}                                     a conversation, written by the model's chat template
{"messages": [...], "answer": "..."}                    a question, and the answer that is right
{"prompt": "..."} or with "answer"                      as the model is to continue it, without a template
{"input": "..."}                                        a text to embed
"""

from __future__ import annotations

from codecs import BOM_UTF8
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from colibrid.errors import ConfigError, ModelError, RequestError
from colibrid.paths import read_bounded, user_path

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from colibrid.text.model_text import ModelText, TextFileNames

MAX_FILE_BYTES = 256 << 20
MAX_LINE_BYTES = 8 << 20  # a tokenizer takes a hundred times as much memory
_ROLES = ("system", "developer", "user", "assistant", "tool")  # as in a request to /v1/chat/completions
_FORM = 'write lines like {"text": "..."}, {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}'


class Line(msgspec.Struct, frozen=True):
    """One line of the file; fields that are not named here are passed over."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    answer: str | None = None
    prompt: str | None = None
    input: str | None = None
    task: str | None = None  # a name for lines of its kind


class NumberedLine(NamedTuple):
    """A line, and which of the file it is, from 1."""

    number: int
    line: Line


def read_lines(path: str, option: str) -> list[Line]:
    """Lines with texts or conversations. ConfigError naming the option, the file and the line that is wrong."""
    lines = parse_lines(read_data(path, option), path, option)
    for number, line in lines:
        if line.text is None and line.messages is None:
            raise ConfigError(f'{option} {path}, line {number}: neither "text" nor "messages" in it')
    return [line for _, line in lines]


def read_data(path: str, option: str) -> bytes:
    """The whole file. ConfigError naming the option and the file."""
    return read_bounded(user_path(path), MAX_FILE_BYTES, f"{option} {path}", "give another file, or a part of it")


def parse_lines(data: bytes, path: str, option: str) -> list[NumberedLine]:
    """Lines of any kind, empty ones left out. ConfigError naming the option, the file and the line that is no JSON."""
    lines = []
    for number, line in enumerate(data.removeprefix(BOM_UTF8).splitlines(), start=1):
        if not line.strip():
            continue
        if len(line) > MAX_LINE_BYTES:
            raise ConfigError(
                f"{option} {path}, line {number}: {len(line)} bytes, at most {MAX_LINE_BYTES}; write it as several lines"
            )
        try:
            found = msgspec.json.decode(line, type=Line)
        except RecursionError:
            raise ConfigError(f"{option} {path}, line {number}: nested too deeply; {_FORM}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{option} {path}, line {number}: {error}; {_FORM}") from None
        lines.append(NumberedLine(number, found))
    if not lines:
        raise ConfigError(f"{option} {path}: no lines in it; {_FORM}")
    return lines


def load_model_text(folder: Path, files: TextFileNames) -> ModelText:
    """Tokenizer and chat template of a pack or a checkpoint. ModelError: it has no tokenizer."""
    # Imported here: they take as long as the rest of a command that may not need them.
    from colibrid.text.model_text import load_text  # noqa: PLC0415

    if files.tokenizer is None:
        raise ModelError(f"{folder}: no tokenizer.json, so texts cannot be read; copy it there")
    return load_text(folder, files)


def token_ids(lines: Sequence[Line], text: ModelText, longest: int, most: int | None = None) -> list[list[int]]:
    """The lines as token ids, each cut at `longest`, together at `most`. ConfigError: nothing is left."""
    found: list[list[int]] = []
    total = 0
    for line in lines:
        if line.text is not None:
            ids = text.tokenizer.encode(line.text, add_special_tokens=False)
        else:
            ids = prompt_ids(line, text, generation=False)
        room = longest if most is None else min(longest, most - total)
        if ids[:room]:
            found.append(ids[:room])
            total += len(found[-1])
        if most is not None and total >= most:
            break
    if not found:
        raise ConfigError("the texts have no tokens; give some with more in them")
    return found


def prompt_ids(line: Line, text: ModelText, *, generation: bool = True) -> list[int]:
    """A conversation by the chat template; `generation`: up to where the answer begins."""
    if text.template is None:
        raise ConfigError('the model has no chat template, so lines with "messages" cannot be read; give "text"')
    for place, message in enumerate(line.messages or []):
        _check(message, f"messages[{place}]")
    try:
        rendered = text.template.render(line.messages or [], add_generation_prompt=generation)
    except RequestError as error:
        raise ConfigError(f"messages that the chat template refuses: {error}") from None
    return text.tokenizer.encode(rendered, add_special_tokens=False)


def _check(message: dict[str, Any], where: str) -> None:
    """ConfigError: no message of a chat; a template would pass over it in silence, and something else be measured."""
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise ConfigError(f"{where}.role is {role!r:.60}; write one of {', '.join(_ROLES)}")
    if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
        raise ConfigError(f"{where}.content is {content!r:.60}; write a text, or a list of parts")
