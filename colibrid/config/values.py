"""Whether a value may stand at a key, and in words what may."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import inspect

from colibrid.config.sizes import MAX_BYTES, parse_bytes
from colibrid.config.tree import Key, takes
from colibrid.errors import ConfigError

if TYPE_CHECKING:
    from colibrid.config.settings import Size

_SHOWN_CHARACTERS = 60
LISTS = (inspect.ListType, inspect.VarTupleType)


def checked(key: Key, value: object) -> Any:
    """`value` in the key's type; ConfigError's text is what would be allowed."""
    if isinstance(value, float) and value.is_integer() and takes(key, inspect.IntType):
        value = int(value)  # 1e3 where a whole number is wanted
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and (not text or any(ord(character) < 32 for character in text)):
            raise ConfigError(f"{describe(key)}, not empty and without control characters")
    if key.size is not None:
        value = _sized(key, key.size, value)
    try:
        return msgspec.convert(value, key.type)
    except msgspec.ValidationError as error:
        raise ConfigError(describe(key)) from error


def accepts(key: Key, value: object) -> bool:
    """Whether `checked` would take it."""
    try:
        checked(key, value)
    except ConfigError:
        return False
    return True


def _sized(key: Key, size: Size, value: object) -> object:
    """A number of bytes; text where the key keeps text. Other values as they are."""
    if isinstance(value, bool) or not isinstance(value, int | str) or value == key.default:
        return value
    try:
        count = parse_bytes(value)
    except ConfigError as error:
        raise ConfigError(describe(key)) from error
    if not size.least <= count <= size.most or (size.power_of_two and count & (count - 1)):
        raise ConfigError(describe(key))
    return value if takes(key, inspect.StrType) else count


def describe(key: Key) -> str:
    """What may stand there: "a whole number from 0 to 65535", "auto, cpu or cuda"."""
    if key.size is not None:
        return _describe_size(key, key.size)
    return " or ".join(describe_kind(kind) for kind in key.kinds)


def describe_bound(value: float) -> str:
    """2147483648 as 2GiB, if it is so round."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if isinstance(value, int) and value >= unit and value % unit == 0:
            return f"{value // unit}{name}"
    return str(value)


def _describe_size(key: Key, size: Size) -> str:
    """Bounds of the size itself, or of the whole number that it becomes."""
    whole = next((kind for kind in key.kinds if isinstance(kind, inspect.IntType)), None)
    least = max(size.least, (whole and whole.ge) or 0)
    most = min(size.most, (whole and whole.le) or MAX_BYTES)
    noun = "a power of two" if size.power_of_two else "a size"
    low = f" from {describe_bound(least)}" if least else ""
    high = f" to {describe_bound(most)}" if most < MAX_BYTES else ""
    others = [str(key.default)] if isinstance(key.default, str) else []
    others += ["null"] if takes(key, inspect.NoneType) else []
    return ", or ".join([f"{noun}{low}{high} such as 64KiB, 2MiB or 1.5GiB", *others])


def describe_kind(kind: inspect.Type) -> str:
    """The same of one alternative."""
    if isinstance(kind, inspect.LiteralType):
        *others, last = [str(value) for value in kind.values]
        return f"{', '.join(others)} or {last}" if others else last
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        noun = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
        return noun + _describe_bounds(kind)
    if isinstance(kind, LISTS):
        most = "" if kind.max_length is None else f" at most {kind.max_length}"
        return f"a list of{most} items, each {describe_kind(kind.item_type)}"
    if isinstance(kind, inspect.UnionType):
        return " or ".join(map(describe_kind, kind.types))
    if isinstance(kind, inspect.BoolType):
        return "true or false"
    if isinstance(kind, inspect.NoneType):
        return "null"
    if isinstance(kind, inspect.StrType):
        return _describe_text(kind)
    return "anything"


def _describe_text(kind: inspect.StrType) -> str:
    length = "" if kind.max_length is None else f" of at most {kind.max_length} characters"
    pattern = "" if kind.pattern is None else f" that matches {kind.pattern}"
    return f"text{length}{pattern} (in quotes if it looks like a number)"


def _describe_bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    if kind.ge is not None and kind.le is not None:
        return f" from {kind.ge} to {kind.le}"
    bounds = (("of at least", kind.ge), ("above", kind.gt), ("at most", kind.le), ("below", kind.lt))
    parts = [f"{words} {bound}" for words, bound in bounds if bound is not None]
    return f" {' and '.join(parts)}" if parts else ""


def shorten(text: str) -> str:
    """`text` in quotes on one line, cut when long: safe to print whatever it holds."""
    shown = repr(text)
    return shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[: _SHOWN_CHARACTERS - 4]}...{shown[0]}"
