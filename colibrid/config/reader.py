"""Strict YAML: the part of the language that cannot surprise, with line and column of every node.

Refused by name: duplicate keys, anchors, aliases, tags, several documents, keys that are not text, nesting over
MAX_DEPTH, files over MAX_FILE_BYTES. Plain scalars follow JSON's idea of types: only `true` and `false` are
booleans (so `no` and `on` are text), `1e3` is a number, `010` and `1_000` are text, nothing becomes a date.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 32
Value = str | int | float | bool | None

# libyaml where PyYAML was built with it: the same events, ten times faster.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,18})")
_FLOAT = re.compile(r"[-+]?([0-9]{1,40}(\.[0-9]{0,40})?|\.[0-9]{1,40})([eE][-+]?[0-9]{1,4})?")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")


@dataclass(frozen=True, slots=True)
class Position:
    """Where a node begins; both count from 1."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Scalar:
    """A leaf: `text` as written, `value` as understood."""

    value: Value
    text: str
    position: Position


@dataclass(frozen=True, slots=True)
class Sequence:
    items: tuple[Node, ...]
    position: Position


@dataclass(frozen=True, slots=True)
class Entry:
    """One `key: value` line of a mapping."""

    key: str
    position: Position
    node: Node


@dataclass(frozen=True, slots=True)
class Mapping:
    """Entries in file order; keys are unique."""

    entries: tuple[Entry, ...]
    position: Position


@dataclass(frozen=True, slots=True)
class Broken:
    """A node that was refused; the reason is among the document's problems."""

    position: Position


Node = Scalar | Sequence | Mapping | Broken


@dataclass(frozen=True, slots=True)
class Document:
    """What was understood (None: nothing is set) and, a line each, what was not."""

    root: Node | None
    problems: tuple[str, ...]


def read_file(path: Path) -> Document:
    """The document of the file."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        return Document(
            None, (f"{path}: cannot read the configuration: {error.strerror or error}; check the path and its mode",)
        )
    if len(data) > MAX_FILE_BYTES:
        return Document(None, (f"{path}: larger than {MAX_FILE_BYTES} bytes; this is not a configuration file",))
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return Document(None, (f"{path}:{line}: not UTF-8; save the file as UTF-8",))
    return read_text(text, str(path))


def read_text(text: str, name: str) -> Document:
    """The document of `text`; `name` stands before line and column in problems."""
    builder = _Builder(name)
    try:
        root = builder.document(yaml.parse(text, Loader=_LOADER))
    except _HopelessError:
        root = None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if error.context == "while scanning a simple key":  # noticed at the next line, but the colon is missing here
            mark = error.context_mark or mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""
        problem = error.problem or "not readable"
        hint = "; indent with spaces, not tabs" if mark is not None and _is_tab(text, mark) else ""
        builder.problems.append(f"{name}{where}: not valid YAML: {problem}{hint}")
        root = None
    except yaml.YAMLError:  # characters that YAML forbids; carries an offset only
        builder.problems.append(f"{name}: not valid YAML: a character is not allowed; remove control characters")
        root = None
    return Document(root, tuple(builder.problems))


class _HopelessError(Exception):
    """What follows cannot be understood."""


def _is_tab(text: str, mark: yaml.Mark) -> bool:
    line = text.split("\n")[mark.line : mark.line + 1]
    return bool(line) and line[0][mark.column : mark.column + 1] == "\t"


def plain_value(text: str) -> Value:
    """What an unquoted scalar means. Also used for environment variables and --set."""
    if text in ("", "~", "null"):
        return None
    if text in ("true", "false"):
        return text == "true"
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) and not _LEADING_ZERO.match(text):
        number = float(text)
        return number if abs(number) != float("inf") else text
    return text


class _Builder:
    """Turns YAML events into nodes, and goes on after what it refuses. One use."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.problems: list[str] = []

    def document(self, events: Iterator[yaml.Event]) -> Node | None:
        root: Node | None = None
        documents = 0
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self._problem(event, "a second document; keep one document in the file")
                    return root
            elif isinstance(event, yaml.NodeEvent):
                root = self._node(event, events, 0)
        if isinstance(root, Scalar) and root.value is None and not root.text:
            return None
        return root

    def _node(self, event: yaml.Event, events: Iterator[yaml.Event], depth: int) -> Node:
        if isinstance(event, yaml.AliasEvent):
            return self._problem(event, f"alias *{event.anchor} is not allowed; write the value out")
        assert isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent)
        if event.anchor is not None:
            self._problem(event, f"anchor &{event.anchor} is not allowed; write the value where it is used")
        broken = None
        if event.tag is not None:
            broken = self._problem(event, f"tag {event.tag} is not allowed; write a plain value")
        if depth > MAX_DEPTH:
            self._problem(event, f"nested deeper than {MAX_DEPTH} levels; no setting lies that deep")
            raise _HopelessError
        node: Node
        if isinstance(event, yaml.ScalarEvent):
            plain = event.style is None or event.style == ""
            node = Scalar(plain_value(event.value) if plain else event.value, event.value, _position(event))
        elif isinstance(event, yaml.SequenceStartEvent):
            node = self._sequence(event, events, depth)
        else:
            node = self._mapping(event, events, depth)
        return broken or node

    def _sequence(self, start: yaml.Event, events: Iterator[yaml.Event], depth: int) -> Sequence:
        items: list[Node] = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            items.append(self._node(event, events, depth + 1))
        return Sequence(tuple(items), _position(start))

    def _mapping(self, start: yaml.Event, events: Iterator[yaml.Event], depth: int) -> Mapping:
        entries: dict[str, Entry] = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            key = self._node(event, events, depth + 1)
            if isinstance(key, Broken):
                pass
            elif not isinstance(key, Scalar) or not isinstance(key.value, str) or not key.text:
                key = self._problem(event, "a key must be a name; remove the brackets or the number")
            elif key.text in entries:
                first = entries[key.text].position
                key = self._problem(event, f"key {key.text!r} is already set in line {first.line}; keep one of them")
            node = self._node(next(events), events, depth + 1)
            if isinstance(key, Scalar):
                entries[key.text] = Entry(key.text, key.position, node)
        return Mapping(tuple(entries.values()), _position(start))

    def _problem(self, event: yaml.Event, message: str) -> Broken:
        at = _position(event)
        self.problems.append(f"{self._name}:{at.line}:{at.column}: {message}")
        return Broken(at)


def _position(event: yaml.Event) -> Position:
    mark = event.start_mark
    return Position(mark.line + 1, mark.column + 1) if mark is not None else Position(1, 1)
