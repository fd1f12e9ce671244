"""colibrid.tune.survey on the bundled model; exact counts are in tests/cli/test_experts_report.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from colibrid.errors import ConfigError
from colibrid.tune.data import Data, Item
from colibrid.tune.survey import MAX_TASKS, survey

if TYPE_CHECKING:
    from colibrid.tune.runner import Runner


def data(*tasks: str | None, length: int = 12) -> Data:
    """An item to read for each task."""
    items = tuple(
        Item(file=0, line=number, ids=tuple(range(number, number + length)), task=task)
        for number, task in enumerate(tasks)
    )
    return Data(name="d.jsonl", sha256="00", task="score", items=items)


def test_tasks_are_counted_apart_and_progress_goes_over_all(runner: Runner) -> None:
    """In the order in which the data name them; a task's counts do not depend on what was counted before it."""
    steps: list[tuple[int, int]] = []
    tasks, layers = survey(runner, data("b", None, "b", "a"), lambda done, total: steps.append((done, total)))
    assert [(task.task, task.requests, task.tokens) for task in tasks] == [("b", 2, 24), ("score", 1, 12), ("a", 1, 12)]
    assert steps == [(done, 4) for done in range(1, 5)]
    assert [use.layer for use in layers] == list(range(6))
    for use in layers:
        assert [sum(counts) for counts in use.assignments] == [48, 24, 24]
        assert use.experts == 8
    alone = survey(runner, msgspec.structs.replace(data(), items=data("b", None, "b", "a").items[3:]))[1]
    assert [use.assignments for use in alone] == [use.assignments[2:] for use in layers]


def test_what_cannot_be_scored_is_left_out(runner: Runner) -> None:
    """A text of one token has no likelihood, and is no request."""
    one = data("a", "b")
    short = msgspec.structs.replace(one.items[0], ids=(1,))
    tasks, _ = survey(runner, msgspec.structs.replace(one, items=(short, one.items[1])))
    assert [task.task for task in tasks] == ["b"]


def test_too_many_tasks(runner: Runner) -> None:
    """Names that are as many as lines are no kinds of lines."""
    with pytest.raises(ConfigError, match=rf'name {MAX_TASKS + 1} tasks in "task", at most {MAX_TASKS}'):
        survey(runner, data(*(f"t{number}" for number in range(MAX_TASKS + 1))))
