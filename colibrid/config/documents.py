"""What is printed from the declarations of settings: python -m colibrid.config.documents FOLDER, or `make config`.

conf/colibrid.yaml                      every key with its default and its meaning; `colibrid config init`
conf/colibrid.schema.json               JSON Schema for editors; `colibrid config schema`
docs/reference/configuration.md         the same for readers
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import inspect

from colibrid.config.render import scalar, yaml_text
from colibrid.config.settings import Settings
from colibrid.config.sizes import MAX_BYTES
from colibrid.config.tree import Group, Items, Key, Names, sections, takes, tree, walk
from colibrid.config.values import LISTS, describe, describe_bound, describe_kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from colibrid.config.tree import Node

SCHEMA_FILE = "colibrid.schema.json"
_NAME_PATTERN = "^[A-Za-z0-9_-]{1,64}$"
_SIZE_PATTERN = r"^[0-9]{1,19}(\.[0-9]{1,9})? ?(B|KiB|MiB|GiB|TiB|kB|KB|MB|GB|TB)?$"
_FILE_HEAD = f"""\
# yaml-language-server: $schema={SCHEMA_FILE}
#
# colibrid configuration: every key, with its built-in default.
#
# Order of precedence: command line > environment (COLIBRID_SECTION__KEY, e.g. COLIBRID_SERVER__PORT=9000 or
# COLIBRID_MEMORY__TIERS__KV__BYTES=4GiB) > this file > the model's own > built-in default. A file may hold only the keys
# that differ. Unknown keys are refused with line and column. Booleans are true and false; anchors, aliases and tags are
# not allowed. Sizes are bytes or text such as 64KiB, 2MiB, 80GiB. null means "not set". `colibrid config check FILE` tells
# all mistakes and what the model will take of memory; SIGHUP reloads the keys that are marked (live).

"""
_PAGE_HEAD = """\
# Configuration reference

Printed from `colibrid/config/settings.py` by `make config`; do not edit.

A value comes from the command line (an option, or `--set section.key=value`), else from the environment
(`COLIBRID_SECTION__KEY`, as `COLIBRID_MEMORY__TIERS__KV__BYTES=4GiB`), else from the file of `--config` or
`COLIBRID_CONFIG`, else from the model (where a default here is null or auto, and the model says something), else it is the
built-in default. `colibrid config show --origin` tells which; `colibrid config check FILE` tells all mistakes of a file
at once, and what the model will take of memory.

The file is strict YAML: a key twice, anchors, aliases and tags are refused; only `true` and `false` are booleans; `1e3` is
a number, `010` and `on` are text. Lists are given in the environment and on the command line with commas between
(`a,b`), or like lists of sections and maps in YAML's brackets (`[a, b]`, `{name: value}`).

Keys that say **live** are taken over on SIGHUP (`systemctl reload colibrid`), all of them or, if anything is wrong, none;
changes of other keys are named in the log and wait for a restart. Wrong settings end the program with exit code 78.
"""


def default_file() -> str:
    """conf/colibrid.yaml."""

    def remark(node: Node, _path: str) -> str:
        if isinstance(node, Group):
            return node.about if node.path.count(".") or not node.about else _first(node.about)
        return _remark(node)

    return _FILE_HEAD + yaml_text(Settings(), remark)


def schema() -> str:
    """conf/colibrid.schema.json."""
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "colibrid configuration",
        "description": "x-live: true marks the keys that SIGHUP reloads.",
        **_schema(tree()),
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def reference() -> str:
    """docs/reference/configuration.md."""
    return "\n".join(_page())


def _remark(node: Key | Names | Items) -> str:
    allowed = _allowed(node)
    live = "(live) " if node.live else ""
    return f"{live}{node.about}" + (f"; {allowed}" if allowed else "")


def _first(text: str) -> str:
    return text.split("\n", maxsplit=1)[0]


def _allowed(node: Key | Names | Items) -> str:
    """Bounds of numbers and words in short, where the meaning does not already say all of them."""
    if not isinstance(node, Key) or node.size is not None or takes(node, *LISTS):
        return ""
    found = []
    for kind in node.kinds:
        if isinstance(kind, inspect.IntType | inspect.FloatType):
            found.append(
                describe_kind(kind).removeprefix("a whole number ").removeprefix("a number ").removeprefix("from ")
            )
        elif isinstance(kind, inspect.LiteralType):
            if all(value == node.default or str(value) in node.about for value in kind.values):
                continue
            found.append(describe_kind(kind))
    return " or ".join(text for text in found if text != "of at least 1")


# ---------------------------------------------------------------- JSON Schema


def _schema(node: Node) -> dict[str, Any]:
    if isinstance(node, Group):
        required = [name for name, part in node.parts.items() if isinstance(part, Key) and _is_required(part)]
        return {
            **({"description": node.about} if node.path and node.about else {}),
            "type": ["object", "null"],
            "properties": {name: _schema(part) for name, part in node.parts.items()},
            **({"required": required} if required else {}),
            "additionalProperties": False,
        }
    notes: dict[str, Any] = {"description": node.about} if node.about else {}
    if isinstance(node, Key):
        default = {} if _is_required(node) else {"default": node.default}
        return {**notes, **_value_schema(node), **default, "x-live": node.live}
    if isinstance(node, Names):
        return {
            **notes,
            "type": ["object", "null"],
            "propertyNames": {"pattern": _NAME_PATTERN},
            "additionalProperties": _schema(node.item),
            "maxProperties": node.most,
            "default": {},
            "x-live": node.live,
        }
    return {
        **notes,
        "type": ["array", "null"],
        "items": _schema(node.item),
        "maxItems": node.most,
        "default": [],
        "x-live": node.live,
    }


def _is_required(key: Key) -> bool:
    return key.default is msgspec.NODEFAULT


def _value_schema(key: Key) -> dict[str, Any]:
    if key.size is None:
        return {name: part for name, part in msgspec.json.schema(key.type).items() if name != "default"}
    whole = next((kind for kind in key.kinds if isinstance(kind, inspect.IntType)), None)
    most = min(key.size.most, (whole and whole.le) or MAX_BYTES)
    number = {"type": "integer", "minimum": max(key.size.least, (whole and whole.ge) or 0), "maximum": most}
    options: list[dict[str, Any]] = [number, {"type": "string", "pattern": _SIZE_PATTERN}]
    if isinstance(key.default, str):
        options.append({"const": key.default})
    if takes(key, inspect.NoneType):
        options.append({"type": "null"})
    return {"anyOf": options}


# ---------------------------------------------------------------- page


def _page() -> Iterator[str]:
    yield _PAGE_HEAD
    for name, part in tree().parts.items():
        if not isinstance(part, Group):
            yield f"## {name}\n\n| key | values | default | live | meaning |\n|---|---|---|---|---|"
            yield from _rows(part)
            yield ""
    for group in sections().values():
        rows = [row for part in group.parts.values() if not isinstance(part, Group) for row in _rows(part)]
        if not rows and group.path.count("."):
            continue
        yield f"## {_shown(group.path)}\n"
        if group.about:
            yield f"{_escaped(group.about)}\n"
        if rows:
            yield "| key | values | default | live | meaning |\n|---|---|---|---|---|"
            yield from rows
            yield ""


def _rows(node: Node) -> Iterator[str]:
    for part in walk(node):
        if not isinstance(part, Group):
            yield (
                f"| `{_shown(part.path)}` | {_escaped(_values(part))} | {_default(part)} | "
                f"{'live' if part.live else ''} | {_escaped(part.about)} |"
            )


def _values(node: Key | Names | Items) -> str:
    if isinstance(node, Key):
        return describe(node).replace(" (in quotes if it looks like a number)", "")
    kind = "names of your choice" if isinstance(node, Names) else "a list of sections"
    return f"{kind}, at most {node.most}"


def _default(node: Key | Names | Items) -> str:
    if not isinstance(node, Key):
        return f"`{'{}' if isinstance(node, Names) else '[]'}`"
    if _is_required(node):
        return "must be given"
    size = node.size is not None and isinstance(node.default, int)
    return f"`{describe_bound(node.default) if size else scalar(node.default)}`"


def _shown(path: str) -> str:
    return path.replace("*", "NAME")


def _escaped(text: str) -> str:
    """Text in a table's cell."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


DOCUMENTS = {
    f"conf/{SCHEMA_FILE}": schema,
    "conf/colibrid.yaml": default_file,
    "docs/reference/configuration.md": reference,
}


if __name__ == "__main__":
    for name, text_of in DOCUMENTS.items():
        (Path(sys.argv[1]) / name).write_text(text_of(), encoding="utf-8")
