"""Texts and questions from JSON lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from colibrid.errors import ConfigError, ModelError
from colibrid.model.cache import BUNDLED_MODEL
from colibrid.model.checkpoint import read_json, text_files
from colibrid.model.manifest import TextFiles
from colibrid.text.lines import Line, load_model_text, prompt_ids, read_data, read_lines, token_ids

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from colibrid.text.model_text import ModelText


@pytest.fixture(scope="module")
def text() -> Iterator[ModelText]:
    found = load_model_text(BUNDLED_MODEL, text_files(BUNDLED_MODEL, read_json(BUNDLED_MODEL, "config.json")))
    yield found
    found.tokenizer.close()


def test_lines_are_texts_or_conversations(tmp_path: Path) -> None:
    """Empty lines, unknown fields, the marks of other systems' editors are passed over."""
    file = tmp_path / "a.jsonl"
    file.write_text(
        '\ufeff{"text": "one", "more": 1}\r\n\n{"messages": [{"role": "user", "content": "two"}], "answer": "3"}\n'
    )
    lines = read_lines(str(file), "--data")
    assert [line.text for line in lines] == ["one", None]
    assert lines[1].answer == "3"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"text": "a"}\n{"text": 3}', "line 2"),
        ("{", "line 1"),
        ('{"prompt": "a"}', 'neither "text" nor "messages"'),
        ("\n\n", "no lines"),
        ('{"text": ' + "[" * 100_000, "line 1: Expected `str | null`, got `array`.*write lines like"),
        ('{"other": ' + "[" * 100_000, "line 1: nested too deeply"),
        ('{"text": "a\x00"}', "line 1: JSON is malformed.*write lines like"),
        ('{"text": "\\ud800"}', "line 1: .*write lines like"),
    ],
)
def test_wrong_lines_are_named(content: str, words: str, tmp_path: Path) -> None:
    """By option, file and line."""
    file = tmp_path / "a.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match=words) as caught:
        read_lines(str(file), "--data")
    assert str(caught.value).startswith(f"--data {file}")


def test_token_ids_are_cut(text: ModelText) -> None:
    """Each text at its longest, all together at the most; a conversation is written by the chat template."""
    lines = [Line(text="hello hello hello hello"), Line(text="good day"), Line(text="never read")]
    whole = token_ids(lines, text, 100)
    assert len(whole) == 3
    assert token_ids(lines, text, 2) == [ids[:2] for ids in whole]
    assert token_ids(lines, text, 100, len(whole[0]) + 1) == [whole[0], whole[1][:1]]
    asked = Line(messages=[{"role": "user", "content": "hi"}])
    assert prompt_ids(asked, text)[: len(token_ids([asked], text, 100)[0])] == token_ids([asked], text, 100)[0]
    with pytest.raises(ConfigError, match="no tokens"):
        token_ids([Line(text="")], text, 10)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({}, r"messages\[1\].role is None; write one of system, "),
        ({"role": "usr", "content": "a"}, r"messages\[1\].role is 'usr'"),
        ({"role": ["user"], "content": "a"}, "role is "),
        ({"role": "user"}, r"messages\[1\].content is None; write a text"),
        ({"role": "user", "content": {"a": 1}}, "content is {'a': 1}"),
    ],
)
def test_messages_that_a_template_would_pass_over_are_named(
    message: dict[str, object], words: str, text: ModelText
) -> None:
    """Else something would be measured that nobody has written."""
    with pytest.raises(ConfigError, match=words):
        prompt_ids(Line(messages=[{"role": "user", "content": "hi"}, message]), text)


def test_a_line_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A book is several lines: one of 30 MB took 3 GB."""
    monkeypatch.setattr("colibrid.text.lines.MAX_LINE_BYTES", 20)
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "short"}\n{"text": "much longer"}\n')
    with pytest.raises(ConfigError, match="line 2: 23 bytes, at most 20; write it as several lines"):
        read_lines(str(file), "--data")


def test_a_device_without_an_end_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size is 0, so what is read is bounded, too."""
    monkeypatch.setattr("colibrid.text.lines.MAX_FILE_BYTES", 1000)
    with pytest.raises(ConfigError, match="--data /dev/zero: more than 1000 bytes; give another file, or a part of it"):
        read_data("/dev/zero", "--data")


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    """Texts cannot be read there."""
    with pytest.raises(ModelError, match=r"no tokenizer.json"):
        load_model_text(tmp_path, TextFiles())
