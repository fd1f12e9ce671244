"""From the command line, the environment and a YAML file to one checked Settings value.

Precedence: command line > COLIBRID_SECTION__KEY > file > built-in default. Every error is found before the first
is reported, each with its place, the offending text, what is allowed and the nearest known key.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import inspect

from colibrid.config import reader
from colibrid.config.settings import Settings
from colibrid.config.sizes import parse_bytes
from colibrid.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

BUILT_IN = "built-in default"
_ENVIRONMENT_PREFIX = "COLIBRID_"
_MIN_PAGE = 4096
_MAX_PAGE = 1 << 30
_SHOWN_CHARACTERS = 60
_S = TypeVar("_S", bound=msgspec.Struct)


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


@dataclass(frozen=True, slots=True)
class Key:
    """One leaf of the tree."""

    path: str  # "memory.tiers.kv.bytes"
    type: Any
    default: Any
    kinds: tuple[inspect.Type, ...]  # the alternatives of a union, else one


@cache
def keys() -> Mapping[str, Key]:
    """Every leaf of Settings by its dotted path, in declaration order."""
    return MappingProxyType({key.path: key for key in _leaves(Settings, "")})


def load(
    path: Path | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Iterable[Override] = (),
) -> Loaded:
    """Checked settings. ConfigError holds one line for each thing that is wrong."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = dict.fromkeys(keys(), BUILT_IN)
    errors: list[str] = []
    collector = _Collector(values, origins, errors)
    if path is not None:
        _from_file(path, collector)
    for name, text in (environment or {}).items():
        _from_environment(name, text, collector)
    for override in overrides:
        collector.text(override.key, override.text, override.option)
    errors.extend(_size_errors(values, origins))
    if not errors:
        errors.extend(_cross_errors(values, origins))
    if errors:
        raise ConfigError("\n".join(errors))
    return Loaded(_build(Settings, "", values), MappingProxyType(origins))


def nearest_key(path: str) -> str | None:
    """The known key that `path` was probably meant to be, None when nothing is near."""
    leaf = path.rpartition(".")[2]
    namesakes = [known for known in keys() if known.rpartition(".")[2] == leaf]
    if namesakes:
        return difflib.get_close_matches(path, namesakes, n=1, cutoff=0.0)[0]
    close = difflib.get_close_matches(path, [*keys(), *_sections()], n=1, cutoff=0.6)
    if close:
        return close[0]
    by_leaf = {known.rpartition(".")[2]: known for known in keys()}
    close = difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.7)
    return by_leaf[close[0]] if close else None


def shorten(text: str) -> str:
    """`text` in quotes on one line, cut when long: safe to print whatever it holds."""
    shown = repr(text)
    return shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[: _SHOWN_CHARACTERS - 4]}...{shown[0]}"


class _Collector:
    """Owner of the values found so far; later calls win."""

    def __init__(self, values: dict[str, Any], origins: dict[str, str], errors: list[str]) -> None:
        self._values = values
        self._origins = origins
        self._errors = errors

    def error(self, message: str) -> None:
        self._errors.append(message)

    def unknown(self, path: str, text: str | None, origin: str) -> None:
        near = nearest_key(path)
        hint = f"did you mean {near}?" if near else "conf/colibrid.yaml lists all keys"
        given = "" if text is None else f" (given: {shorten(text)})"
        self.error(f"{origin}: unknown key {shorten(path)}{given}; {hint}")

    def text(self, path: str, text: str, origin: str) -> None:
        """A value from the environment or the command line, where quotes cannot tell text from numbers."""
        key = keys().get(path)
        if key is None:
            self.unknown(path, text, origin)
            return
        value: object = reader.plain_value(text)
        if isinstance(value, str) and _is_list(key, value):
            value = _listed(key, value)
        takes_text = any(isinstance(kind, inspect.StrType | inspect.LiteralType) for kind in key.kinds)
        takes_int = any(isinstance(kind, inspect.IntType) for kind in key.kinds)
        if takes_text and value is not None and not (takes_int and isinstance(value, int)):
            value = text
        self.value(key, value, text, origin)

    def items(self, key: Key, node: reader.Sequence, origin: str) -> None:
        """A list of plain values from the file."""
        items = [item.value if isinstance(item, reader.Scalar) else None for item in node.items]
        self.value(key, items, str(items), origin)

    def value(self, key: Key, value: object, text: str, origin: str) -> None:
        try:
            self._values[key.path] = _checked(key, value)
            self._origins[key.path] = origin
        except ConfigError as error:
            self.error(f"{origin}: {key.path} must be {error} (given: {shorten(text)})")


def _from_file(path: Path, collector: _Collector) -> None:
    try:
        root = reader.read_file(path)
    except ConfigError as error:
        collector.error(str(error))
        return
    if root is None:
        return
    if not isinstance(root, reader.Mapping):
        collector.error(f"{path}:{root.position.line}:{root.position.column}: expected sections such as server: …")
        return
    _from_mapping(path, root, "", collector)


def _from_mapping(path: Path, mapping: reader.Mapping, prefix: str, collector: _Collector) -> None:
    for entry in mapping.entries:
        dotted = prefix + entry.key
        at = f"{path}:{entry.position.line}:{entry.position.column}"
        node = entry.node
        if dotted in _sections():
            if isinstance(node, reader.Mapping):
                _from_mapping(path, node, f"{dotted}.", collector)
            elif not (isinstance(node, reader.Scalar) and node.value is None):  # a section with all lines commented
                collector.error(f"{at}: {dotted} is a section; its keys go into indented lines below it")
        elif dotted not in keys():
            collector.unknown(dotted, node.text if isinstance(node, reader.Scalar) else None, at)
        elif isinstance(node, reader.Scalar):
            at = f"{path}:{node.position.line}:{node.position.column}"
            collector.value(keys()[dotted], node.value, node.text, at)
        elif isinstance(node, reader.Sequence) and _takes(keys()[dotted], inspect.ListType):
            collector.items(keys()[dotted], node, at)
        else:
            kind = "a list" if isinstance(node, reader.Sequence) else "a section"
            collector.error(f"{at}: {dotted} must be {_describe(keys()[dotted])} (given: {kind})")


def _from_environment(name: str, text: str, collector: _Collector) -> None:
    path = name.removeprefix(_ENVIRONMENT_PREFIX).lower().replace("__", ".")
    if path in keys():
        collector.text(path, text, f"environment {name}")
        return
    near = nearest_key(path.replace("_", ".", 1)) or nearest_key(path)
    variable = f"{_ENVIRONMENT_PREFIX}{near.upper().replace('.', '__')}" if near else None
    hint = f"did you mean {variable}?" if variable else "write COLIBRID_SECTION__KEY"
    collector.error(f"environment {name}: no such setting (given: {shorten(text)}); {hint}")


def _checked(key: Key, value: object) -> object:
    """`value` in the key's type; ConfigError's text is what would be allowed."""
    if isinstance(value, float) and value.is_integer() and _takes(key, inspect.IntType):
        value = int(value)  # 1e3 where a whole number is wanted
    if isinstance(value, str) and (not value or any(ord(character) < 32 for character in value)):
        raise ConfigError(f"{_describe(key)}, not empty and without control characters")
    try:
        return msgspec.convert(value, key.type)
    except msgspec.ValidationError as error:
        raise ConfigError(_describe(key)) from error


def _takes(key: Key, kind: type[inspect.Type]) -> bool:
    return any(isinstance(alternative, kind) for alternative in key.kinds)


def _is_list(key: Key, text: str) -> bool:
    """Whether `text`, from the environment or the command line, means a list."""
    only = all(isinstance(kind, inspect.ListType | inspect.NoneType) for kind in key.kinds)
    return only or ("," in text and _takes(key, inspect.ListType))


def _listed(key: Key, text: str) -> list[reader.Value]:
    parts = [part.strip() for part in text.removeprefix("[").removesuffix("]").split(",")]
    names = any(
        isinstance(kind, inspect.ListType) and isinstance(kind.item_type, inspect.StrType) for kind in key.kinds
    )
    return [part if names else reader.plain_value(part) for part in parts]


def _describe(key: Key) -> str:
    """What may stand there: "a whole number from 0 to 65535", "auto, cpu or cuda"."""
    return " or ".join(_describe_kind(kind) for kind in key.kinds)


def _describe_kind(kind: inspect.Type) -> str:
    if isinstance(kind, inspect.LiteralType):
        *others, last = [str(value) for value in kind.values]
        return f"{', '.join(others)} or {last}" if others else last
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        noun = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
        return noun + _describe_bounds(kind)
    if isinstance(kind, inspect.ListType):
        return f"a list of at most {kind.max_length} items, each {_describe_kind(kind.item_type)}"
    if isinstance(kind, inspect.BoolType):
        return "true or false"
    if isinstance(kind, inspect.NoneType):
        return "null"
    return "text (in quotes if it looks like a number)"


def _describe_bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    if kind.ge is not None and kind.le is not None:
        return f" from {kind.ge} to {kind.le}"
    bounds = (("of at least", kind.ge), ("above", kind.gt), ("at most", kind.le), ("below", kind.lt))
    parts = [f"{words} {bound}" for words, bound in bounds if bound is not None]
    return f" {' and '.join(parts)}" if parts else ""


def _size_errors(values: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[str]:
    """Of the tiers' sizes, which have bounds that their type cannot show."""
    for path, value in values.items():
        leaf = path.rpartition(".")[2]
        if not path.startswith("memory.tiers.") or leaf not in ("bytes", "page_size") or value == "auto":
            continue
        try:
            size = parse_bytes(value)
        except ConfigError as error:
            yield f"{origins[path]}: {path}: {error}, or auto"
            continue
        if leaf == "page_size" and (not _MIN_PAGE <= size <= _MAX_PAGE or size & (size - 1)):
            yield (
                f"{origins[path]}: {path} must be a power of two from 4KiB to 1GiB or auto "
                f"(given: {shorten(str(value))})"
            )


def _cross_errors(values: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[str]:
    """What no single value can show."""
    paths = ("batch.prefill_chunk", "batch.prefill_tokens")
    chunk, tokens = (values.get(path, keys()[path].default) for path in paths)
    if "auto" not in (chunk, tokens) and chunk > tokens:
        at = next((origins[path] for path in paths if origins[path] != BUILT_IN), BUILT_IN)
        yield f"{at}: batch.prefill_chunk ({chunk}) must not exceed batch.prefill_tokens ({tokens}); lower the first"


@cache
def _sections() -> frozenset[str]:
    found = set[str]()
    for path in keys():
        while path := path.rpartition(".")[0]:
            found.add(path)
    return frozenset(found)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, msgspec.Struct)


def _leaves(section: type[msgspec.Struct], prefix: str) -> Iterator[Key]:
    for field in msgspec.structs.fields(section):
        if _is_section(field.type):
            yield from _leaves(field.type, f"{prefix}{field.name}.")
        else:
            kind = inspect.type_info(field.type)
            kinds = tuple(kind.types) if isinstance(kind, inspect.UnionType) else (kind,)
            yield Key(prefix + field.name, field.type, field.default, kinds)


def _build(section: type[_S], prefix: str, values: Mapping[str, Any]) -> _S:
    arguments: dict[str, Any] = {}
    for field in msgspec.structs.fields(section):
        path = prefix + field.name
        if _is_section(field.type):
            arguments[field.name] = _build(field.type, f"{path}.", values)
        elif path in values:
            arguments[field.name] = values[path]
    return section(**arguments)
