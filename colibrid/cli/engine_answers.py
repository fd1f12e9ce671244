"""Asks a pack's engine many things at once, without a server: greedy answers, and how likely given texts are."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from colibrid.batch.request import ExpertPolicy
from colibrid.tune.runner import Runner, answer_request, score_request

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from colibrid.config.settings import Settings
    from colibrid.engine.library import Library
    from colibrid.model.pack import Pack


class Answers(NamedTuple):
    """What the engine said."""

    tokens: list[list[int]]  # of each prompt
    logprobs: list[list[float]]  # of each text's tokens but the first


def answers(
    settings: Settings,
    pack: Pack,
    library: Library,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    stop: tuple[int, ...],
    progress: Callable[[int, int], None],
) -> Answers:
    """Runs until everything is answered. Where the context is short, answers and texts are cut.

    ModelError, ConfigError, EngineError: as from serving. RequestError: a prompt leaves no room for an answer.
    """
    as_set = ExpertPolicy()
    with Runner(library, settings, pack) as runner:
        runner.serve(settings)
        context = runner.context
        asked = [answer_request(ids, as_set, max(1, min(max_tokens, context - len(ids))), stop) for ids in prompts]
        scored = [score_request(ids[:context], as_set) for ids in texts]
        found = runner.ask([*asked, *scored], progress)
    return Answers(
        [list(one.tokens) for one in found[: len(asked)]],
        [list(one.prompt_logprobs[1:]) for one in found[len(asked) :]],
    )
