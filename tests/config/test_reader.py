"""colibrid.config.reader."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from colibrid.config import reader

if TYPE_CHECKING:
    from pathlib import Path


def _root(text: str) -> reader.Node | None:
    document = reader.read_text(text, "x.yaml")
    assert document.problems == ()
    return document.root


def _problems(text: str) -> tuple[str, ...]:
    return reader.read_text(text, "x.yaml").problems


def _only(text: str) -> reader.Scalar:
    root = _root(f"key: {text}\n")
    assert isinstance(root, reader.Mapping)
    node = root.entries[0].node
    assert isinstance(node, reader.Scalar)
    return node


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("false", False), ("yes", "yes"), ("no", "no"), ("on", "on"), ("True", "True"), ("1e3", 1000.0),
     ("12", 12), ("-3", -3), ("1.5", 1.5), ("010", "010"), ("1_000", "1_000"), ("0x10", "0x10"), (".inf", ".inf"),
     (".nan", ".nan"), ("1e999", "1e999"), ("1:30", "1:30"), ("2024-01-01", "2024-01-01"), ("~", None), ("null", None),
     ("", None), ("'true'", "true"), ('"12"', "12"), ("127.0.0.1", "127.0.0.1")],
)  # fmt: skip
def test_scalars_mean_what_json_would_say(text: str, value: object) -> None:
    """Only true and false are booleans, exponents are numbers, quoted scalars are text, the rest is text."""
    scalar = _only(text)
    assert scalar.value == value
    assert type(scalar.value) is type(value)


def test_every_node_knows_its_place() -> None:
    """Keys, values and list items carry line and column, counted from 1."""
    root = _root("# top\nserver:\n  port: 80\n  list: [a, b]\n")
    assert isinstance(root, reader.Mapping)
    server = root.entries[0]
    assert server.position == reader.Position(2, 1)
    assert isinstance(server.node, reader.Mapping)
    port, items = server.node.entries
    assert (port.position, port.node.position) == (reader.Position(3, 3), reader.Position(3, 9))
    assert isinstance(items.node, reader.Sequence)
    assert [item.position for item in items.node.items] == [reader.Position(4, 10), reader.Position(4, 13)]


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [("a: 1\nb: 2\na: 3\n", ":3:1:", "line 1"),
     ("a: &x 1\n", ":1:4:", "anchor &x"),
     ("a: *x\n", ":1:4:", "alias *x"),
     ("a: !!python/object:os.system x\n", ":1:4:", "tag"),
     ("a: !!int 3\n", ":1:4:", "tag"),
     ("a: 1\n---\nb: 2\n", ":2:1:", "second document"),
     ("1: x\n", ":1:1:", "key"),
     ("[a]: x\n", ":1:1:", "key"),
     ("a: {b: 1, b: 2}\n", ":1:11:", "already"),
     ("a: [1, 2\n", ":2:1:", "YAML"),
     ("a:\n\tb: 1\n", ":2:1:", "YAML"),
     ("a: 'open\n", "", "YAML"),
     ("a: \x01\n", "", "YAML"),
     ("[" * 40 + "]" * 40, ":1:34:", "deeper")],
)  # fmt: skip
def test_surprises_are_refused_with_their_place(text: str, where: str, what: str) -> None:
    """Duplicates, anchors, aliases, tags, further documents and broken YAML name line and column."""
    (problem,) = _problems(text)
    assert problem.startswith(f"x.yaml{where}")
    assert what in problem


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_is_no_document(text: str) -> None:
    """A file of comments is valid and sets nothing."""
    assert _root(text) is None


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    """Missing files, folders, other encodings and huge files give one line that starts with the path."""
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"a: 1\nb: \xe9\n")
    huge = tmp_path / "huge.yaml"
    huge.write_bytes(b"#" * (reader.MAX_FILE_BYTES + 1))
    for path, what in [
        (tmp_path / "none.yaml", "No such file"),
        (tmp_path, "directory"),
        (latin, "UTF-8"),
        (huge, "larger"),
    ]:
        (problem,) = reader.read_file(path).problems
        assert problem.startswith(str(path))
        assert what in problem
        assert "\n" not in problem


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a:\n  b: 1\n  c 2\n", "x.yaml:3:3: not valid YAML: could not find expected ':'"),
     ("a:\n\tb: 1\n", "; indent with spaces, not tabs")],
)  # fmt: skip
def test_broken_lines_are_found_where_they_are(text: str, expected: str) -> None:
    """A missing colon is shown in its own line, not in the next; a tab is named."""
    (problem,) = _problems(text)
    assert expected in problem


def test_reading_goes_on_after_a_refusal() -> None:
    """Several refused nodes are told together, the rest is understood, and broken YAML below is told as well."""
    text = "a: &x 1\nb: *x\na: 2\n3: c\nd: !!int {e: [1]}\nf: 7\n"
    document = reader.read_text(text, "x.yaml")
    assert [problem.split(":")[1] for problem in document.problems] == ["1", "2", "3", "4", "5"]
    assert isinstance(document.root, reader.Mapping)
    kinds = {entry.key: type(entry.node) for entry in document.root.entries}
    assert kinds == {"a": reader.Scalar, "b": reader.Broken, "d": reader.Broken, "f": reader.Scalar}
    assert len(_problems(text + "g: [\n")) == 6
