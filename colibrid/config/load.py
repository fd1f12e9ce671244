"""From the command line, the environment and a YAML file to one checked Settings value.

Precedence: command line > profile > COLIBRID_SECTION__KEY > file > the model's own > built-in default. Every error is
found before the first is reported, each with its place, the offending text, what is allowed and the nearest known key.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import inspect

from colibrid.config import reader, tree
from colibrid.config.rules import conflicts
from colibrid.config.tree import Group, Items, Key, Names, keys, sections, takes
from colibrid.config.values import LISTS, accepts, checked, describe, shorten
from colibrid.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from colibrid.config.settings import Settings

BUILT_IN = "built-in default"
_ENVIRONMENT_PREFIX = "COLIBRID_"
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
_NAME_LENGTH = 64
_MOST_ERRORS = 100  # that are told
_TASKS = ("generate", "score", "embed")  # of experts
_PRESENT = object()  # the value of a list, of a map and of their entries: they are there, even if they hold nothing


@dataclass(frozen=True, slots=True)
class Override:
    """One value from the command line: `--port 80` is Override("server.port", "80", "--port")."""

    key: str
    text: str
    option: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """Checked settings, and for each key where its value came from."""

    settings: Settings
    origins: Mapping[str, str]


def load(
    path: Path | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Iterable[Override] = (),
    *,
    profile: tuple[str, reader.Mapping] | None = None,
) -> Loaded:
    """Checked settings. ConfigError holds one line for each thing that is wrong.

    profile: name and settings of a file that the command line names (config/profile).
    """
    found = _Found()
    if path is not None:
        document = reader.read_file(path)
        found.errors.extend(document.problems)
        if document.root is not None:
            found.node(tree.tree(), document.root, "", str(path))
    for name, text in (environment or {}).items():
        found.variable(name, text)
    if profile is not None:
        found.profile(*profile)
    for override in overrides:
        found.text(override.key, override.text, override.option)
    found.errors.extend(found.missing(tree.tree(), ""))
    if not found.errors:
        settings: Settings = found.build(tree.tree(), "")
        for conflict in conflicts(settings):
            at = next((found.origins[key] for key in conflict.keys if found.origins[key] != BUILT_IN), BUILT_IN)
            found.errors.append(f"{at}: {conflict.message}")
    if found.errors:
        more = len(found.errors) - _MOST_ERRORS
        rest = [f"and {more} more mistakes"] if more > 0 else []
        raise ConfigError("\n".join([*found.errors[:_MOST_ERRORS], *rest]))
    return Loaded(settings, MappingProxyType(found.origins))


def nearest_key(path: str) -> str | None:
    """The known key that `path` was probably meant to be, None when nothing is near."""
    parent, _, leaf = path.rpartition(".")
    fixed = [known for known in keys() if "*" not in known]
    namesakes = [known for known in fixed if known.rpartition(".")[2] == leaf]
    if namesakes:
        return difflib.get_close_matches(path, namesakes, n=1, cutoff=0.0)[0]
    group = tree.find(parent) if parent else None
    if isinstance(group, Group) and (close := difflib.get_close_matches(leaf, group.parts, n=1, cutoff=0.6)):
        return f"{parent}.{close[0]}"
    if close := difflib.get_close_matches(path, [*fixed, *sections()], n=1, cutoff=0.6):
        return close[0]
    by_leaf = {known.rpartition(".")[2]: known for known in fixed}
    close = difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.7)
    return by_leaf[close[0]] if close else None


class _Found:
    """Owner of the values found so far by their paths; later ones win."""

    def __init__(self) -> None:
        self.origins: dict[str, str] = {path: BUILT_IN for path in keys() if "*" not in path}
        self.errors: list[str] = []
        self._values: dict[str, Any] = {}

    # ------------------------------------------------------------ sources

    def node(self, place: tree.Node, node: reader.Node, path: str, source: str) -> None:
        """What stands at `path` in YAML text."""
        if isinstance(node, reader.Broken):
            return
        at = _at(source, node)
        if isinstance(place, Key):
            self._leaf(place, node, path, at, source)
        elif isinstance(node, reader.Scalar) and node.value is None:  # a section with all lines commented
            pass
        elif isinstance(place, Group):
            self._section(place, node, path, at, source)
        elif isinstance(place, Names):
            self._names(place, node, path, at, source)
        else:
            self._items(place, node, path, at, source)

    def profile(self, source: str, root: reader.Mapping) -> None:
        """The settings of a profile. What is said of single tasks so far would hide what it says of all."""
        for task in _TASKS:
            for name in ("per_token", "threshold"):
                if (path := f"experts.{task}.{name}") in self._values:
                    self._set(path, None, source)
        self.node(tree.tree(), root, "", source)

    def variable(self, name: str, text: str) -> None:
        """An environment variable."""
        path = name.removeprefix(_ENVIRONMENT_PREFIX).lower().replace("__", ".")
        if isinstance(tree.find(path), Key | Names | Items):
            self.text(path, text, f"environment {name}")
            return
        near = nearest_key(path.replace("_", ".", 1)) or nearest_key(path)
        variable = f"{_ENVIRONMENT_PREFIX}{near.upper().replace('.', '__')}" if near else None
        hint = f"did you mean {variable}?" if variable else "write COLIBRID_SECTION__KEY"
        self.errors.append(f"environment {name}: no such setting (given: {shorten(text)}); {hint}")

    def text(self, path: str, text: str, origin: str) -> None:
        """A value from the environment or the command line, where quotes cannot tell text from numbers."""
        place = tree.find(path)
        if place is None or isinstance(place, Group):
            self._unknown(path, text, origin)
            return
        self._present_parents(path, origin)
        if not isinstance(place, Key) or (text[:1] in ("[", "{") and takes(place, *LISTS, inspect.AnyType)):
            document = reader.read_text(text, origin)
            self.errors.extend(document.problems)
            if document.root is not None:
                self.node(place, document.root, path, origin)
            return
        self._value(place, path, _from_text(place, text), text, origin)

    # ------------------------------------------------------------ results

    def missing(self, place: tree.Node, path: str) -> Iterator[str]:
        """Keys without default that nobody gave, and gaps in lists."""
        if isinstance(place, Group):
            for name, part in place.parts.items():
                yield from self.missing(part, f"{path}.{name}" if path else name)
        elif isinstance(place, Key):
            if place.default is msgspec.NODEFAULT and path not in self._values:
                at = self.origins.get(path.rpartition(".")[0], BUILT_IN)
                yield f"{at}: {path} is missing; it must be {describe(place)}"
        else:
            names = self._entries(path)
            absent = [str(i) for i in range(len(names)) if str(i) not in names] if isinstance(place, Items) else []
            if absent:
                yield f"{self.origins[f'{path}.{names[-1]}']}: there is no {path}.{absent[0]} before it"
                return
            for name in names:
                yield from self.missing(place.item, f"{path}.{name}")

    def build(self, place: tree.Node, path: str) -> Any:
        """The value of `place`, with defaults."""
        if isinstance(place, Group):
            below = {name: f"{path}.{name}" if path else name for name in place.parts}
            return place.struct(**{name: self.build(part, below[name]) for name, part in place.parts.items()})
        if isinstance(place, Key):
            return self._values.get(path, place.default)
        entries = {name: self.build(place.item, f"{path}.{name}") for name in self._entries(path)}
        return entries if isinstance(place, Names) else tuple(entries[str(i)] for i in range(len(entries)))

    # ------------------------------------------------------------ kinds of places

    def _section(self, place: Group, node: reader.Node, path: str, at: str, source: str) -> None:
        if not isinstance(node, reader.Mapping):
            name = (
                f"{path} is a section; its keys go into" if path else "expected sections such as server: with keys in"
            )
            self.errors.append(f"{at}: {name} indented lines below it")
            return
        for entry in node.entries:
            dotted = f"{path}.{entry.key}" if path else entry.key
            if entry.key in place.parts:
                self.node(place.parts[entry.key], entry.node, dotted, source)
            else:
                text = entry.node.text if isinstance(entry.node, reader.Scalar) else None
                self._unknown(dotted, text, _at(source, entry))

    def _names(self, place: Names, node: reader.Node, path: str, at: str, source: str) -> None:
        if not isinstance(node, reader.Mapping):
            self.errors.append(f"{at}: {path} is a map; its names go into indented lines below it")
            return
        self._set(path, _PRESENT, at)
        for entry in node.entries:
            place_of_name = _at(source, entry)
            if len(entry.key) > _NAME_LENGTH or not _NAME_CHARACTERS.issuperset(entry.key):
                self.errors.append(
                    f"{place_of_name}: a name in {path} must be 1 to {_NAME_LENGTH} letters, digits, - and _ "
                    f"(given: {shorten(entry.key)})"
                )
                continue
            dotted = f"{path}.{entry.key}"
            if not isinstance(place.item, Key):
                self._set(dotted, _PRESENT, place_of_name)
            self.node(place.item, entry.node, dotted, source)
        if (count := len(self._entries(path))) > place.most:
            self.errors.append(f"{at}: {path} has {count} names; at most {place.most} are allowed")

    def _items(self, place: Items, node: reader.Node, path: str, at: str, source: str) -> None:
        if not isinstance(node, reader.Sequence):
            self.errors.append(f"{at}: {path} is a list; its items go into lines below it that begin with -")
            return
        for known in [known for known in self._values if known.startswith(f"{path}.")]:
            del self._values[known]  # a list replaces the one before it
            self.origins.pop(known, None)
        self._set(path, _PRESENT, at)
        if len(node.items) > place.most:
            self.errors.append(f"{at}: {path} has {len(node.items)} items; at most {place.most} are allowed")
        for index, item in enumerate(node.items[: place.most]):
            self._set(f"{path}.{index}", _PRESENT, _at(source, item))
            self.node(place.item, item, f"{path}.{index}", source)

    def _leaf(self, key: Key, node: reader.Node, path: str, at: str, source: str) -> None:
        if isinstance(node, reader.Scalar):
            self._value(key, path, node.value, node.text, at)
        elif takes(key, inspect.AnyType):
            self._value(key, path, _plain(node), "", at)
            self._places(path, node, source)
        elif isinstance(node, reader.Sequence) and takes(key, *LISTS):
            if any(isinstance(item, reader.Broken) for item in node.items):
                return
            items: list[Any] = [item.value if isinstance(item, reader.Scalar) else [] for item in node.items]
            bad = next((item for item, value in zip(node.items, items, strict=True) if not accepts(key, [value])), None)
            if isinstance(bad, reader.Scalar):
                self._value(key, path, items, bad.text, _at(source, bad))
            elif bad is not None:
                self.errors.append(f"{_at(source, bad)}: {path} must be {describe(key)} (given: {_kind(bad)} in it)")
            else:
                self._value(key, path, items, f"{len(items)} items", at)
        else:
            self.errors.append(f"{at}: {path} must be {describe(key)} (given: {_kind(node)})")

    def _places(self, path: str, node: reader.Node, source: str) -> None:
        """Where the parts of a value are that only a plugin understands."""
        if isinstance(node, reader.Mapping):
            below = [(entry.key, _at(source, entry.node), entry.node) for entry in node.entries]
        elif isinstance(node, reader.Sequence):
            below = [(str(index), _at(source, item), item) for index, item in enumerate(node.items)]
        else:
            return
        for name, at, part in below:
            self.origins[f"{path}.{name}"] = at
            self._places(f"{path}.{name}", part, source)

    # ------------------------------------------------------------ one value

    def _value(self, key: Key, path: str, value: object, text: str, origin: str) -> None:
        try:
            self._set(path, checked(key, value), origin)
        except ConfigError as error:
            self.errors.append(f"{origin}: {path} must be {error} (given: {shorten(text)})")

    def _set(self, path: str, value: object, origin: str) -> None:
        self._values[path] = value
        self.origins[path] = origin

    def _unknown(self, path: str, text: str | None, origin: str) -> None:
        near = nearest_key(path) if len(self.errors) < _MOST_ERRORS else None  # the others are only counted
        hint = f"did you mean {near}?" if near else "conf/colibrid.yaml lists all keys"
        given = "" if text is None else f" (given: {shorten(text)})"
        self.errors.append(f"{origin}: unknown key {shorten(path)}{given}; {hint}")

    def _present_parents(self, path: str, origin: str) -> None:
        """A key inside a list or map makes its entry."""
        names = path.split(".")
        for end in range(1, len(names)):
            parent = ".".join(names[:end])
            if parent not in self._values and parent not in sections():
                self._set(parent, _PRESENT, origin)

    def _entries(self, path: str) -> list[str]:
        """Names and places that are taken in the map or list."""
        start = len(path) + 1
        found = (known[start:].partition(".")[0] for known in self._values if known.startswith(f"{path}."))
        return list(dict.fromkeys(found))


def _at(source: str, what: reader.Node | reader.Entry) -> str:
    return f"{source}:{what.position.line}:{what.position.column}"


def _kind(node: reader.Node) -> str:
    return "a list" if isinstance(node, reader.Sequence) else "a section"


def _from_text(key: Key, text: str) -> object:
    """What `text` means to this key."""
    value: object = reader.plain_value(text)
    lists = [kind for kind in key.kinds if isinstance(kind, LISTS)]
    only = all(isinstance(kind, (*LISTS, inspect.NoneType)) for kind in key.kinds)
    if lists and ("," in text or (only and text != "null")):
        parts = [part.strip() for part in text.split(",")] if text.strip() else []
        return (
            parts if isinstance(lists[0].item_type, inspect.StrType) else [reader.plain_value(part) for part in parts]
        )
    takes_text = takes(key, inspect.StrType, inspect.LiteralType)
    if takes_text and value is not None and not (takes(key, inspect.IntType) and isinstance(value, int)):
        return text
    return value


def _plain(node: reader.Node) -> object:
    if isinstance(node, reader.Sequence):
        return [_plain(item) for item in node.items]
    if isinstance(node, reader.Mapping):
        return {entry.key: _plain(entry.node) for entry in node.entries}
    return node.value if isinstance(node, reader.Scalar) else None
