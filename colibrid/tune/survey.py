"""Runs the user's data through the engine, task by task, and reads off which experts computed it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from colibrid.batch.request import ExpertPolicy
from colibrid.errors import ConfigError
from colibrid.tune.cold import expert_bytes
from colibrid.tune.progress import silent
from colibrid.tune.runner import answer_request, embed_request, score_request
from colibrid.tune.usage import LayerUse, TaskUse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from colibrid.batch.request import GenerateRequest
    from colibrid.tune.data import Data, Item
    from colibrid.tune.progress import Progress
    from colibrid.tune.runner import Answer, Runner

MAX_TASKS = 64  # names that lines may give
_OWN = ExpertPolicy()  # the model's own experts


def survey(runner: Runner, data: Data, progress: Progress = silent) -> tuple[tuple[TaskUse, ...], tuple[LayerUse, ...]]:
    """Counts of each task and layer, under the model's own setting. The service must be there. progress: in requests.

    ConfigError: the model has no experts, or the lines name too many tasks.
    """
    moe = [index for index, layer in enumerate(runner.manifest.layers) if layer.experts]
    if not moe:
        raise ConfigError(f"{runner.manifest.name} has no experts to report on; give a mixture-of-experts model")
    groups = _groups(data)
    total = sum(map(len, groups.values()))
    tasks: list[TaskUse] = []
    counts: list[list[list[int]]] = []  # of each task, by layer and expert
    done = 0
    before = runner.loads()
    for name, items in groups.items():
        answers = runner.ask([_request(runner, data, item) for item in items], _later(progress, done, total))
        done += len(items)
        after = runner.loads()
        counts.append([[new - old for old, new in zip(*pair, strict=True)] for pair in zip(before, after, strict=True)])
        tasks.append(TaskUse(task=name, requests=len(items), tokens=_tokens(answers)))
        before = after
    sizes = expert_bytes(runner.manifest)
    layers = tuple(
        LayerUse(
            layer=index,
            per_token=runner.manifest.layers[index].experts_per_token,
            bytes=tuple(sizes[index, expert] for expert in range(runner.manifest.layers[index].experts)),
            assignments=tuple(tuple(each[index]) for each in counts),
        )
        for index in moe
    )
    return tuple(tasks), layers


def _later(progress: Progress, before: int, total: int) -> Progress:
    """Progress of a part as progress of the whole."""
    return lambda done, _part: progress(before + done, total)


def _groups(data: Data) -> dict[str, list[Item]]:
    """Items by the task that their line names, else by what is done with them; in the order of the data."""
    found: dict[str, list[Item]] = {}
    for item in data.items:
        if data.task == "embed" or item.prompt is not None or item.scored:
            kind = data.task if data.task == "embed" else "score" if item.prompt is None else "generate"
            found.setdefault(item.task or kind, []).append(item)
    if len(found) > MAX_TASKS:
        raise ConfigError(
            f'--data {data.name}: its lines name {len(found)} tasks in "task", at most {MAX_TASKS} can be told apart; give '
            "lines of one kind one name"
        )
    return found


def _request(runner: Runner, data: Data, item: Item) -> GenerateRequest:
    if data.task == "embed":
        return embed_request(item.ids, _OWN, runner.settings.embeddings.pooling)
    if item.prompt is None:
        return score_request(item.ids, _OWN)
    room = runner.context - len(item.prompt)
    return answer_request(item.prompt, _OWN, min(data.longest_answer, room), runner.text.eos_token_ids)


def _tokens(answers: Sequence[Answer]) -> int:
    return sum(one.result.prompt_tokens + one.result.completion_tokens for one in answers)
