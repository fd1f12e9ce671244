"""Settings as YAML text for people: one line a key, with what is said beside it. Pure."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING, Any

import msgspec

from colibrid.config import reader
from colibrid.config.tree import Group, Items, Key, Names, tree
from colibrid.config.values import describe_bound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from colibrid.config import tree as shapes

    Remark = Callable[[shapes.Node, str], str]  # of what stands at a path; empty: none

_WIDTH = 120
_COLUMN = 30  # where remarks begin, if the line before is short enough
_PLAIN = re.compile(r"[0-9]{1,3}(\.[0-9]{1,3}){3}|[A-Za-z/~][A-Za-z0-9/~._+-]*(:[A-Za-z0-9/~._+-]+)*")
_WORDS = frozenset(
    {"yes", "Yes", "YES", "no", "No", "NO", "True", "TRUE", "False", "FALSE", "Null", "NULL", "~", "y", "n"}
)


def yaml_text(settings: Any, remark: Remark) -> str:
    """The whole tree with the values of `settings`."""
    return "\n".join(_group(tree(), settings, "", 0, remark)).strip("\n") + "\n"


def scalar(value: object, *, size: bool = False) -> str:
    """One value as YAML that reads back as itself."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and size:
        return describe_bound(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(scalar, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{scalar(name)}: {scalar(item)}' for name, item in value.items())}}}"
    text = str(value)
    plain = _PLAIN.fullmatch(text) and reader.plain_value(text) == text and text not in _WORDS
    return text if plain else msgspec.json.encode(text).decode()


def _group(group: Group, value: Any, path: str, depth: int, remark: Remark) -> Iterator[str]:
    for name, part in group.parts.items():
        dotted = f"{path}.{name}" if path else name
        yield from _part(part, name, getattr(value, name), dotted, depth, remark)
        if depth == 0:
            yield ""


def _part(part: shapes.Node, name: str, value: Any, path: str, depth: int, remark: Remark) -> Iterator[str]:
    begin = f"{'  ' * depth}{name}:"
    said = remark(part, path)
    if isinstance(part, Key):
        yield from _beside(f"{begin} {scalar(value, size=part.size is not None)}", said)
    elif isinstance(part, Group):
        yield from _beside(begin, said)
        yield from _group(part, value, path, depth + 1, remark)
    elif not value:
        yield from _beside(f"{begin} {'[]' if isinstance(part, Items) else '{}'}", said)
    elif isinstance(part, Names):
        yield from _beside(begin, said)
        for entry, item in value.items():
            yield from _part(part.item, entry, item, f"{path}.{entry}", depth + 1, remark)
    else:
        yield from _beside(begin, said)
        for index, item in enumerate(value):
            lines = list(_part(part.item, "", item, f"{path}.{index}", depth + 1, remark))[1:]
            yield from _with_dash(lines, depth + 1)


def _with_dash(lines: list[str], depth: int) -> Iterator[str]:
    """The first of the lines of a section begins with a dash in place of its indentation."""
    indent = "  " * depth
    for index, line in enumerate(lines):
        yield f"{indent}- {line[len(indent) + 2 :]}" if index == 0 else line


def _beside(line: str, said: str) -> Iterator[str]:
    """`line` with a comment to the right, which goes on below in the same column."""
    if not said:
        yield line
        return
    column = max(_COLUMN, len(line) + 1)
    first, *more = textwrap.wrap(said, _WIDTH - column - 2, break_long_words=False, break_on_hyphens=False)
    yield f"{line:<{column}}# {first}"
    yield from (f"{'':<{column}}# {words}" for words in more)
