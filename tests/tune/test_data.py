"""The user's own data as token ids."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest

from colibrid.errors import ConfigError
from colibrid.model.cache import BUNDLED_MODEL
from colibrid.model.checkpoint import read_json, text_files
from colibrid.text.lines import load_model_text
from colibrid.tune.data import Item, evenly, load_data

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from colibrid.text.model_text import ModelText

LINES = """\
{"text": "one two three"}

{"messages": [{"role": "user", "content": "Which month comes after May?"}], "answer": "June", "task": "month"}
{"messages": [{"role": "user", "content": "hi"}]}
{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
{"prompt": "one two"}
{"prompt": "one two", "answer": " three"}
"""


@pytest.fixture(scope="module")
def text() -> Iterator[ModelText]:
    found = load_model_text(BUNDLED_MODEL, text_files(BUNDLED_MODEL, read_json(BUNDLED_MODEL, "config.json")))
    yield found
    found.tokenizer.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    place = tmp_path / "prompts.jsonl"
    place.write_text(LINES)
    return place


def test_each_line_says_what_is_scored_and_what_is_answered(text: ModelText, file: Path) -> None:
    """Texts are scored, prompts answered, and of a line with an answer only the answer's tokens are scored."""
    data = load_data([str(file)], text, "generate", context=512)
    assert [item.line for item in data.items] == [1, 3, 4, 5, 6, 7]
    plain, month, hi, whole, prompt, answered = data.items
    assert [item.prompt is None for item in data.items] == [True, False, False, True, False, False]
    assert (plain.first, plain.scored) == (1, len(plain.ids) - 1)
    assert month.task == "month"
    for item in (month, answered):
        assert item.prompt == item.ids[: item.first]
        assert text.tokenizer.decode(list(item.ids[item.first :]), skip_special_tokens=False) == item.answer
    assert hi.prompt is not None
    assert hi.prompt[: len(hi.ids)] == hi.ids
    assert len(hi.prompt) > len(hi.ids)
    assert "hello" in text.tokenizer.decode(list(whole.ids), skip_special_tokens=False)
    assert prompt.prompt == prompt.ids == answered.prompt
    assert data.name == "prompts.jsonl"
    assert data.sha256 == hashlib.sha256(LINES.encode()).hexdigest()
    assert len(data.asked) == 4
    assert data.tokens == sum(len(item.ids) + len(item.prompt or ()) for item in data.items)


def test_tasks_read_the_same_lines_otherwise(text: ModelText, file: Path, tmp_path: Path) -> None:
    """Scoring answers nothing; embedding takes inputs and any other text."""
    assert load_data([str(file)], text, "score", context=512).asked == ()
    inputs = tmp_path / "inputs.jsonl"
    inputs.write_text('{"input": "a cat"}\n{"text": "a dog"}\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    data = load_data([str(inputs)], text, "embed", context=512)
    assert [text.tokenizer.decode(list(item.ids), skip_special_tokens=True) for item in data.items[:2]] == [
        "a cat",
        "a dog",
    ]
    assert data.asked == ()


def test_several_files_and_a_bound(text: ModelText, file: Path, tmp_path: Path) -> None:
    """Files follow one another; no line is begun once enough tokens are read; long texts end with the context."""
    more = tmp_path / "more.jsonl"
    more.write_text('{"text": "never read by the first"}\n')
    both = load_data([str(file), str(more)], text, "generate", context=512)
    assert both.name == "prompts.jsonl, more.jsonl"
    assert [(item.file, item.line) for item in both.items[-2:]] == [(0, 7), (1, 1)]
    sums = [hashlib.sha256(place.read_bytes()).hexdigest() for place in (file, more)]
    assert both.sha256 == hashlib.sha256("".join(sums).encode()).hexdigest()
    assert len(load_data([str(file)], text, "generate", context=512, most=1).items) == 1
    assert [len(item.ids) for item in load_data([str(more)], text, "score", context=3).items] == [3]


@pytest.mark.parametrize(
    ("content", "task", "words"),
    [
        ('{"text": "a b"}\n{"answer": "x"}', "generate", r'line 2: nothing to run in it; a line needs one of "text"'),
        ('{"text": "a b", "prompt": "c"}', "generate", "line 1: text and prompt in it"),
        ('{"input": "a b"}', "generate", 'line 1: "input" is a text to embed'),
        ('{"text": "a b", "answer": "c"}', "generate", '"answer" belongs to "messages" or "prompt"'),
        ('{"prompt": ""}', "generate", "line 1: the prompt is empty"),
        ('{"input": ""}', "embed", "line 1: the text is empty"),
        ('{"text": "a b", "task": "\\u001b[31m"}', "generate", 'line 1: "task" is a name of at most 64 characters'),
        (
            '{"text": "a b", "task": "' + "a" * 65 + '"}',
            "generate",
            'line 1: "task" is a name of at most 64 characters',
        ),
        ('{"text": ""}', "generate", "nothing in it can be scored or answered"),
        ('{"messages": []}', "generate", "line 1: messages that the chat template"),
        ('{"prompt": "' + "a " * 600 + '"}', "generate", "leaves no room"),
    ],
)
def test_wrong_lines_are_named(content: str, task: str, words: str, text: ModelText, tmp_path: Path) -> None:
    """By option, file and line, with what to do."""
    place = tmp_path / "wrong.jsonl"
    place.write_text(content)
    with pytest.raises(ConfigError, match=words) as caught:
        load_data([str(place)], text, task, context=512)  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"--data {place}")


def test_a_part_is_spread_over_all() -> None:
    """Evenly, in order, of no more ids than asked for, and never without a token to score."""
    items = [Item(file=0, line=line, ids=tuple(range(10)), first=2) for line in range(10)]
    assert [item.line for item in evenly(items, 50)] == [0, 2, 4, 6, 8]
    assert evenly(items, 1000) == tuple(items)
    cut = evenly(items, 15)
    assert [len(item.ids) for item in cut] == [10, 5]
    assert evenly(items, 2) == ()
    assert [len(item.ids) for item in evenly(items, 12)] == [10]
