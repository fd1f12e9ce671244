"""The tree of settings as data: sections, keys, lists and maps, each with path, type, bounds, marker and meaning.

Paths have dots: "memory.tiers.kv.bytes". In the path of what lies inside a list or a map, `*` stands for the place or
the name: "plugins.*.path".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import msgspec
from msgspec import inspect

from colibrid.config.settings import About, Live, Settings, Size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True, slots=True)
class Key:
    """One value."""

    path: str
    about: str
    live: bool
    type: Any
    default: Any  # msgspec.NODEFAULT: must be given (only in sections inside lists and maps)
    kinds: tuple[inspect.Type, ...]  # the alternatives of a union, else one
    size: Size | None


@dataclass(frozen=True, slots=True)
class Group:
    """A section: a fixed set of names."""

    path: str  # empty: the whole tree
    about: str
    struct: type[msgspec.Struct]
    parts: Mapping[str, Node]


@dataclass(frozen=True, slots=True)
class Names:
    """A map whose names the user chooses."""

    path: str
    about: str
    live: bool
    most: int
    item: Node


@dataclass(frozen=True, slots=True)
class Items:
    """A list of sections."""

    path: str
    about: str
    live: bool
    most: int
    item: Node


Node = Key | Group | Names | Items


@cache
def tree() -> Group:
    """All of Settings."""
    return _group(Settings, "", None)


@cache
def keys() -> Mapping[str, Key | Names | Items]:
    """Everything that can be set, by its path, in the order of declaration; sections are not among it."""
    return MappingProxyType({node.path: node for node in walk(tree()) if not isinstance(node, Group)})


@cache
def sections() -> Mapping[str, Group]:
    """Every section by its path, but the whole."""
    return MappingProxyType({node.path: node for node in walk(tree()) if isinstance(node, Group) and node.path})


def find(path: str) -> Node | None:
    """What may stand at `path`, in which names and places of maps and lists are written out."""
    node: Node = tree()
    for name in path.split("."):
        if isinstance(node, Group) and name in node.parts:
            node = node.parts[name]
        elif (isinstance(node, Names) and name) or (isinstance(node, Items) and name.isdecimal() and len(name) < 4):
            node = node.item
        else:
            return None
    return node


def walk(node: Node) -> Iterator[Node]:
    """`node` and all below it, parents first."""
    yield node
    if isinstance(node, Group):
        for part in node.parts.values():
            yield from walk(part)
    elif isinstance(node, Names | Items):
        yield from walk(node.item)


def takes(key: Key, *kinds: type[inspect.Type]) -> bool:
    """Whether a value of one of these kinds may stand there."""
    return any(isinstance(kind, kinds) for kind in key.kinds)


def _group(struct: type[msgspec.Struct], path: str, about: str | None, *, live: bool | None = None) -> Group:
    prefix = f"{path}." if path else ""
    parts = {
        field.name: _node(field.type, prefix + field.name, _default(field), live=live)
        for field in msgspec.structs.fields(struct)
    }
    text = about if about is not None else (struct.__doc__ or "").strip()
    return Group(path, text, struct, MappingProxyType(parts))


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def _node(annotation: Any, path: str, default: Any, *, live: bool | None) -> Node:
    """`live`: what a list or map around says for all below it."""
    plain, marks = _split(annotation)
    about = next((mark.text for mark in marks if isinstance(mark, About)), None)
    own = any(isinstance(mark, Live) for mark in marks) if live is None else live
    if isinstance(plain, type) and issubclass(plain, msgspec.Struct):
        return _group(plain, path, about, live=live)
    kind = inspect.type_info(annotation)
    if isinstance(kind, inspect.DictType):
        item = _node(get_args(plain)[1], f"{path}.*", msgspec.NODEFAULT, live=own)
        return Names(path, about or "", own, _most(kind, path), item)
    if isinstance(kind, inspect.VarTupleType) and isinstance(kind.item_type, inspect.StructType):
        item = _node(get_args(plain)[0], f"{path}.*", msgspec.NODEFAULT, live=own)
        return Items(path, about or "", own, _most(kind, path), item)
    kinds = tuple(kind.types) if isinstance(kind, inspect.UnionType) else (kind,)
    size = next((mark for mark in marks if isinstance(mark, Size)), None)
    return Key(path, about or "", own, annotation, default, kinds, size)


def _split(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    if get_origin(annotation) is Annotated:
        return annotation.__origin__, annotation.__metadata__
    return annotation, ()


def _most(kind: inspect.DictType | inspect.VarTupleType, path: str) -> int:
    assert kind.max_length is not None, f"{path}: lists and maps are bounded by Meta(max_length)"
    return kind.max_length
