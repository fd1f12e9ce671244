"""The user's own data, as token ids: what is scored, what is answered, what is embedded.

A line of the file                                scored                               answered
{"text": "..."}                                   all tokens but the first             no
{"messages": [...]}                               all tokens but the first             yes, unless an answer ends them
{"messages": [...], "answer": "..."}              the answer's tokens                  yes; the answer is right
{"prompt": "..."}                                 all tokens but the first             yes
{"prompt": "...", "answer": "..."}                the answer's tokens                  yes; the answer is right
{"input": "..."}                                  to embed only; any other line may be embedded, too

Each line may name its "task", of which `colibrid experts report` gives figures for each.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from colibrid.errors import ConfigError
from colibrid.text.lines import parse_lines, prompt_ids, read_data
from colibrid.tune.result import Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from colibrid.text.lines import Line
    from colibrid.text.model_text import ModelText

ANSWER_TOKENS = 128  # of a greedy answer; so many records of one slot may be unread, so no step waits for its reader
LONGEST = 8192  # tokens of one line that are read
_MOST_NAME = 64  # characters, of a task
_OPTION = "--data"
_FORMS = ("text", "messages", "prompt", "input")


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One line as token ids."""

    file: int  # which of the files
    line: int  # from 1
    ids: tuple[int, ...]  # to score or to embed, cut where the context ends
    first: int = 1  # of them, the first that is scored
    prompt: tuple[int, ...] | None = None  # to answer
    answer: str | None = None  # that is right
    task: str | None = None  # that the line names

    @property
    def scored(self) -> int:
        """Tokens that have a likelihood."""
        return max(len(self.ids) - self.first, 0)


class Data(msgspec.Struct, frozen=True, kw_only=True):
    """All that is read, in the order of the files."""

    name: str
    sha256: str  # of the file; of several: of their sums, one after another
    task: Task
    items: tuple[Item, ...]
    longest_answer: int = ANSWER_TOKENS

    @property
    def tokens(self) -> int:
        """That are read, answers not counted."""
        return sum(len(item.ids) + len(item.prompt or ()) for item in self.items)

    @property
    def ids_sha256(self) -> str:
        """Of what the lines are to the model: another tokenizer or template makes other ids of the same file."""
        digest = hashlib.sha256()
        for item in self.items:
            digest.update(msgspec.json.encode(item))
        return digest.hexdigest()

    @property
    def scored(self) -> tuple[Item, ...]:
        """Items with a likelihood."""
        return tuple(item for item in self.items if item.scored)

    @property
    def asked(self) -> tuple[Item, ...]:
        """Items that are answered."""
        return tuple(item for item in self.items if item.prompt is not None)


def load_data(
    paths: Sequence[str],
    text: ModelText,
    task: Task,
    *,
    context: int,
    most: int | None = None,
    longest_answer: int = ANSWER_TOKENS,
) -> Data:
    """Reads the files until `most` tokens are read.

    context: tokens of a request of the engine. ConfigError naming the file and the line.
    """
    reader = _Reader(text, task, context)
    items: list[Item] = []
    sums = []
    read = 0
    for index, path in enumerate(paths):
        data = read_data(path, _OPTION)
        sums.append(hashlib.sha256(data).hexdigest())
        for number, line in parse_lines(data, path, _OPTION):
            if most is not None and read >= most:
                break
            item = reader.item(line, f"{_OPTION} {path}, line {number}", (index, number))
            read += len(item.ids) + len(item.prompt or ())
            items.append(item)
    if not any(item.prompt is not None or item.scored or task == "embed" for item in items):
        raise ConfigError(f"{_OPTION} {', '.join(paths)}: nothing in it can be scored or answered; give longer texts")
    return Data(
        name=", ".join(os.fsencode(Path(path).name).decode("utf-8", "backslashreplace") for path in paths),
        sha256=sums[0] if len(sums) == 1 else hashlib.sha256("".join(sums).encode()).hexdigest(),
        task=task,
        items=tuple(items),
        longest_answer=longest_answer,
    )


def evenly(items: Sequence[Item], most: int) -> tuple[Item, ...]:
    """Some of the items, evenly from all of them and in their order, of at most so many ids; the last may be cut."""
    total = sum(len(item.ids) for item in items)
    step = max(1, -(-total // max(most, 1)))
    order = [place for begin in range(step) for place in range(begin, len(items), step)]
    found: dict[int, Item] = {}
    for place in order:
        item, room = items[place], most
        if room <= item.first:
            continue
        found[place] = item if len(item.ids) <= room else msgspec.structs.replace(item, ids=item.ids[:room])
        most -= len(found[place].ids)
    return tuple(found[place] for place in sorted(found))


class _Reader:
    """From lines to items."""

    def __init__(self, text: ModelText, task: Task, context: int) -> None:
        self._text = text
        self._task = task
        self._context = context
        self._longest = min(context, LONGEST)

    def item(self, line: Line, where: str, place: tuple[int, int]) -> Item:
        """ConfigError beginning with `where`."""
        given = [name for name in _FORMS if getattr(line, name) is not None]
        if len(given) != 1:
            names = ", ".join(f'"{name}"' for name in _FORMS)
            raise ConfigError(f"{where}: {' and '.join(given) or 'nothing to run'} in it; a line needs one of {names}")
        if line.input is not None and self._task != "embed":
            raise ConfigError(f'{where}: "input" is a text to embed; give --task embed, or lines with "text"')
        if line.answer is not None and (line.text is not None or line.input is not None):
            raise ConfigError(f'{where}: "answer" belongs to "messages" or "prompt"')
        if line.task is not None and not (line.task.isprintable() and len(line.task) <= _MOST_NAME):
            raise ConfigError(
                f'{where}: "task" is a name of at most {_MOST_NAME} characters that can be printed; shorten it'
            )
        try:
            found = self._embedded(line) if self._task == "embed" else self._read(line)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        if found.prompt is not None and len(found.prompt) >= self._context:
            raise ConfigError(
                f"{where}: the prompt has {len(found.prompt)} tokens, and the context of {self._context} leaves no room "
                "for an answer; shorten it, or raise model.max_seq_len"
            )
        return msgspec.structs.replace(found, file=place[0], line=place[1], task=line.task)

    def _embedded(self, line: Line) -> Item:
        text = next((one for one in (line.input, line.text, line.prompt) if one is not None), None)
        ids = prompt_ids(line, self._text, generation=False) if text is None else self._encode(text, special=True)
        if not ids:
            raise ConfigError("the text is empty")
        return self._made(ids)

    def _read(self, line: Line) -> Item:
        if line.text is not None:
            return self._made(self._encode(line.text))
        if line.prompt is not None:
            prompt = self._encode(line.prompt, special=True)
            whole = prompt
        elif line.messages and line.answer is None and line.messages[-1].get("role") == "assistant":
            return self._made(prompt_ids(line, self._text, generation=False))
        else:
            prompt = prompt_ids(line, self._text)
            whole = prompt_ids(line, self._text, generation=False)
        if not prompt:
            raise ConfigError("the prompt is empty")
        if line.answer is None:
            return self._made(whole, prompt)
        return self._made([*prompt, *self._encode(line.answer)], prompt, first=len(prompt), answer=line.answer)

    def _made(
        self, ids: list[int], prompt: list[int] | None = None, *, first: int = 1, answer: str | None = None
    ) -> Item:
        asked = tuple(prompt) if prompt is not None and self._task == "generate" else None
        return Item(file=0, line=0, ids=tuple(ids[: self._longest]), first=first, prompt=asked, answer=answer)

    def _encode(self, text: str, *, special: bool = False) -> list[int]:
        return self._text.tokenizer.encode(text, add_special_tokens=special)
