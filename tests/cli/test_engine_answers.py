"""Many things asked of an engine at once, without a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from colibrid.cli.engine_answers import answers
from colibrid.config.settings import EngineSettings, ModelSettings, Settings
from colibrid.engine.library import Library
from colibrid.errors import RequestError

if TYPE_CHECKING:
    from colibrid.model.pack import Pack

PROMPT = [4092, 366, 198, 336, 339, 438]


def asked(pack: Pack, prompts: list[list[int]], texts: list[list[int]], context: int | None = None, most: int = 6):  # noqa: ANN201
    settings = Settings(engine=EngineSettings(device="cpu"), model=ModelSettings(max_seq_len=context))
    steps: list[tuple[int, int]] = []
    found = answers(
        settings,
        pack,
        Library(),
        prompts,
        texts,
        max_tokens=most,
        stop=(4093,),
        progress=lambda done, total: steps.append((done, total)),
    )
    return found, steps


def test_answers_come_in_the_order_of_the_prompts(bundled_pack: Pack) -> None:
    """Greedy, end ids left out; texts get the log-probability of each token but the first; progress counts all."""
    prompts = [[*PROMPT, 11], [*PROMPT, 13], [*PROMPT, 11]]
    found, steps = asked(bundled_pack, prompts, [PROMPT, PROMPT[:3]])
    assert found.tokens[0] == found.tokens[2] != found.tokens[1]
    assert all(len(tokens) <= 6 and 4093 not in tokens for tokens in found.tokens)
    assert [len(scores) for scores in found.logprobs] == [5, 2]
    assert found.logprobs[1] == pytest.approx(found.logprobs[0][:2], abs=1e-4)
    assert all(score <= 0 for scores in found.logprobs for score in scores)
    assert sorted(steps) == [(done, 5) for done in range(1, 6)]


def test_a_short_context_cuts(bundled_pack: Pack) -> None:
    """Answers and texts end with the context; a prompt that fills it is refused."""
    found, _ = asked(bundled_pack, [PROMPT], [PROMPT * 3], context=8)
    assert len(found.tokens[0]) <= 2
    assert len(found.logprobs[0]) == 7
    with pytest.raises(RequestError):
        asked(bundled_pack, [PROMPT * 2], [], context=8)
