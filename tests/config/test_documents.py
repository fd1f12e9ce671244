"""colibrid.config.documents: what is printed from the declarations is up to date and true."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from colibrid.config import reader
from colibrid.config.documents import DOCUMENTS, SCHEMA_FILE, schema
from colibrid.config.load import load
from colibrid.config.settings import Live, Restart, Settings
from colibrid.config.tree import keys, tree, walk
from colibrid.errors import ConfigError

ROOT = Path(__file__).parents[2]
READY_MADE = sorted((ROOT / "conf").glob("*.yaml"))
VALIDATOR = jsonschema.Draft202012Validator(json.loads(schema()))


def _plain(text: str) -> Any:
    """What an editor's YAML reader hands to the schema."""

    def value(node: reader.Node | None) -> Any:
        if isinstance(node, reader.Mapping):
            return {entry.key: value(entry.node) for entry in node.entries}
        if isinstance(node, reader.Sequence):
            return [value(item) for item in node.items]
        return node.value if isinstance(node, reader.Scalar) else None

    return value(reader.read_text(text, "x.yaml").root)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_printed_files_are_up_to_date(name: str) -> None:
    """Each file equals what the declarations say; `make config` prints them anew."""
    assert (ROOT / name).read_text(encoding="utf-8") == DOCUMENTS[name]()


def test_schema_is_a_schema() -> None:
    """The document follows its own meta-schema and knows each key, live or not."""
    document = json.loads(schema())
    jsonschema.Draft202012Validator.check_schema(document)
    for path, key in keys().items():
        node: Any = document
        for name in path.split("."):
            node = (
                node["properties"][name]
                if "properties" in node
                else node.get("additionalProperties", node.get("items"))
            )
        assert node["x-live"] is key.live


@pytest.mark.parametrize("path", READY_MADE, ids=lambda path: path.name)
def test_files_follow_the_schema_that_they_name(path: Path) -> None:
    """Every file in conf/ names the schema for editors in its first line, and is valid by it."""
    text = path.read_text()
    assert text.startswith(f"# yaml-language-server: $schema={SCHEMA_FILE}\n")
    assert [error.message for error in VALIDATOR.iter_errors(_plain(text))] == []


@pytest.mark.parametrize(
    "text",
    ["server: {prot: 1}", "server: {port: 70000}", "server: {port: '80'}", "engine: {device: gpu}", "server: {strict: yes}",
     "experts: {threshold: 1.5}", "experts: {per_token: [2, 99]}", "model: {aliases: name}", "server: [1]", "nonsense: {}",
     "memory: {tiers: {kv: {bytes: 4 gigs}}}", "limits: {prompt_bytes: 0}", "batch: {slots: null}"],
)  # fmt: skip
def test_schema_and_loader_refuse_the_same(text: str, tmp_path: Path) -> None:
    """What an editor underlines is what the program refuses."""
    assert list(VALIDATOR.iter_errors(_plain(text))) != []
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        load(path)


@pytest.mark.parametrize(
    "text",
    ["limits: {queue: 1e3}", "memory: {tiers: {kv: {bytes: 1.5 GB}}}", "memory: {tiers: {kv: {bytes: 4096}}}",
     "limits: {prompt_bytes: 2MiB}", "experts: {per_token: [2, 0, 1], embed: {per_token: 1}}", "server:", "model: {path: null}",
     "model: {aliases: [a, b/c]}", "batch: {prefill_chunk: auto}", "server: {listen: [unix:/run/x]}"],
)  # fmt: skip
def test_schema_and_loader_take_the_same(text: str, tmp_path: Path) -> None:
    """What the program takes, an editor does not underline."""
    assert [error.message for error in VALIDATOR.iter_errors(_plain(text))] == []
    path = tmp_path / "c.yaml"
    path.write_text(text)
    load(path)


def test_every_key_says_what_it_means() -> None:
    """Each key, section, list and map has a meaning."""
    assert [node.path for node in walk(tree()) if node.path and not node.about] == []


def _unmarked(struct: type[msgspec.Struct], path: str) -> list[str]:
    found = []
    for field in msgspec.structs.fields(struct):
        plain = getattr(field.type, "__origin__", field.type)
        if isinstance(plain, type) and issubclass(plain, msgspec.Struct):
            found += _unmarked(plain, f"{path}{field.name}.")
        elif not any(isinstance(mark, Live | Restart) for mark in getattr(field.type, "__metadata__", ())):
            found.append(path + field.name)
    return found


def test_every_key_is_marked() -> None:
    """Each key outside of lists and maps says Live or Restart."""
    assert _unmarked(Settings, "") == []
